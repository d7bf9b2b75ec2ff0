"""Writes a broken checkpoint for each way to break a rule.

``python tests/broken/make.py`` writes all fixtures, and the list of them in ``spec/fixtures.json``.
``python tests/broken/make.py NAME DIRECTORY`` writes one fixture to another place.

Each fixture is the checkpoint ``sound/`` with one defect. Its directory is named after the rule that it breaks and
after the defect. Lengths and digests are made to fit, so that no other rule is broken, or none that a reader checks
before. Large fixtures are not committed. The tests make them.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import msgpack
import xxhash

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.support.apart import Apart, DataFile, frame, write  # noqa: E402
from tests.support.spoil import (  # noqa: E402
    DATA,
    GRID,
    INDEX,
    MANIFEST,
    MASTER,
    OLDER,
    OTHER,
    OTHER_TABLE,
    PATHS,
    SOUND,
    STATE,
    TABLE,
    Case,
    blocked,
    body,
    chunk,
    divided,
    edit,
    file,
    filler,
    flip,
    header,
    latest,
    link,
    make_a_directory_of_the_index,
    manifest,
    nested,
    nested_latest,
    repack,
    retable,
    rows,
    shared,
    sparse,
    text,
    tree,
    tuples,
)


def three_copies(apart: Apart) -> None:
    apart.body["chunks"]["pieces"][0] = 6
    columns = {"rank": [0, 1, 0, 0, 0, 0], "tier": [0] * 6, "length": [2, 1, 2, 0, 0, 0], "block": [1, 1, 2, 3, 3, 3]}
    apart.index[0].update(columns, count=[2, 1, 3], offset=[0, 0, 8, 16, 16, 16])


def many_chunks(apart: Apart) -> None:
    """Makes 2050 chunks. Two new parts share 2048 of them, so that 4098 chunks have to be checked."""
    ids = [*range(5, 5 + 2048)]
    apart.body["names"] += [f"t{i}" for i in ids]
    columns = {"names": ids, "shapes": [2] * len(ids), "dtypes": ["U8"] * len(ids)}
    apart.body["parts"] += [EMPTY_PART | columns | {"name": name} for name in ("param", "twin")]
    for row, name in enumerate(ids):
        nothing = {key: [0] for key in ("tier", "length", "offset", "block")}
        apart.index.append({"name": [name], "count": [1], "rank": [1], **nothing})
        chunk = {"layout": 2, "first_row": row, "rows": 1, "pieces": 1, "offset": 0, "bytes": 1, "digest": b""}
        for column, value in chunk.items():
            apart.body["chunks"][column].append(value)


def many_chunks_with_the_feature(apart: Apart) -> None:
    """Makes the chunks of ``many_chunks``, with the feature that allows them, and the files of the new parts."""
    many_chunks(apart)
    apart.body["requires"] = ["pieces"]
    entry = {"dtype": "U8", "shape": apart.body["shapes"][2], "data_offsets": [0, 0]}
    for part in (2, 3):
        name = apart.body["parts"][part]["name"]
        metadata = apart.files[-1].header["__metadata__"] | {"zckpt.part": name, "zckpt.shapes": "{}"}
        entries = {f"t{i}": entry for i in range(5, 5 + 2048)}
        file = DataFile(f"rank-00001/{name}.safetensors", {"__metadata__": metadata} | entries, bytearray())
        apart.files.append(file)
        place = {"rank": 1, "part": part, "tier": 0, "bytes": 0, "data_start": 0, "first_block": 0}
        for column, value in place.items():
            apart.body["files"][column].append(value)
    for columns in apart.index[2:]:
        columns["block"] = [-(-len(file.head) // apart.body["block_bytes"])]


def dense(apart: Apart) -> None:
    """Claims 2^26 + 1 pieces, with the feature that allows them, in an index of few bytes."""
    apart.body["requires"] = ["pieces"]
    apart.body["chunks"]["pieces"] = [1 << 26, 1]


def two_huge_copies(apart: Apart) -> None:
    """Gives a tensor two whole copies, which have 2^62 elements together."""
    apart.body["shapes"][0] = [1 << 61]
    apart.body["parts"][0]["dtypes"][0] = "U8"
    apart.index[0]["length"][:2] = [1 << 61, 1 << 61]


def two_huge_tensors(apart: Apart) -> None:
    """Gives a chunk two rows, which have 2^62 elements only together."""
    apart.body["shapes"][:2] = [[1 << 61], [1 << 61]]
    apart.body["parts"][0]["dtypes"][:2] = ["U8", "U8"]
    apart.index[0]["length"][:3] = [1 << 60, 1 << 60, 1 << 61]


def booleans(apart: Apart) -> None:
    """Makes v a BOOL tensor that has bytes other than 0 and 1."""
    apart.body["shapes"][1] = [8]
    apart.body["parts"][0]["dtypes"][1] = "BOOL"
    apart.index[0]["length"][2] = 8
    apart.files[MASTER].header["v"] |= {"dtype": "BOOL", "shape": [8]}
    apart.files[MASTER].data[8:16] = bytes([0, 1, 2, 127, 128, 255, 0, 1])


def checksum(content: bytes) -> bytes:
    """Returns a zstd frame with a content checksum."""
    raw = bytearray(frame(content))
    raw[4] |= 4
    return bytes(raw) + (xxhash.xxh64_intdigest(content) & 0xFFFFFFFF).to_bytes(4, "little")


def other_integers(raw: bytes) -> bytes:
    """Returns the body with the same numbers in other forms, which are signed, or wider than they have to be."""
    forms = {b"\xa4step\x07": b"\xa4step\xd0\x07", b"\xaaworld_size\x02": b"\xaaworld_size\xd3" + b"\2".rjust(8, b"\0")}
    forms[b"\xa4rank\x93\0\0\1"] = b"\xa4rank\xdc\0\3\xd1\0\0\xce\0\0\0\0\xd2\0\0\0\1"
    for short, long in forms.items():
        assert raw.count(short) == 1
        raw = raw.replace(short, long)
    return raw


def two_at_one_place(apart: Apart) -> None:
    """Makes v longer and puts it at the place of w, so that both together have more bytes than the file."""
    apart.body["shapes"][1] = [4]
    apart.index[0].update(length=[2, 1, 4, 0], offset=[0, 0, 0, 16])


def two_alike_at_one_place(apart: Apart) -> None:
    data = apart.files[MASTER].data
    data[8:16] = data[:8]
    apart.index[0].update(offset=[0, 0, 0, 16])


def rank_tree_of_integers(apart: Apart) -> None:
    apart.body["parts"][1]["dtypes"][1] = "I8"
    apart.files[STATE].header["rank/0"]["dtype"] = "I8"


def digest_between(path: Path) -> None:
    """Puts a digest of no block between the digests of rank 0's two files."""
    table = (path / TABLE).read_bytes()
    retable(path, 0, table[:48] + b"\0" * 16 + table[48:])
    edit(path, lambda body: body["files"]["first_block"].__setitem__(STATE, 4))


