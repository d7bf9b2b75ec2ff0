"""Checkpoints that were made to do harm are refused in bounded time and memory. Nothing is executed, and nothing
hangs."""

from __future__ import annotations

import importlib
import io
import marshal
import mmap
import os
import pickle
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import traceback
from functools import partial
from multiprocessing import reduction
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import msgpack
import pytest
import torch
import zstandard

import zckpt
from tests.support.apart import Apart, columns, envelope, frame, write
from zckpt.format import names, packed

if TYPE_CHECKING:
    from collections.abc import Callable

SOUND = Path(__file__).parents[2] / "broken" / "sound"
DATA = "data-0123456789abcdef"
MIB = 1 << 20


def bounded(action: Callable[[], object], nbytes: int, seconds: int) -> str:
    """Returns the result of ``action`` as text. It runs in a child process, which may take ``nbytes`` of memory more
    than it has, and ``seconds`` of processor time."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        try:
            with open("/proc/self/statm", "rb") as statm:
                has = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (has + nbytes, has + nbytes))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            os.write(sender, str(action()).encode()[:4000])
        except BaseException:
            os.write(sender, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as result:
        if not select.select([result], [], [], 10 * seconds)[0]:  # a busy machine takes longer
            os.kill(child, signal.SIGKILL)
        text = result.read()
    os.waitpid(child, 0)
    return text.decode(errors="replace") or "killed"


def rules(path: Path) -> str:
    """Returns the rule that the reader finds broken, and the rules that the validator finds broken."""
    rule, length = "sound", 0
    try:
        checkpoint = zckpt.open(path, budget=zckpt.Budget(nbytes=8 * MIB, threads=1))
        checkpoint.load()
        for rank in range(checkpoint.world_size):
            checkpoint.load_pieces(rank)
            checkpoint.rank_state(rank)
        assert checkpoint.state is not None
    except zckpt.ZckptError as error:
        rule, length = error.rule or type(error).__name__, len(str(error))
    report = zckpt.validate(path)
    assert max(length, len(str(report))) < 20_000
    return f"{rule}: {' '.join(sorted({finding.rule for finding in report.findings}))}"


def test_the_bounds_of_these_tests_bind() -> None:
    # The memory is mapped, because an allocation could get memory that earlier tests have freed.
    assert "Cannot allocate memory" in bounded(lambda: len(mmap.mmap(-1, 300 * MIB)), 200 * MIB, 5)
    assert bounded(lambda: len(mmap.mmap(-1, 100 * MIB)), 200 * MIB, 5) == str(100 * MIB)
    assert bounded(lambda: sum(0 for _ in iter(int, 1)), 200 * MIB, 1) == "killed"


def announced(apart: Apart, path: Path) -> None:
    """Writes a manifest of 4 MiB with 800 nested arrays. Each announces four million elements, which would need
    terabytes."""
    apart.write(path)
    write(path / names.MANIFEST, b"\xdd\x00\x40\x00\x00" * 800 + bytes(4 * MIB))


def announced_in_the_body(apart: Apart, path: Path) -> None:
    apart.body["more"] = 0
    apart.write(path)
    raw = msgpack.unpackb((path / names.MANIFEST).read_bytes())[3]
    write(path / names.MANIFEST, envelope(raw[:-1] + b"\xdd\x00\x40\x00\x00" * 800 + bytes(4 * MIB)))


def announced_in_a_tree(apart: Apart, path: Path) -> None:
    apart.state = b"\xdd\x00\x40\x00\x00" * 800 + bytes(4 * MIB)
    apart.write(path)


def deep_tuples(apart: Apart, path: Path) -> None:
    """Writes a tree of 60 nested tuples, of which a parser copies 8 MiB at each level."""
    raw = msgpack.packb(bytes(8 * MIB))
    for _ in range(60):
        raw = msgpack.packb(msgpack.ExtType(3, b"\x91" + raw))
    apart.state = raw
    apart.write(path)


def tensors_at_one_place(apart: Apart, path: Path) -> None:
    """Writes a thousand tensors of 1 GiB, which are all stored in the same hole of a sparse file."""
    count, nbytes = 1000, 1 << 30
    ids = add_tensors(apart, count)
    apart.body["shapes"].append([nbytes])
    add_part(apart, "param", ids, 5, 4096 + nbytes)
    apart.index.append(zeros(ids) | {"length": [nbytes] * count})
    add_chunk(apart, 0, count, count)
    apart.write(path)
    write(path / DATA / "rank-00001" / "param.safetensors", b"")
    os.truncate(path / DATA / "rank-00001" / "param.safetensors", 4096 + nbytes)


def add_tensors(apart: Apart, count: int) -> list[int]:
    ids = [*range(5, 5 + count)]
    apart.body["names"] += [f"t{i}" for i in ids]
    return ids


def add_part(apart: Apart, name: str, ids: list[int], shape: int, nbytes: int) -> None:
    """Adds a part of rank 1 with layout 7."""
    parts, count = apart.body["parts"], len(ids)
    parts.append({"name": name, "layout": 7, "names": ids, "shapes": [shape] * count, "dtypes": ["U8"] * count})
    file = {"rank": 1, "part": len(parts) - 1, "tier": 0, "bytes": nbytes, "data_start": 4096, "first_block": 2}
    for column, value in file.items():
        apart.body["files"][column].append(value)


def zeros(ids: list[int], copies: int = 1) -> dict[str, list[int]]:
    """Returns the columns of a chunk in which each tensor has pieces without elements, all at one place."""
    nothing = [0] * len(ids) * copies
    columns_of_rows = {"name": ids, "count": [copies] * len(ids), "rank": [1] * len(nothing)}
    return columns_of_rows | dict.fromkeys(("tier", "length", "offset", "block"), nothing)


def add_chunk(apart: Apart, first_row: int, rows: int, pieces: int) -> None:
    chunk = {
        "layout": 7,
        "first_row": first_row,
        "rows": rows,
        "pieces": pieces,
        "offset": 0,
        "bytes": 1,
        "digest": b"",
    }
    for column, value in chunk.items():
        apart.body["chunks"][column].append(value)


def long_rank_tree(apart: Apart, path: Path) -> None:
    """Writes the tree of a rank with a length of 1 TiB, in a sparse file."""
    nbytes = 1 << 40
    apart.body["shapes"][4] = [nbytes]
    apart.index[1]["length"][1] = nbytes
    apart.body["files"]["bytes"][1] = 4096 + 8 + nbytes
    apart.seal -= {"bytes"}
    apart.write(path)
    os.truncate(path / DATA / "rank-00000" / "host.state.safetensors", 4096 + 8 + nbytes)


def long_table(apart: Apart, path: Path) -> None:
    apart.write(path)
    os.truncate(path / DATA / "rank-00000" / "digests.bin", 1 << 40)


def long_files(apart: Apart, path: Path) -> None:
    """Makes each data file 1 TiB long, as the manifest says. Nothing else in the manifest fits this length."""
    apart.body["files"]["bytes"] = [1 << 40, 1 << 40, 1 << 40]
    apart.seal -= {"bytes"}
    apart.write(path)
    for file in apart.files:
        os.truncate(path / DATA / file.name, 1 << 40)


def many_chunks(apart: Apart, path: Path) -> None:
    """Writes about as many chunks as are allowed, counted once for each part."""
    ids = add_tensors(apart, 64)
    for number in range(63):
        add_part(apart, f"p{number}", ids, 2, 4096)
    for number, name in enumerate(ids):
        apart.index.append(zeros([name]))
        add_chunk(apart, number, 1, 1)
    apart.write(path)


def many_names(apart: Apart, path: Path) -> None:
    """Writes 10,000 tensors without elements, each in two copies."""
    ids = add_tensors(apart, 10_000)
    add_part(apart, "p", ids, 2, 4096)
    apart.frames[2] = zstandard.ZstdCompressor(level=1).compress(columns(zeros(ids, copies=2)))
    apart.index.append({})
    add_chunk(apart, 0, len(ids), 2 * len(ids))
    apart.write(path)
    write(path / DATA / "rank-00001" / "p.safetensors", bytes(4096))


def bomb(apart: Apart, path: Path) -> None:
    """Writes a frame that announces 48 bytes and decompresses to 1 GiB."""
    content = columns(apart.index[0])
    block = (128 * 1024 << 3 | 2).to_bytes(3, "little") + b"\0"  # an RLE block, which is not the last block
    apart.frames[0] = frame(content)[:9] + block * 8192 + (1).to_bytes(3, "little")
    apart.write(path)


def nested_header(apart: Apart, path: Path) -> None:
    """Writes a header with a megabyte of empty lists in place of a shape."""
    apart.files[2].header["w@2:3"]["shape"] = [[] for _ in range(300_000)]
    apart.write(path)


def long_names(apart: Apart, path: Path) -> None:
    apart.files[2].header["w" * 20_000_000] = apart.files[2].header.pop("w@2:3")
    apart.write(path)


def nothing(apart: Apart, path: Path) -> None:
    apart.write(path)


@pytest.mark.parametrize(
    ("make", "expected", "mib", "seconds"),
    [
        (nothing, "sound: ", 400, 10),
        (announced, "M001: M001", 400, 10),
        (announced_in_the_body, "M005: M005", 400, 10),
        (announced_in_a_tree, "T001: T001", 500, 10),
        (deep_tuples, "T004: T004", 1500, 10),
        (tensors_at_one_place, "I007: I007 S003", 500, 10),
        (long_rank_tree, "T004: S005 T004", 500, 10),
        (long_table, "D001: D001", 500, 10),
        (long_files, "sound: S005", 500, 10),
        (bomb, "I003: I003", 500, 10),
        (nested_header, "D003: S004", 1000, 10),
        (long_names, "D003: N001", 1000, 10),
        (many_names, "sound: S003", 1000, 60),
        (many_chunks, "F001: F001", 500, 60),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_hostile_checkpoint_is_refused_within_bounds(
    tmp_path: Path, make: Callable[[Apart, Path], None], expected: str, mib: int, seconds: int
) -> None:
    make(Apart.of(SOUND), tmp_path / "c")
    assert bounded(partial(rules, tmp_path / "c"), mib * MIB, seconds) == expected


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def test_announced_sizes_are_checked_before_memory_is_taken() -> None:
    """msgpack before 1.2 takes the memory for all elements that are announced."""
    with mock.patch("zckpt.format.packed.msgpack.unpackb") as unpackb:
        with pytest.raises(packed.ERRORS):
            packed.unpack(b"\xdd\0\0\1\0" * 9 + bytes(99), packed.Containers(99))
        unpackb.assert_not_called()


SPECIAL: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": bind,
    "directory": Path.mkdir,
    "device": lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),
    "block device": lambda path: os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(7, 250)),
    "link out": lambda path: path.symlink_to("/etc/passwd"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "dangling link": lambda path: path.symlink_to("nowhere"),
}
DIRECTORIES = [DATA, f"{DATA}/rank-00001"]
FILES = [names.MANIFEST, "../latest", f"{DATA}/index.bin", f"{DATA}/rank-00001/digests.bin"]
FILES += [f"{DATA}/rank-00000/host.state.safetensors"]


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_refused_at_once_wherever_it_is(tmp_path: Path, kind: str) -> None:
    for number, name in enumerate(FILES if kind == "directory" else FILES + DIRECTORIES):
        path = tmp_path / str(number) / "c"
        Apart.of(SOUND).write(path)
        write(path.parent / "latest", b"c\n")
        (path / name).rename(path.parent / "moved")
        try:
            SPECIAL[kind](path / name)
        except PermissionError:
            pytest.skip("only root makes devices")
        assert bounded(partial(rules, path.parent), 500 * MIB, 5).startswith("F002: F002"), name


def test_what_is_no_directory_in_the_path_of_latest_is_refused_at_once(tmp_path: Path) -> None:
    for number, (kind, make) in enumerate((kind, make) for kind, make in SPECIAL.items() if kind != "directory"):
        for name in ("epoch0", "epoch0/c"):
            run = tmp_path / f"{number}-{name.count('/')}"
            Apart.of(SOUND).write(run / "epoch0" / "c")
            write(run / "latest", b"epoch0/c\n")
            (run / name).rename(run / "moved")
            try:
                make(run / name)
            except PermissionError:
                continue  # only root can make devices
            assert bounded(partial(rules, run), 500 * MIB, 5).startswith("F002: F002"), (kind, name)


def test_a_hard_link_is_a_file_like_any(tmp_path: Path) -> None:
    Apart.of(SOUND).write(tmp_path / "c")
    file = tmp_path / "c" / names.MANIFEST
    os.link(file, tmp_path / "other")
    assert rules(tmp_path / "c") == "sound: "


EXECUTES = (
    "code.__new__", "compile", "ctypes.dlopen", "exec", "function.__new__", "import", "marshal.", "os.exec", "os.fork",
    "os.posix_spawn", "os.spawn", "os.system", "pickle.find_class", "pty.spawn", "shelve.", "subprocess.Popen",
)  # fmt: skip
"""How the names of those of Python's audit events begin that say that something is executed."""


