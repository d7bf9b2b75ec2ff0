"""Draws ``architecture.svg``: a range of bytes of ``exp_avg`` from an engine to the disk and back.

    python docs/picture.py

Each box names functions and classes, and the file in which they are; ``tests/package/test_architecture.py`` looks
whether they are there, and whether the picture is the one that this script draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

OUT = Path(__file__).with_suffix("").with_name("architecture.svg")
COLOURS = {"plan": "#3b6fb6", "queue": "#8250a5", "copy": "#c8651b", "memory": "#5b6470", "digest": "#1a7f5a"}
MEANINGS = {
    "plan": "frozen data is made; no bytes move", "queue": "something waits here", "copy": "bytes move",
    "memory": "where bytes lie", "digest": "bytes are compared, or made comparable",
}  # fmt: skip
LINE, PAD, GAP = 15, 8, 22


@dataclass(frozen=True)
class Box:
    """One step: ``names`` that stand in the file ``where``, below zckpt/, and what happens, line by line."""

    kind: str
    names: str
    where: str
    lines: tuple[str, ...]

    @property
    def height(self) -> int:
        return 2 * PAD + LINE * (len(self.lines) + 2) + 2


def box(kind: str, names: str, where: str, text: str) -> Box:
    return Box(kind, names, where, tuple(line.strip() for line in text.strip().splitlines()))


WRITE_PLAN = [
    box("plan", "inventory, Fragment", "engines/contract.py, state/inventory.py", """
        Elements [start, stop) of exp_avg/<name>,
        and their data: the engine's own memory, or a
        FileSpan of a swap file. Nothing is copied."""),
    box("plan", "plan_shards, ShardPlan, Regions", "plan/layout.py", """
        One file for exp_avg of this rank and tier:
        its header, and where each fragment lies."""),
    box("plan", "catalog", "plan/catalog.py", """
        Ranks tell each other their files. Rank 0 makes
        manifest and index of them, checks both, and
        takes the lock, before a byte is written."""),
    box("queue", "RankWrite, write_own", "writing/rank_write.py", """
        From here on in a thread of its own if the write
        is in the background. Waits for what is queued
        on devices; has this rank's writes planned, and
        carried out."""),
    box("plan", "plan_writes, WritePlan, WriteOp", "plan/layout.py", """
        Writes of up to 8 MiB, in whole blocks of 1 MiB;
        which of them go straight from their place."""),
]  # fmt: skip
PIPELINE = box(
    "queue",
    "run_writes, Pipeline, Budget",
    "transfer/write.py, transfer/pipeline.py, transfer/budget.py",
    """
    4 threads; queues: waiting, filling, full; few buffers""",
)
RUN_READS = box(
    "queue",
    "run_reads, Budget",
    "transfer/read.py, transfer/budget.py",
    """
    4 threads; each takes the next ReadOp when it is free""",
)
TAKE = [
    box("copy", "_take", "transfer/write.py", """
        host memory: nothing is done where 1 MiB or more
        lie in one run (WriteOp.place), but for writes in
        the background; else memmove, one copy
        device: CopyQueue.from_device, one copy, queued
        on a stream; many small ones are joined before
        in a mirror on the device, one copy more
        swap file: PageSharing.share, no copy yet, or
        else read_from reads it into the buffer"""),
    box("memory", "StagingBuffer, StagingPool", "transfer/staging.py", """
        In host memory, aligned to pages; pinned where a
        device is involved. The bytes lie in it as far
        behind the start of a page as in the file."""),
    box("digest", "_put", "transfer/write.py", """
        xxh3-128 of each block, into the rank's table. Shared
        pages come into the buffer now, for their digests:
        PageSharing.read_back, by direct I/O, no copy."""),
    box("copy", "LocalWriter, write, write_edges", "storage/local_writer.py", """
        Whole pages by direct I/O: the disk takes them
        from where they lie, no copy. A part of a page, at
        either end, is kept until the rest of it is there.
        Of shared pages, only such ends are written."""),
]  # fmt: skip
COMMIT = [
    box("queue", "LocalWriter, sync", "storage/local_writer.py", """
        One fsync for each file; then digests.bin, and the
        names in the directory."""),
    box("queue", "Ranks, share", "ranks/collectives.py", """
        Rank 0 waits for every rank, and gets the digest of
        each rank's table."""),
    box("digest", "RankWrite, commit, with_digests", "writing/rank_write.py, plan/catalog.py", """
        Rank 0 puts index.bin and, under temporary names,
        the manifest and latest; confirms that it still has
        the lock; renames the manifest, which is the
        commit, and then latest. All others wait for this."""),
]  # fmt: skip
READ = [
    box("copy", "Sinks, put, CopyQueue, to_device", "transfer/memory.py, transfer/devices.py", """
        host memory: put, one copy, converts
        device: to_device, one copy, queued on a stream;
        many small ones, and those that are converted, go
        through a mirror on the device, one copy more"""),
    box("digest", "check_block", "format/digest.py", """
        Each block against its digest (rule D003), 2 MiB
        at a time, while they are in the processor's cache."""),
    box("memory", "StagingBuffer, StagingPool", "transfer/staging.py", """
        Not for what can lie in the tensor as it is and is
        in the page cache, or is aligned for direct I/O:
        it goes straight to it, and is checked there."""),
    box("copy", "LocalReader, read_into, read_direct", "storage/local_reader.py", """
        Below 256 KiB, or mostly in the page cache: from
        there, one copy. Else direct I/O: no copy.
        To a GPU with verify=False: read_to_device, past
        the host's memory, where GPUDirect Storage works."""),
]  # fmt: skip
READ_PLAN = [
    box("digest", "read_manifest, decode", "listing/runs.py, format/manifest.py", """
        latest names the checkpoint. Of its manifest the
        digest is compared, then every rule is checked;
        only then is it looked at."""),
    box("plan", "plan_restore, Selection", "restoring/plan.py, engines/contract.py", """
        What the engine wants, against what is stored: all
        that does not fit is found before the engine is
        touched."""),
    box("memory", "Restoring, fill", "engines/contract.py", """
        The engine's own memory, batch by batch; what is
        swapped out is brought in, and put back."""),
    box("plan", "Checkpoint, read, Want", "reading/checkpoint.py", """
        Spans of tensors, and the memory they go to: has
        the reads of a batch planned and carried out."""),
    box("digest", "Contents, StoredPieces", "listing/contents.py, plan/reshard.py", """
        The chunks of index.bin that list exp_avg/<name>,
        and digests.bin of the ranks that hold parts of it.
        The manifest has a digest of each."""),
    box("plan", "extents, Extents", "plan/reshard.py", """
        Wanted spans cut by stored pieces: parts of files,
        and where in memory each of them goes."""),
    box("plan", "plan_reads, ReadOp, Segments", "plan/coalesce.py", """
        Whole blocks, neighbours joined: reads of up to
        8 MiB or 511 segments, each byte once; which of
        them go straight to their place."""),
]  # fmt: skip
AFTER = [
    box("copy", "Restoring, set_state, finish", "engines/contract.py", """
        When every rank has read: counters, param groups,
        generators. When every rank has set those, weights
        of low precision are derived from masters."""),
]  # fmt: skip
ENGINE = ["host memory", "device memory", "swap file on NVMe"]
FILES = ["exp_avg.safetensors", "digests.bin", "index.bin", "manifest.msgpack", "latest"]
X = [20, 350, 740, 1130]
W = [300, 360, 360, 320]


