"""Draws ``architecture.svg``, the way of a range of bytes of ``exp_avg`` from an engine to the disk and back.

    python docs/picture.py

Each box names functions and classes, and the files in which they are defined. ``tests/package/test_architecture.py``
checks that they are defined there, and that the picture is the one that this script draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

OUT = Path(__file__).with_suffix("").with_name("architecture.svg")
COLOURS = {"plan": "#3b6fb6", "queue": "#8250a5", "copy": "#c8651b", "memory": "#5b6470", "digest": "#1a7f5a"}
MEANINGS = {
    "plan": "frozen data is made, and no bytes move", "queue": "something waits here", "copy": "bytes move",
    "memory": "memory that holds the bytes", "digest": "digests are computed or compared",
}  # fmt: skip
LINE, PAD, GAP = 15, 8, 22


@dataclass(frozen=True)
class Box:
    """One step of the picture. The files ``where`` of zckpt/ define the ``names``, and ``lines`` say what happens."""

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
    box("plan", "inventory, Fragment", "engines/contract.py, plan/inventory.py", """
        Elements [start, stop) of exp_avg/<name>, and
        where they are: memory of the engine, or a
        FileRange of a swap file. Nothing is copied."""),
    box("plan", "plan_data_files, DataFilePlan, Regions", "plan/data_files.py", """
        One file for exp_avg of this rank and tier: its
        header, and the position of each fragment."""),
    box("plan", "catalog", "plan/catalog.py", """
        Each rank sends a record of its files. Rank 0
        makes and checks manifest and index. It takes
        the lock before any byte is written."""),
    box("queue", "RankWrite, write_data_files", "checkpoint/writing/rank_write.py", """
        A write in the background runs in a separate
        thread from here on. Waits for work that is
        queued on devices. Then plans the writes of
        this rank, and carries them out."""),
    box("plan", "plan_writes, WritePlan, WriteOp", "plan/writes.py", """
        Writes of up to 8 MiB, or of up to 16 MiB if they
        need no staging buffer, in whole blocks of 1 MiB."""),
]  # fmt: skip
PIPELINE = box(
    "queue",
    "run_writes, Pipeline, Budget",
    "transfer/write.py, transfer/pipeline.py, transfer/budget.py",
    """
    4 threads write, 1 computes digests; a few buffers
    queues: waiting, filling, full, digested""",
)
RUN_READS = box(
    "queue",
    "run_reads, Pipeline, Budget",
    "transfer/read.py, transfer/pipeline.py, transfer/budget.py",
    """
    4 threads read, 1 compares digests; a few buffers""",
)
TAKE = [
    box("copy", "_take", "transfer/write.py", """
        host memory: no copy for a run of 1 MiB or more
        (see WriteOp), unless the write is in the
        background. Otherwise memmove, one copy
        device: CopyQueue.from_device, one copy, on a
        stream. Many small tensors are first joined on
        the device, which is one more copy
        swap file: PageSharing.share, no copy yet.
        Otherwise read_from reads it into the buffer"""),
    box("memory", "StagingBuffer, StagingPool", "transfer/staging.py", """
        Host memory that is aligned to pages, and pinned for
        copies from a device. The bytes have the same
        position within a page as in the file."""),
    box("digest", "_record_digests", "transfer/write.py", """
        Computes xxh3-128 of each block for the rank's table.
        Shared pages are read into the buffer for this:
        PageSharing.read_back, by direct I/O, no copy."""),
    box("copy", "LocalWriter, write, write_edges", "storage/local_writer.py", """
        Whole pages by direct I/O: the disk takes them from
        where they are, no copy. A part of a page at either
        end is kept until the rest of the page is there.
        Only such parts of shared pages are written."""),
]  # fmt: skip
COMMIT = [
    box("queue", "LocalWriter, sync", "storage/local_writer.py", """
        One fsync for each file. Then digests.bin and the
        directory are synced."""),
    box("queue", "Ranks, decide_each", "ranks/collectives.py", """
        A gather and a broadcast: each rank sends rank 0 the
        digest of its digest table, or its error. Rank 0
        answers every rank: to go on, or with the error."""),
    box("digest", "RankWrite, prepare_commit, with_digests", "checkpoint/writing/rank_write.py, plan/catalog.py", """
        Rank 0 writes index.bin and, under temporary names,
        the manifest and latest. It checks that it still has
        the lock, and renames the manifest, which is the
        commit. Then it renames latest. All ranks wait."""),
]  # fmt: skip
READ = [
    box("copy", "Targets, put, CopyQueue, to_device", "transfer/memory.py, transfer/devices.py", """
        host memory: put, one copy, which also converts
        device: to_device, one copy on a stream. Many small
        tensors, and tensors that are converted, are first
        copied together, which is one more copy"""),
    box("digest", "check_block", "format/digest.py", """
        Compares each block with its digest (rule D003),
        2 MiB at a time, while the processor caches them."""),
    box("memory", "StagingBuffer, StagingPool", "transfer/staging.py", """
        Not used for bytes that go to a tensor unchanged and
        are in the page cache or aligned for direct I/O: they
        are read into the tensor, and checked there."""),
    box("copy", "LocalReader, read_portions, read_direct", "storage/local_reader.py", """
        Less than 256 KiB, or mostly in the page cache: one
        copy from there. Otherwise direct I/O, no copy.
        To a GPU with verify=False and GPUDirect Storage:
        read_to_device, without the host's memory."""),
]  # fmt: skip
READ_PLAN = [
    box("digest", "read_manifest, decode", "checkpoint/listing/runs.py, format/manifest.py", """
        latest names the checkpoint. The digest of its
        manifest is compared, and every rule is checked,
        before the manifest is used."""),
    box("plan", "plan_restore, Selection", "checkpoint/restoring/plan.py, engines/contract.py", """
        Compares the state of the engine with the stored
        state. Everything that does not fit is found
        before the engine is changed."""),
    box("memory", "Restoring, fill", "engines/contract.py", """
        The memory of the engine, batch by batch. State
        in swap files is brought in, and put back."""),
    box("plan", "Loader, read, ReadRequest", "checkpoint/reading/loader.py", """
        Ranges of tensors, and the memory that they go to.
        Plans the reads of a batch, and carries them out."""),
    box("digest", "Contents, StoredPieces", "checkpoint/listing/contents.py, plan/reshard.py", """
        Reads the chunks of index.bin that list
        exp_avg/<name>, and digests.bin of the ranks that
        hold its pieces. The manifest has their digests."""),
    box("plan", "piece_ranges, PieceRanges", "plan/reshard.py", """
        Divides the requested ranges by stored pieces:
        ranges of files, and the memory for each."""),
    box("plan", "plan_reads, ReadOp, Segments", "plan/reads.py", """
        Joins neighbouring blocks: reads of up to 511
        segments and 8 MiB, or 16 MiB if they need no
        staging buffer. Reads each byte once."""),
]  # fmt: skip
AFTER = [
    box("copy", "Restoring, set_state, finish", "engines/contract.py", """
        Each rank sets counters, param groups and
        generators. When every rank has done so, they
        exchange what they have derived from masters."""),
]  # fmt: skip
ENGINE = ["host memory", "device memory", "swap file on NVMe"]
FILES = ["exp_avg.safetensors", "digests.bin", "index.bin", "manifest.msgpack", "latest"]
X = [20, 350, 740, 1130]
W = [300, 360, 360, 320]