def executed(action: Callable[[], object]) -> str:
    """Returns the audit events of ``EXECUTES`` while ``action`` runs. A first run does what only a first run does, such
    as imports. Both runs are in a child process, because an audit hook stays in its process."""
    events: list[str] = []

    def audited() -> str:
        action()
        sys.addaudithook(lambda event, _: events.append(event) if event.startswith(EXECUTES) else None)
        action()
        return f"executed: {' '.join(events) or 'nothing'}"

    return bounded(audited, 200 * MIB, 20)


class Poison:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1 + 1",)


POISON = pickle.dumps(Poison())


def saved() -> io.BytesIO:
    file = io.BytesIO()
    torch.save(Poison(), file)
    return io.BytesIO(file.getvalue())


def test_nothing_in_a_sound_checkpoint_is_executed() -> None:
    assert executed(lambda: rules(SOUND)) == "executed: nothing"


@pytest.mark.parametrize("file", sorted(str(path.relative_to(SOUND)) for path in SOUND.rglob("*") if path.is_file()))
def test_no_file_of_a_checkpoint_is_taken_for_a_pickle(tmp_path: Path, file: str) -> None:
    shutil.copytree(SOUND, tmp_path, dirs_exist_ok=True)
    write(tmp_path / file, POISON)
    assert executed(lambda: rules(tmp_path)) == "executed: nothing"
    assert not rules(tmp_path).startswith("sound")


