"""Ways to spoil a sound checkpoint. Most functions return a case of ``tests/broken/make.py``."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from tests.support.apart import Apart, columns, digest, edit_field, envelope, write

if TYPE_CHECKING:
    from collections.abc import Callable

SOUND = Path(__file__).parents[1] / "broken" / "sound"
MANIFEST, DATA = "manifest.msgpack", "data-0123456789abcdef"
INDEX, TABLE, OTHER_TABLE = f"{DATA}/index.bin", f"{DATA}/rank-00000/digests.bin", f"{DATA}/rank-00001/digests.bin"
MASTER, STATE, OTHER = range(3)
"""The numbers of the three data files of the checkpoint that the cases spoil. Rank 0 has a data file of the part
master, with the pieces w@0:2, v and e, and one of the part state, with tree/0/0 and rank/0. Rank 1 has a data file of
the part master, with the piece w@2:3."""
PATHS = [f"{DATA}/rank-{name}.safetensors" for name in ("00000/master", "00000/host.state", "00001/master")]


@dataclass(frozen=True)
class Case:
    """How a sound checkpoint is spoilt, before it is put together and after that."""

    spoil: Callable[[Apart], object] = lambda apart: None
    """Changes the fields of the checkpoint before it is written."""
    after: Callable[[Path], object] = lambda path: None
    """Changes the files of the checkpoint after it is written."""
    loads: bool = False
    """Whether a load succeeds, although readers check the rule, because only validation checks this detail of it."""
    large: bool = False
    """Whether the fixture is too large to be committed."""
    at: str = "."
    """The path of the checkpoint in the fixture."""


def body(*way: Any, loads: bool = False, large: bool = False) -> Case:
    """Edits a field of the manifest's body. The last of ``way`` is the ``change`` of ``edit_field``, and the others are
    the way to the field."""
    *to_the_field, change = way

    def spoil(apart: Apart) -> None:
        apart.seal -= {"bytes"} | ({"index"} if to_the_field[0] in ("chunks", "index_bytes") else set())
        edit_field(apart.body, ".".join(map(str, to_the_field)), change)

    return Case(spoil, loads=loads, large=large)


def manifest(change: Callable[[bytes], bytes]) -> Case:
    return Case(after=lambda path: write(path / MANIFEST, change((path / MANIFEST).read_bytes())))


def repack(change: Callable[[bytes], bytes], large: bool = False) -> Case:
    """Replaces the bytes of the body, and puts them into a sound envelope."""
    case = manifest(lambda raw: envelope(change(msgpack.unpackb(raw)[3])))
    return Case(after=case.after, large=large)


def rows(number: int, **changed: list[int]) -> Case:
    return Case(lambda apart: apart.index[number].update(changed))


def chunk(make: Callable[[bytes], bytes]) -> Case:
    """Replaces the zstd frame of the first chunk. ``make`` gets the content of the chunk and returns the frame."""
    return Case(lambda apart: apart.frames.update({0: make(columns(apart.index[0]))}))


def header(file: int, *way: Any) -> Case:
    """Sets a value in a header. The last of ``way`` is the value, and the others are the way to it. None removes it.

    The digests fit the new bytes, in the blocks of the sound file.
    """
    *to_the_field, last, value = way

    def spoil(apart: Apart) -> None:
        holder = apart.files[file].header
        for key in to_the_field:
            holder = holder[key]
        if value is None:
            del holder[last]
        else:
            holder[last] = value

    return Case(spoil, reseal)


def text(file: int, old: str, new: str) -> Case:
    """Replaces text in a header, and makes the digests fit."""

    def after(path: Path) -> None:
        raw = (path / PATHS[file]).read_bytes()
        assert old.encode() in raw[:4096]
        head = raw[:4096].replace(old.encode(), new.encode(), 1).rstrip(b" ").ljust(4096)
        assert len(head) == 4096
        write(path / PATHS[file], head + raw[4096:])
        reseal(path)

    return Case(after=after)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the body of the manifest, and makes its digest fit."""
    body = msgpack.unpackb(msgpack.unpackb((path / MANIFEST).read_bytes())[3])
    change(body)
    write(path / MANIFEST, envelope(msgpack.packb(body)))


def retable(path: Path, rank: int, table: bytes) -> None:
    """Replaces the digest table of a rank, and makes its digest fit."""
    write(path / DATA / f"rank-{rank:05d}" / "digests.bin", table)
    edit(path, lambda body: body["digests"].__setitem__(rank, digest(table)))


def reseal(path: Path) -> None:
    """Makes the digests fit the present bytes of the files, in the blocks of the sound files."""
    sound = Apart.of(SOUND)
    for rank, files in enumerate((sound.files[:2], sound.files[2:])):
        table = []
        for data_file in files:
            raw, at = (path / DATA / data_file.name).read_bytes(), 0
            for block in data_file.blocks(4096):
                table.append(digest(raw[at : at + len(block)]))
                at += len(block)
        retable(path, rank, b"".join(table))