EMPTY_PART: dict[str, Any] = {"layout": 2, "names": [], "shapes": [], "dtypes": []}
REFERENCE = msgpack.ExtType(1, b"tree/0/0")
CASES: dict[str, Case] = {
    "N001-empty": body("names", 1, ""),
    "N001-control-character": body("names", 1, "v\n"),
    "N001-long": body("names", 1, "v" * 1025),
    "N001-alias": body("aliases", {"\x7f": "w"}),
    "N002-filler": body("names", 1, "@v"),
    "N002-metadata": body("names", 1, "__metadata__"),
    "N002-span": body("aliases", {"v@0:1": "w"}),
    "N003-path": body("parts", 0, "name", "../master"),
    "N003-long": body("parts", 0, "name", "m" * 65),
    "N004-path": body("save_id", "../../../../etc0"),
    "N004-upper-case": body("save_id", "0123456789ABCDEF"),
    "N004-shared": shared({"../../../../etc0": [MASTER]}),
    "L001-path": latest(b"../c\n"),
    "L001-two-lines": latest(b"c\n\n"),
    "L001-long": latest(b"c" * 257),
    "L001-nothing": latest(b""),
    "L001-absolute": latest(b"/c\n"),
    "L001-slash-at-the-end": latest(b"c/\n"),
    "L001-empty-component": latest(b"c//c\n"),
    "L001-parent": latest(b"c/../c\n"),
    "L001-itself": latest(b"./c\n"),
    "L001-control-character": latest(b"c/\x7f\n"),
    "M001-more-bytes": manifest(lambda raw: raw + b"\0"),
    "M001-long-form": manifest(lambda raw: b"\xdc\0\4" + raw[1:]),
    "M001-five": manifest(lambda raw: b"\x95" + raw[1:] + b"\0"),
    "M001-version": body("version", [1, 1]),
    "M001-no-bytes": manifest(lambda raw: b""),
    "M001-announced": manifest(lambda raw: raw[:1] + b"\xdd\xff\xff\xff\xff" * 99),
    "M001-cut": manifest(lambda raw: raw[:-1]),
    "M002-cut": manifest(lambda raw: raw[:7] + b"\x92\2\0"),
    "M002-more-bytes": manifest(lambda raw: b"\x92" + raw[1:7] + b"\x92\2\0\xc1"),
    "M002-negative": manifest(lambda raw: raw[:7] + b"\x92\1\xff" + raw[10:]),
    "M002-major": Case(lambda apart: setattr(apart, "version", [2, 0])),
    "M003-flip": flip(MANIFEST, -3),
    "M003-long-form": manifest(lambda raw: b"\xdc\0\4" + raw[1:-1] + b"\0"),
    "M004-long": sparse(MANIFEST, (256 << 20) + 1),
    "M005-duplicate-key": repack(lambda raw: b"\xde" + (17).to_bytes(2, "big") + raw[3:] + b"\xa4step\x07"),
    "M005-missing": body("writer", None),
    "M005-no-map": repack(lambda raw: b"\x90"),
    "M005-announced": repack(lambda raw: b"\xdd\xff\xff\xff\xff" * 99),
    "M005-deep": repack(lambda raw: b"\x91" * 5000 + b"\0"),
    "M005-boolean": body("step", True),
    "M005-large-number": body("step", 1 << 62),
    "M005-ranks": body("world_size", (1 << 20) + 1),
    "M005-digests": body("world_size", 3),
    "M005-small-blocks": body("block_bytes", 0),
    "M005-large-blocks": body("block_bytes", (1 << 26) + 4096),
    "M005-odd-blocks": body("block_bytes", 4100),
    "M005-columns": body("files", "tier", [0, 1]),
    "M005-shared-number": shared({5: [MASTER]}),
    "M005-save-id": body("save_id", None),
    "M005-shared": shared(None),
    "M005-shared-files": shared({OLDER: [True]}),
    "M005-layout": body("parts", 0, "layout", (1 << 22) + 1),
    "M005-parts": body(
        "parts",
        lambda parts: [*parts, *[EMPTY_PART | {"name": f"p{i}"} for i in range(255)]],
    ),
    "M005-names": body("names", lambda names: [*names, *map(str, range(1 << 22))], large=True),
    "M005-aliases": body("aliases", lambda _: dict.fromkeys(map(str, range((1 << 22) + 1)), "w"), large=True),
    "M005-containers": repack(
        lambda raw: b"\xde\0\x11" + raw[3:] + b"\xa4more\xdd\0\x40\0\0" + b"\x80" * (1 << 22), large=True
    ),
    "M006-before-the-rest": Case(lambda apart: apart.body.update(requires=["zstd"], names=1, chunks=None)),
    "M006-feature": body("requires", ["zstd"]),
    "M007-name": body("names", 1, "w"),
    "M007-part": body("parts", 1, "name", "master"),
    "M008-dimensions": body("shapes", 0, [1] * 64 + [3]),
    "M008-negative": body("shapes", 0, [-3]),
    "M008-boolean": body("shapes", 0, [True]),
    "M008-no-array": body("shapes", 0, 3),
    "M008-elements": body("shapes", 0, [1 << 32, 1 << 32]),
    "M008-bytes": body("shapes", 0, [1 << 60]),
    "M008-empty": body("shapes", 2, [0, 1 << 61, 2]),
    "M009-dtype": body("parts", 0, "dtypes", 0, "F31"),
    "M010-order": body("parts", 0, "names", [0, 2, 1]),
    "M010-name": body("parts", 1, "names", [3, 5]),
    "M010-shape": body("parts", 1, "shapes", [3, 5]),
    "M010-columns": body("parts", 0, "dtypes", ["F32", "F32"]),
    "M011-order": body("files", "rank", [1, 0, 0]),
    "M011-rank": body("files", "rank", [0, 0, 2]),
    "M011-tier": body("files", "tier", [0, 3, 0]),
    "M012-nothing": body("aliases", {"head": "x"}),
    "M012-name": body("aliases", {"v": "w"}),
    "M013-gap": body("chunks", "offset", lambda offset: [0, offset[1] + 1]),
    "M013-length": body("index_bytes", lambda nbytes: nbytes + 1),
    "M013-large": body("chunks", "bytes", [136, (64 << 20) + 1]),
    "M013-row": body("chunks", "first_row", [0, 1]),
    "M013-layout": body("chunks", "layout", [0, 2]),
    "M013-pieces": body("chunks", "pieces", [1 << 26, 1]),
    "M013-chunks": Case(many_chunks, large=True),
    "M013-dense": Case(dense),
    "M013-few": body("requires", ["pieces"]),
    "M014-nothing": shared({}, header="0123456789abcdef"),
    "M014-no-file": shared({OLDER: [MASTER], "0" * 16: []}),
    "M014-order": shared({OLDER: [STATE, MASTER]}),
    "M014-twice": shared({OLDER: [MASTER, MASTER]}),
    "M014-two-saves": shared({OLDER: [MASTER], "0" * 16: [MASTER]}),
    "M014-own": shared({"0123456789abcdef": [MASTER]}, header="0123456789abcdef"),
    "M014-file": shared({OLDER: [MASTER, 3]}),
    "M005-grids": divided(None),
    "M010-grids": divided(ids=[1, 0]),
    "M010-no-grids": divided(ids=[]),
    "M015-nothing": divided(ids=[0, 0, 0], header=None),
    "M015-first": divided([GRID, []], [0, 1, 1]),
    "M015-second": divided([[], GRID, []]),
    "M015-gap": divided([[], [[[0, 1], [2, 1]]]]),
    "M015-twice": divided([[], [[[0, 2], [1, 2]]]]),
    "M015-alone": divided([[], [[[0, 3]]]]),
    "M015-size": divided([[], [[[0, 1], [1, 1]]]]),
    "M015-dimensions": divided([[], [[], [[0, 1], [1, 2]]]]),
    "M015-id": divided(ids=[2, 0, 0]),
    "M015-odd": divided([[], [[[0, 1, 1], [1, 2]]]]),
    "M015-zero": divided([[], [[[0, 3], [3, 0]]]]),
    "M015-no-section": divided([[], [[[0, 1], [], [1, 2]]]]),
    "M015-no-elements": divided([[], GRID, [[[0, 1], [1, 1]]]], [1, 0, 2]),
    "S006-grid": divided(header=[[[0, 1], [2, 1]]]),
    "S007-grid": divided(header=None),
    "S007-other-grid": divided(header=[[[0, 1, 1, 1], [2, 1]]]),
    "M015-large": divided([[], GRID, [[[0, (1 << 62) - 1], [(1 << 62) - 1, 1]]]]),
    "S007-grid-of-whole": divided(header={"w": GRID, "v": [[[1, 1], [0, 1]]]}),
    "S007-whole-grid": divided([[], GRID, [[[1, 1], [0, 1]]]], [1, 2, 0]),
    "I001-long": file(INDEX, lambda raw: raw + b"\0"),
    "I002-flip": flip(INDEX, 40),
    "I003-size": chunk(lambda content: frame(content, size=len(content) + 1)),
    "I003-longer": chunk(lambda content: frame(content + b"\0")),
    "I003-bomb": chunk(lambda content: frame(content)[:9] + b"\xfb\xff\xff\0"),
    "I003-size-unknown": chunk(lambda content: b"\x28\xb5\x2f\xfd\0\0" + frame(content)[9:]),
    "I003-window": chunk(lambda content: b"\x28\xb5\x2f\xfd\x80\x88" + frame(content)[5:]),
    "I003-two-frames": chunk(lambda content: frame(content) + b"\x50\x2a\x4d\x18\0\0\0\0"),
    "I003-no-frame": chunk(lambda content: content),
    "I003-large": body("chunks", "pieces", [(64 << 20) // 25, 2]),
    "I004-names": rows(0, name=[0, 2, 1]),
    "I004-count": rows(0, count=[2, 2, 0]),
    "I004-sum": rows(0, count=[2, 1, 2]),
    "I004-wrapped": rows(0, count=[(1 << 32) - 1, 2, 3]),
    "I005-gap": rows(0, length=[1, 1, 2, 0]),
    "I005-overlap": rows(0, length=[2, 2, 2, 0]),
    "I005-nothing": rows(1, length=[1, 0]),
    "I005-copies": Case(three_copies),
    "I005-sum": Case(two_huge_copies),
    "I005-wrapped": rows(0, length=[(1 << 64) - 1, 4, 2, 0]),
    "I006-large": Case(two_huge_tensors),
    "I006-outside": rows(0, offset=[0, 4, 8, 16]),
    "I006-wrapped": rows(0, offset=[(1 << 64) - 8, 0, 8, 16]),
    "I006-unlisted": rows(0, tier=[0, 2, 0, 0]),
    "I006-rank": rows(0, rank=[0, 2, 0, 0]),
    "I006-odd": rows(0, offset=[0, 0, 6, 16]),
    "I007-one-place": Case(two_at_one_place),
    "F001-data": Case(after=lambda path: (path / PATHS[OTHER]).unlink()),
    "F001-table": Case(after=lambda path: (path / TABLE).unlink()),
    "F001-index": Case(after=lambda path: (path / INDEX).unlink()),
    "F002-data": link(PATHS[OTHER]),
    "F002-table": link(OTHER_TABLE),
    "F002-index": link(INDEX),
    "F002-manifest": link(MANIFEST),
    "F002-rank": link(f"{DATA}/rank-00001"),
    "F002-save": link(DATA),
    "F002-component": blocked(".", f"{DATA}/rank-00001"),
    "F002-directory": Case(after=make_a_directory_of_the_index),
    "F002-latest-component": blocked("epoch0/step1", "epoch0"),
    "F002-latest": nested_latest(link="epoch0"),
    "F002-latest-last": nested_latest(link="epoch0/step1"),
    "F003-short": file(PATHS[OTHER], lambda raw: raw[:-1]),
    "F003-long": file(PATHS[OTHER], lambda raw: raw + b"\0"),
    "F003-sparse": sparse(PATHS[OTHER], 1 << 40),
    "S001-long": file(PATHS[OTHER], lambda raw: (100_003_832).to_bytes(8, "little") + raw[8:]),
    "S002-duplicate": text(OTHER, '"shape": [1]', '"shape": [1], "shape": [1]'),
    "S002-escaped": text(OTHER, '"w@2:3"', '"w@2:3": 0, "\\u0077@2:3"'),
    "S002-padding": text(OTHER, "}}    ", "}}   x"),
    "S002-not-a-number": text(OTHER, '"shape": [1]', '"shape": [NaN]'),
    "S002-minus-zero": text(OTHER, "[0, 4]", "[-0, 4]"),
    "S002-deep": text(OTHER, '"shape": [1]', f'"shape": {"[" * 1500}'),
    "S002-shapes": text(OTHER, '\\"w\\":[3]', '\\"w\\":[3],\\"w\\":[3]'),
    "S003-odd": body("files", "data_start", [4096, 4095, 4096]),
    "S003-beyond": body("files", "data_start", [4096, 8192, 4096]),
    "S003-header": file(PATHS[OTHER], lambda raw: (8192 - 8).to_bytes(8, "little") + raw[8:], loads=True),
    "S004-dtype": header(OTHER, "w@2:3", "dtype", "F31"),
    "S004-shape": header(OTHER, "w@2:3", "shape", [2]),
    "S004-dimensions": header(OTHER, "w@2:3", "shape", [1] * 65),
    "S004-wrapped": header(OTHER, "w@2:3", "shape", [(1 << 64) + 1]),
    "S004-more": header(OTHER, "w@2:3", "more", 1),
    "S004-span": text(OTHER, '"w@2:3"', '"w@3:4"'),
    "S005-gap": header(MASTER, "e", "data_offsets", [20, 20]),
    "S005-overlap": header(STATE, "tree/0/0", {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}),
    "S005-end": Case(lambda apart: apart.files[OTHER].data.extend(b"\0\0\0\0")),
    "S006-save": shared({"0" * 16: [MASTER]}),
    "S006-not-shared": shared({OLDER: [MASTER]}, own=True),
    "S006-rank": header(OTHER, "__metadata__", "zckpt.rank", "0"),
    "S006-version": header(OTHER, "__metadata__", "zckpt.version", "2.0"),
    "S006-none": header(OTHER, "__metadata__", None),
    "S006-no-text": header(OTHER, "__metadata__", "more", 1),
    "S006-no-shape": header(OTHER, "__metadata__", "zckpt.shapes", "{}"),
    "S006-shape": header(OTHER, "__metadata__", "zckpt.shapes", json.dumps({"w": [3], "x": [1] * 65})),
    "S007-dtype": body("parts", 0, "dtypes", 0, "I32"),
    "S007-name": text(MASTER, '"v"', '"u"'),
    "S007-block": rows(0, block=[1, 1, 2, 2]),
    "S007-one-place": Case(two_alike_at_one_place),
    "S007-shape": header(MASTER, "__metadata__", "zckpt.shapes", '{"w":[4]}'),
    "S008-content": filler(4, content=b"\1"),
    "S008-long": filler(4096),
    "S008-dtype": filler(4, "I8"),
    "D001-more": Case(after=lambda path: retable(path, 1, (path / OTHER_TABLE).read_bytes() + b"\0" * 16), loads=True),
    "D001-odd": file(OTHER_TABLE, lambda raw: raw + b"\0"),
    "D001-between": Case(after=digest_between, loads=True),
    "D001-large": sparse(OTHER_TABLE, (1 << 30) + 16),
    "D002-flip": flip(OTHER_TABLE, 3),
    "D003-data": flip(PATHS[OTHER], -1),
    "D003-header": file(PATHS[OTHER], lambda raw: raw.replace(b'"pt"', b'"pu"'), loads=True),
    "D003-json": file(PATHS[OTHER], lambda raw: raw.replace(b'{"__', b"{,__"), loads=True),
    "T001-duplicate": tree(b"\x82\1\0\1\0"),
    "T001-key": tree({None: 0}),
    "T001-extension": tree(msgpack.ExtType(6, b"")),
    "T001-timestamp": tree(msgpack.Timestamp(1)),
    "T001-fits": tree(msgpack.ExtType(4, b"18446744073709551615")),
    "T001-key-extension": tree({msgpack.ExtType(4, b"-7"): 0}),
    "T001-digits": tree(msgpack.ExtType(4, b"9" * 4001)),
    "T001-reference-text": tree(msgpack.ExtType(1, b"\xff")),
    "T001-array-text": tree(msgpack.ExtType(2, b"\xff")),
    "T001-integer-text": tree(msgpack.ExtType(4, b"1\xff")),
    "T001-named-map": tree(msgpack.ExtType(5, msgpack.packb(["dict", {}]))),
    "T001-announced": tree(b"\xdd\xff\xff\xff\xff" * 99),
    "T001-more-bytes": tree(b"\0\0"),
    "T001-rank": Case(rank_tree_of_integers),
    "T002-deep": tree(nested(65)),
    "T002-deeper-than-parsers": tree(b"\x91" * 5000 + b"\0"),
    "T002-deep-tuples": tree(tuples(65, b"\0")),
    "T003-nothing": tree(msgpack.ExtType(1, b"tree/0/1")),
    "T003-twice": tree([REFERENCE, REFERENCE]),
    "T003-weight": tree(msgpack.ExtType(1, b"w")),
    "T004-bytes": tree(lambda: tuples(6, msgpack.packb(bytes(45 << 20))), large=True),
    "T004-containers": tree(lambda: b"\xdd\0\x40\0\0" + b"\x90" * (1 << 22), large=True),
}
SOUND_CASES = {
    "sound-booleans": Case(booleans),
    "sound-box": divided(),
    "sound-checksum": chunk(checksum),
    "sound-extension": body("more", msgpack.ExtType(5, b"\x82\0\0\0\0\xc1")),
    "sound-integers": repack(other_integers),
    "sound-keys": body(5, 1),
    "sound-nested": nested_latest(),
    "sound-pieces": Case(many_chunks_with_the_feature, large=True),
    "sound-shared": shared({OLDER: [MASTER]}),
}
"""Checkpoints that conform, though a reader might take them for broken ones."""


def make(name: str, directory: Path) -> None:
    """Writes the fixture ``name`` to ``directory``, which must not exist."""
    case = (CASES | SOUND_CASES)[name]
    path = directory / case.at
    apart = Apart.of(SOUND)
    case.spoil(apart)
    apart.write(path)
    case.after(path)


VALIDATED = frozenset({"I001", "S001", "S002", "S004", "S005", "S006", "S007", "S008"})
"""The rules that no loader has to check."""
CONFORMING = ["broken/sound", "golden/v1/run", "golden/v1-shared/run"]
"""Directories of tests/ with checkpoints that conform, and that this program does not make."""


def listed() -> dict[str, Any]:
    """Returns the content of ``spec/fixtures.json``: every fixture, and the rule that a reader has to report."""
    fixtures = []
    for name, case in (CASES | SOUND_CASES).items():
        rule = None if name in SOUND_CASES else name.partition("-")[0]
        loader = rule is not None and rule not in VALIDATED and not case.loads
        place = None if case.large else f"../tests/broken/{name}"
        fixtures.append({"name": name, "directory": place, "rule": rule, "loader": loader})
    for place in CONFORMING:
        fixtures.append({"name": place, "directory": f"../tests/{place}", "rule": None, "loader": False})
    for name in ("run", "second", "third"):
        fixtures.append({"name": name, "directory": f"example/{name}", "rule": None, "loader": False})
    return {"fixtures": fixtures}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        make(sys.argv[1], Path(sys.argv[2]))
        sys.exit()
    for name, case in (CASES | SOUND_CASES).items():
        shutil.rmtree(HERE / name, ignore_errors=True)
        if not case.large:
            make(name, HERE / name)
    lines = ",\n".join(f"    {json.dumps(fixture)}" for fixture in listed()["fixtures"])
    write(HERE.parents[1] / "spec" / "fixtures.json", f'{{\n  "fixtures": [\n{lines}\n  ]\n}}\n'.encode())