class Drawing:
    """An SVG picture. ``parts`` are its elements, in the order in which they are drawn."""

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

    def box(self, x: float, y: float, width: float, step: Box) -> None:
        colour = COLOURS[step.kind]
        self.rect(x, y, width, step.height, "white", "#b8bec6")
        self.parts.append(f'<rect x="{x}" y="{y}" width="5" height="{step.height}" fill="{colour}"/>')
        at = y + PAD + 11
        self.text(x + 14, at, step.names, "name")
        at += LINE - 1
        self.text(x + 14, at, step.where, "where")
        for line in step.lines:
            at += LINE
            self.text(x + 14, at, line, "what")

    def around(self, x: float, y: float, width: float, height: float, step: Box) -> None:
        """Draws a box behind the steps that several threads do together."""
        self.parts.insert(
            0,
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="#f4eff8" '
            f'stroke="{COLOURS[step.kind]}"/>',
        )
        self.text(x + 12, y + 18, step.names, "name")
        self.text(x + 12, y + 32, step.where, "where")
        self.text(x + 12, y + 47, step.lines[0], "what")

    def column(self, x: float, y: float, width: float, boxes: list[Box], *, up: bool = False) -> list[float]:
        """Draws the boxes from the top down, with arrows between them. Returns the top of each box, and the end."""
        tops = [y]
        for step in boxes:
            self.box(x, tops[-1], width, step)
            tops.append(tops[-1] + step.height + GAP)
        for step, (top, following) in zip(boxes, pairwise(tops[:-1]), strict=False):
            ends = [(x + width / 2, top + step.height), (x + width / 2, following)]
            self.arrow(*(reversed(ends) if up else ends))
        return [*tops[:-1], tops[-1] - GAP]


def draw() -> str:
    out = Drawing()
    headings = ["write: the plan", "write: engine to disk", "read: disk to engine", "read: the plan"]
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
    # The bytes on their way to the disk: the steps of the pipeline, and then those of the commit.
    inner = start + 60
    ends = out.column(X[1] + 12, inner, W[1] - 24, TAKE)
    pipeline_end = ends[-1] + 12
    out.around(X[1], start, W[1], pipeline_end - start, PIPELINE)
    commits = out.column(X[1] + 12, pipeline_end + GAP, W[1] - 24, COMMIT)
    out.arrow((X[1] + W[1] / 2, pipeline_end), (X[1] + W[1] / 2, pipeline_end + GAP))
    bottom = commits[-1]
    # The bytes on their way from the disk. These steps end at the same height as the commit.
    height = sum(step.height + GAP for step in READ) - GAP + 72
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
    room = bottom - sum(step.height + GAP for step in READ_PLAN) + GAP
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