class Drawing:
    """The parts of the picture, in the order in which they are painted."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, style: str) -> None:
        self.parts.append(f'<text x="{x}" y="{y}" class="{style}">{escape(text)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, fill: str, stroke: str, dash: str = "") -> None:
        more = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{stroke}"{more}/>'
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        line = " ".join(f"{x},{y}" for x, y in points)
        more = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<polyline points="{line}" fill="none" stroke="#444" marker-end="url(#end)"{more}/>')

    def box(self, x: float, y: float, width: float, one: Box) -> None:
        colour = COLOURS[one.kind]
        self.rect(x, y, width, one.height, "white", "#b8bec6")
        self.parts.append(f'<rect x="{x}" y="{y}" width="5" height="{one.height}" fill="{colour}"/>')
        at = y + PAD + 11
        self.text(x + 14, at, one.names, "name")
        at += LINE - 1
        self.text(x + 14, at, one.where, "where")
        for line in one.lines:
            at += LINE
            self.text(x + 14, at, line, "what")

    def around(self, x: float, y: float, width: float, height: float, one: Box) -> None:
        """What several threads work at, behind its steps."""
        self.parts.insert(
            0,
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="#f4eff8" '
            f'stroke="{COLOURS[one.kind]}"/>',
        )
        self.text(x + 12, y + 18, one.names, "name")
        self.text(x + 12, y + 32, one.where, "where")
        self.text(x + 12, y + 47, one.lines[0], "what")

    def column(self, x: float, y: float, width: float, boxes: list[Box], *, up: bool = False) -> list[float]:
        """Draws the boxes from the top down, and arrows between them; returns where each begins, and the end."""
        tops = [y]
        for one in boxes:
            self.box(x, tops[-1], width, one)
            tops.append(tops[-1] + one.height + GAP)
        for one, (top, following) in zip(boxes, pairwise(tops[:-1]), strict=False):
            ends = [(x + width / 2, top + one.height), (x + width / 2, following)]
            self.arrow(*(reversed(ends) if up else ends))
        return [*tops[:-1], tops[-1] - GAP]


def draw() -> str:
    out = Drawing()
    headings = ["write: planned", "write: the bytes, downwards", "read: the bytes, upwards", "read: planned"]
    for x, heading in zip(X, headings, strict=True):
        out.text(x, 24, heading, "heading")
    top = 40
    left, right = X[1], X[2] + W[2]
    out.rect(left, top, right - left, 58, "#eef2f7", "#8a94a0")
    out.text(left + 12, top + 18, "the engine: exp_avg of this rank", "name")
    width = (right - left - 24) / len(ENGINE)
    for number, name in enumerate(ENGINE):
        out.rect(left + 12 + number * width, top + 26, width - 10, 24, "white", COLOURS["memory"])
        out.text(left + 22 + number * width, top + 42, name, "what")

    start = top + 58 + 30
    # Bytes on their way down: the pipeline around take and put, then what makes them a checkpoint
    inner = start + 60
    ends = out.column(X[1] + 12, inner, W[1] - 24, TAKE)
    pipeline_end = ends[-1] + 12
    out.around(X[1], start, W[1], pipeline_end - start, PIPELINE)
    commits = out.column(X[1] + 12, pipeline_end + GAP, W[1] - 24, COMMIT)
    out.arrow((X[1] + W[1] / 2, pipeline_end), (X[1] + W[1] / 2, pipeline_end + GAP))
    bottom = commits[-1]
    # Bytes on their way up, as far down as the commit
    height = sum(one.height + GAP for one in READ) - GAP + 72
    run = bottom - height
    reads = out.column(X[2] + 12, run + 60, W[2] - 24, READ, up=True)
    out.around(X[2], run, W[2], height, RUN_READS)
    out.column(X[2] + 12, start, W[2] - 24, AFTER)
    out.arrow((X[2] + W[2] / 2, run), (X[2] + W[2] / 2, start + AFTER[0].height))
    out.arrow((X[2] + W[2] / 2, start), (X[2] + W[2] / 2, top + 58))
    out.arrow((X[1] + W[1] / 2, top + 58), (X[1] + W[1] / 2, start))

    plans = out.column(X[0], start, W[0], WRITE_PLAN)
    out.arrow((X[1], top + 40), (X[0] + W[0] / 2, top + 40), (X[0] + W[0] / 2, start), dashed=True)
    out.arrow((X[0] + W[0], plans[-2] + 20), (X[1], plans[-2] + 20))
    room = bottom - sum(one.height + GAP for one in READ_PLAN) + GAP
    steps = out.column(X[3], room, W[3], READ_PLAN)
    out.arrow((right, top + 40), (X[3] - 14, top + 40), (X[3] - 14, steps[1] + 20), (X[3], steps[1] + 20), dashed=True)
    out.arrow((X[3], steps[-2] + 20), (X[2] + W[2], steps[-2] + 20))

    disk = bottom + 34
    out.rect(X[1], disk, X[3] + W[3] - X[1], 58, "#eef2f7", "#8a94a0")
    out.text(X[1] + 12, disk + 18, "the disk: a Store, storage/contract.py", "name")
    width = (X[3] + W[3] - X[1] - 24) / len(FILES)
    for number, name in enumerate(FILES):
        out.rect(X[1] + 12 + number * width, disk + 26, width - 10, 24, "white", COLOURS["memory"])
        out.text(X[1] + 22 + number * width, disk + 42, name, "what")
    out.arrow((X[1] + W[1] / 2, bottom), (X[1] + W[1] / 2, disk))
    out.arrow((X[2] + W[2] / 2, disk), (X[2] + W[2] / 2, reads[-1]))
    edge = X[3] + W[3]
    for number, step in enumerate((steps[0], steps[4])):
        x = edge + 12 + 8 * number
        out.arrow((edge, disk + 20 + 12 * number), (x, disk + 20 + 12 * number), (x, step + 20), (edge, step + 20))
    total = disk + 58 + 20
    for number, (kind, meaning) in enumerate(MEANINGS.items()):
        y = plans[-1] + 60 + 24 * number
        out.parts.append(f'<rect x="{X[0]}" y="{y - 11}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        out.text(X[0] + 20, y, f"{kind}: {meaning}", "what")
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {edge + 40} {total}" width="{edge + 40}">',
        "<style>text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif;fill:#1c2128}"
        ".heading{font-size:16px;font-weight:bold}"
        ".name{font-size:12px;font-weight:bold;font-family:Menlo,'DejaVu Sans Mono',monospace}"
        ".where{font-size:10px;fill:#6a737d}.what{font-size:11.5px}</style>",
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#444"/></marker></defs>',
        f'<rect width="{edge + 40}" height="{total}" fill="white"/>',
        *out.parts,
        "</svg>",
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    OUT.write_text(draw(), encoding="utf-8")