def file(path: str, change: Callable[[bytes], bytes], *, loads: bool = False) -> Case:
    """Changes the bytes of a file, without making any length or digest fit."""
    return Case(after=lambda at: write(at / path, change((at / path).read_bytes())), loads=loads)


def make_a_directory_of_the_index(path: Path) -> None:
    (path / INDEX).unlink()
    write(path / INDEX / "x", b"")


def blocked(at: str, component: str) -> Case:
    """Puts a regular file in the place of a directory of the fixture, which has the checkpoint at the path ``at``."""

    def after(path: Path) -> None:
        place = path.joinpath(*[".."] * len(Path(at).parts), component).resolve()
        shutil.rmtree(place)
        if at != ".":
            write(place.parent / "latest", f"{at}\n".encode())
        write(place, b"")

    return Case(after=after, at=at)


def link(path: str) -> Case:
    """Moves a file or directory aside, and puts a link to it in its place."""

    def after(at: Path) -> None:
        place = at / path
        place.rename(place.with_name("moved"))
        place.symlink_to("moved")

    return Case(after=after)


def latest(content: bytes) -> Case:
    return Case(after=lambda path: write(path.parent / "latest", content), at="c")


def nested_latest(link: str | None = None) -> Case:
    """Writes a ``latest`` of two components. ``link`` is the path of the one that becomes a link, or None."""

    def after(path: Path) -> None:
        run = path.parents[1]
        write(run / "latest", b"epoch0/step1\n")
        if link is not None:
            (run / link).rename(run / "moved")
            (run / link).symlink_to(os.path.relpath(run / "moved", (run / link).parent))

    return Case(after=after, at="epoch0/step1")


def tree(value: Any, *, large: bool = False) -> Case:
    """Replaces the root tree. A value of bytes is taken as packed already."""
    return Case(lambda apart: setattr(apart, "state", value() if callable(value) else value), large=large)


def filler(nbytes: int, dtype: str = "U8", content: bytes = b"\0") -> Case:
    """Adds a filler at the end of rank 1's file."""

    def spoil(apart: Apart) -> None:
        data_file = apart.files[OTHER]
        data_file.header["@"] = {"dtype": dtype, "shape": [nbytes], "data_offsets": [4, 4 + nbytes]}
        data_file.data += content.rjust(nbytes, b"\0")

    return Case(spoil)


def flip(path: str, at: int, *, loads: bool = False) -> Case:
    def change(raw: bytes) -> bytes:
        spoilt = bytearray(raw)
        spoilt[at] ^= 1
        return bytes(spoilt)

    return file(path, change, loads=loads)


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def tuples(levels: int, raw: bytes) -> bytes:
    for _ in range(levels):
        raw = msgpack.packb(msgpack.ExtType(3, b"\x91" + raw))
    return raw


def sparse(path: str, nbytes: int) -> Case:
    return Case(after=lambda at: os.truncate(at / path, nbytes), large=True)


OLDER = "fedcba9876543210"


def shared(listed: Any, *, header: str = OLDER, own: bool = False) -> Case:
    """Sets the field ``shared`` of the manifest to ``listed``.

    ``header`` is the save id in the header of rank 0's master. With ``own``, the checkpoint does not require the
    feature shared-files.
    """

    def spoil(apart: Apart) -> None:
        apart.files[MASTER].header["__metadata__"]["zckpt.save_id"] = header
        apart.body |= {"requires": [] if own else ["shared-files"]} | ({} if listed is None else {"shared": listed})

    return Case(spoil)


GRID = [[[0, 1, 2, 1], [1, 1]]]
"""A grid of the tensor w, of which rank 0 has the elements 0 and 2 then."""


def divided(grids: Any = ([], GRID), ids: Any = (1, 0, 0), header: Any = GRID) -> Case:
    """Sets the field ``grids`` of the manifest and the grid ids of the part master. ``header`` is the grid of w in the
    headers, or a map of the grids of w and of v, which is whole."""

    def spoil(apart: Apart) -> None:
        apart.body |= {"requires": ["box"]} | ({} if grids is None else {"grids": list(grids)})
        apart.body["parts"][0]["grids"] = list(ids)
        for number in (MASTER, OTHER):
            if header is not None:
                of_header = header if isinstance(header, dict) else {"w": header}
                metadata = apart.files[number].header["__metadata__"]
                metadata["zckpt.grids"] = json.dumps(of_header)
                metadata["zckpt.shapes"] = json.dumps({"w": [3], **({"v": [2]} if "v" in of_header else {})})

    return Case(spoil)
