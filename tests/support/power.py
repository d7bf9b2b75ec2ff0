"""Simulates what a disk may hold after a loss of power.

``recorded`` records the system calls of zckpt. ``Disk`` plays them back and knows what is durable: the content of a
file since the fsync of the file, and the names in a directory since the fsync of the directory. After a loss of power,
each other change may be there, or be missing, or be there in part, independently of the others. No real file system
loses more than that.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from zckpt.storage import files, local_reader, local_store, local_writer
from zckpt.system import linux

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

SECTOR_BYTES = 512


@dataclass(frozen=True)
class Op:
    """One system call: mkdir, create, write, clone, extend, fsync, link, rename, unlink or rmdir."""

    call: str
    path: str
    data: bytes = b""
    offset: int = 0
    to: str = ""


class Killed(BaseException):
    """Stands for the death of the process. The calls after it do not happen."""


@dataclass
class Recorder:
    """Takes the place of ``os`` and the calls that only Linux has, on a file system that shares pages."""

    die_at: int | None = None
    """The number of the call before which the process dies, or None if it does not die."""
    ops: list[Op] = field(default_factory=list)
    """The calls so far."""
    paths: dict[int, str] = field(default_factory=dict)
    """The path of each open file, by its descriptor."""
    lock: Any = field(default_factory=threading.RLock)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def note(self, call: str, path: str, **more: Any) -> None:
        with self.lock:
            if self.die_at is not None and len(self.ops) >= self.die_at:
                raise Killed
            self.ops.append(Op(call, os.path.abspath(path), **more))

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT and os.path.isdir(os.path.dirname(path)):
            self.note("create", path)
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
        self.paths[fd] = path
        return fd

    def pwritev(self, fd: int, views: Any, offset: int) -> int:
        self.note("write", self.paths[fd], data=b"".join(map(bytes, views)), offset=offset)
        return os.pwritev(fd, views, offset)

    def write(self, fd: int, data: Any) -> int:
        self.note("write", self.paths[fd], data=bytes(data), offset=os.lseek(fd, 0, os.SEEK_CUR))
        return os.write(fd, data)

    def reserve(self, fd: int, nbytes: int) -> None:
        self.note("extend", self.paths[fd], offset=nbytes)
        RESERVE(fd, nbytes)

    def share_blocks(self, fd: int, source_fd: int, source_offset: int, nbytes: int, offset: int) -> bool:
        data = os.pread(source_fd, nbytes or os.fstat(source_fd).st_size, source_offset)
        self.note("clone", self.paths[fd], data=data, offset=offset)
        os.pwrite(fd, data, offset)
        return True

    def fsync(self, fd: int) -> None:
        self.note("fsync", self.paths[fd])
        os.fsync(fd)

    def mkdir(self, path: str) -> None:
        if not os.path.lexists(path):
            self.note("mkdir", path)
        os.mkdir(path)

    def link(self, path: str, to: str) -> None:
        if not os.path.lexists(to):
            self.note("link", path, to=os.path.abspath(to))
        os.link(path, to)

    def rename(self, path: str, to: str) -> None:
        if os.path.lexists(path):
            self.note("rename", path, to=os.path.abspath(to))
        os.rename(path, to)

    def replace(self, path: str, to: str) -> None:
        self.rename(path, to)

    def unlink(self, path: str) -> None:
        if os.path.isfile(path):
            self.note("unlink", path)
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        if os.path.isdir(path) and not os.listdir(path):
            self.note("rmdir", path)
        os.rmdir(path)


RESERVE = linux.reserve


@contextmanager
def recorded(die_at: int | None = None) -> Iterator[Recorder]:
    recorder = Recorder(die_at)
    with (
        mock.patch.multiple(files, os=recorder),
        mock.patch.multiple(local_reader, os=recorder),
        mock.patch.multiple(local_writer, os=recorder),
        mock.patch.multiple(linux, reserve=recorder.reserve, share_blocks=recorder.share_blocks),
        mock.patch.multiple(local_store, os=recorder),
    ):
        yield recorder


@dataclass
class File:
    durable: bytes = b""
    pending: list[Op] = field(default_factory=list)

    def sync(self) -> None:
        self.durable, self.pending = self.content(None), []

    def content(self, choice: random.Random | None) -> bytes:
        """Returns the content with all pending writes, or with those that ``choice`` keeps."""
        data = bytearray(self.durable)
        for op in self.pending:
            nbytes = op.offset + len(op.data)
            fate = "keep" if choice is None else fate_of(choice)
            if fate == "drop":
                continue
            data.extend(bytes(max(nbytes - len(data), 0)))
            if fate == "keep":
                data[op.offset : nbytes] = op.data
            elif fate == "prefix":
                prefix = choice.randrange(len(op.data) + 1) if choice else 0
                data[op.offset : op.offset + prefix] = op.data[:prefix]
            else:  # the file has its new length and some of the new sectors
                for start in range(0, len(op.data), SECTOR_BYTES):
                    if choice and choice.random() < 0.5:
                        sector = op.data[start : start + SECTOR_BYTES]
                        data[op.offset + start : op.offset + start + len(sector)] = sector
        return bytes(data)


@dataclass
class Directory:
    durable: dict[str, File | Directory] = field(default_factory=dict)
    entries: dict[str, File | Directory] = field(default_factory=dict)
    pending: list[tuple[str, str, File | Directory | None]] = field(default_factory=list)
    """The changes since the last fsync: a name that is removed or "", a name that is added or "", and its file."""

    def change(self, old: str, new: str, node: File | Directory | None) -> None:
        self.pending.append((old, new, node))
        self._apply(self.entries, old, new, node)

    @staticmethod
    def _apply(entries: dict[str, Any], old: str, new: str, node: File | Directory | None) -> None:
        entries.pop(old, None)
        if node is not None:
            entries[new] = node

    def sync(self) -> None:
        self.durable, self.pending = dict(self.entries), []

    def names(self, choice: random.Random) -> dict[str, File | Directory]:
        entries = dict(self.durable)
        for change in self.pending:
            if fate_of(choice) == "keep":
                self._apply(entries, *change)
        return entries


def fate_of(choice: random.Random) -> str:
    """Draws the fate of a pending change: "keep", "drop", "prefix" or "sectors"."""
    return choice.choice(choice.fates)  # type: ignore[attr-defined]


# Most choices are all or nothing, because these do the most damage.
FATES = (
    ["drop"], ["keep"], ["drop", "keep"], ["drop", "keep", "prefix", "sectors"], ["keep", "keep", "keep", "drop"],
    ["prefix", "sectors"], ["drop", "drop", "drop", "keep"],
)  # fmt: skip


class Disk:
    """Plays back the operations below ``root``. The files that are there at first are durable."""

    def __init__(self, root: Path) -> None:
        self.base = str(root)
        self.root = self._copy(root)

    def _copy(self, path: Path) -> Directory:
        directory = Directory()
        for entry in path.iterdir():
            directory.entries[entry.name] = self._copy(entry) if entry.is_dir() else File(entry.read_bytes())
        directory.sync()
        return directory

    def find(self, path: str) -> tuple[Directory, str]:
        """Returns the directory of a path, and the last component of the path."""
        *way, name = os.path.relpath(path, self.base).split("/")
        node = self.root
        for step in way:
            below = node.entries[step]
            assert isinstance(below, Directory)
            node = below
        return node, name

    def play(self, op: Op) -> None:
        if op.path == self.base:
            if op.call == "fsync":
                self.root.sync()
            return
        if not op.path.startswith(self.base + "/"):
            assert op.call == "fsync", f"{op.call} of {op.path}, outside of the disk"
            return
        parent, name = self.find(op.path)
        if op.call in ("mkdir", "create"):
            parent.change("", name, Directory() if op.call == "mkdir" else File())
        elif op.call == "rename":
            assert os.path.dirname(op.path) == os.path.dirname(op.to), "a rename to another directory is not atomic"
            parent.change(name, os.path.basename(op.to), parent.entries[name])
        elif op.call == "link":
            other, new_name = self.find(op.to)
            other.change("", new_name, parent.entries[name])
        elif op.call in ("unlink", "rmdir"):
            parent.change(name, "", None)
        elif op.call == "fsync":
            parent.entries[name].sync()
        else:
            file = parent.entries[name]
            assert isinstance(file, File)
            file.pending.append(op)

    def after_loss(self, choice: random.Random) -> dict[str, bytes | None]:
        """Draws what may be there after a loss of power: the content of files by path, and None for directories."""
        choice.fates = choice.choice(FATES)  # type: ignore[attr-defined]
        tree: dict[str, bytes | None] = {}
        contents: dict[int, bytes] = {}

        def walk(directory: Directory, path: str) -> None:
            for name, node in directory.names(choice).items():
                below = f"{path}{name}"
                if isinstance(node, Directory):
                    tree[below] = None
                    walk(node, below + "/")
                else:
                    tree[below] = contents.setdefault(id(node), node.content(choice))

        walk(self.root, "")
        return tree


def make(tree: dict[str, bytes | None], root: Path) -> None:
    """Replaces ``root`` by a directory with these files."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for path, data in tree.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


def fingerprint(tree: dict[str, bytes | None]) -> bytes:
    state = hashlib.blake2b()
    for path, data in sorted(tree.items()):
        state.update(f"{path}\0{-1 if data is None else len(data)}\0".encode() + (data or b""))
    return state.digest()