def test_no_tree_of_a_checkpoint_is_taken_for_a_pickle(tmp_path: Path) -> None:
    apart = Apart.of(SOUND)
    apart.state = POISON
    apart.write(tmp_path)
    assert executed(lambda: rules(tmp_path)) == "executed: nothing"
    assert rules(tmp_path) == "T001: T001"


PLANTED: dict[str, Callable[[], object]] = {
    "pickle": lambda: pickle.loads(POISON),
    "unpickler": lambda: pickle._Unpickler(io.BytesIO(POISON)).load(),
    "torch": lambda: torch.load(saved(), weights_only=False),
    "multiprocessing": lambda: reduction.ForkingPickler.loads(POISON),
    "marshal": lambda: marshal.loads(marshal.dumps(1)),
    "eval": lambda: eval("1 + 1"),
    "exec": lambda: exec("1 + 1"),
    "system": lambda: os.system("true"),
    "shell": lambda: subprocess.run("true", shell=True, check=True),
    "spawn": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    "import": lambda: (sys.modules.pop("colorsys", None), importlib.import_module("colorsys")),
}


@pytest.mark.parametrize("way", PLANTED)
def test_what_is_executed_is_noticed(way: str) -> None:
    assert executed(PLANTED[way]).removeprefix("executed: ").startswith(EXECUTES)
