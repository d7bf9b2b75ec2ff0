"""Summarize a checkpoint, or all checkpoints of a run.

For a checkpoint, this prints its step, the software that wrote it, its parts with their dtypes and sizes, and whether
it is complete, which means that every file is there and has the right length. For the directory of a run, this prints
all checkpoints, beginning with the one that was committed last, the one that `latest` names, and the files that dead
writers have left. No tensor is read.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from zckpt.cli import output
from zckpt.errors import printable

if TYPE_CHECKING:
    import argparse

    from zckpt.tools.summary import CheckpointSummary, RunEntry, RunSummary

EXAMPLES = """
  zckpt info checkpoints
  zckpt info checkpoints/global_step100
  zckpt info checkpoints --json | jq '.checkpoints[].step'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, or the directory of a run")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    from zckpt.tools.summary import CheckpointSummary, summary

    result = summary(arguments.path)
    if arguments.json:
        output.print_json(asdict(result))
    elif isinstance(result, CheckpointSummary):
        _print_checkpoint(result)
    else:
        _print_run(result)
    return 0


def _print_checkpoint(checkpoint: CheckpointSummary) -> None:
    output.print_fields(
        [
            ("path", checkpoint.path),
            ("step", checkpoint.step),
            ("world size", checkpoint.world_size),
            *checkpoint.writer.items(),
            ("age", output.age(checkpoint.age_seconds)),
            ("use", checkpoint.use),
            ("run", checkpoint.run),
            ("files", f"{checkpoint.files} with tensors, {output.size(checkpoint.nbytes)}"),
            *([("shared", f"{output.size(checkpoint.shared_bytes)} of them")] if checkpoint.shared_bytes else []),
            ("complete", "yes" if checkpoint.problem is None else f"no: {_in_one_line(checkpoint.problem)}"),
            ("locked", "no" if checkpoint.locked_by is None else f"by {checkpoint.locked_by}"),
            *(("leftover", name) for name in checkpoint.leftovers),
            ("save id", checkpoint.save_id),
        ]
    )
    output.print_text("")
    output.print_table(
        ("part", "tensors", "elements", "size", "dtype"),
        (
            (part.name, f"{part.tensors:,}", f"{part.numel:,}", output.size(part.nbytes), ", ".join(part.dtypes))
            for part in checkpoint.parts
        ),
        numbers=("tensors", "elements", "size"),
    )


def _print_run(run: RunSummary) -> None:
    output.print_fields([("run", run.path), ("latest", run.latest or "there is no file `latest`")])
    output.print_text("")
    output.print_table(
        ("checkpoint", "step", "ranks", "size", "age", ""),
        (
            (
                entry.path,
                "" if entry.step is None else str(entry.step),
                "" if entry.world_size is None else str(entry.world_size),
                output.size(entry.nbytes),
                output.age(entry.age_seconds),
                "; ".join(_remarks(entry)),
            )
            for entry in run.checkpoints
        ),
        numbers=("step", "ranks", "size", "age"),
    )
    leftovers = [*run.leftovers, *(f"{entry.path}/{name}" for entry in run.checkpoints for name in entry.leftovers)]
    if leftovers:
        told = "\nleft by writers that have died or are still writing; `zckpt gc` removes what is not in use:"
        output.print_text("\n".join([told, *(f"  {printable(name)}" for name in leftovers)]))


def _in_one_line(problem: str) -> str:
    return "; ".join(line.strip() for line in problem.splitlines())


def _remarks(entry: RunEntry) -> list[str]:
    remarks = ["latest"] if entry.is_latest else []
    if entry.use not in (None, "resume"):
        remarks.append("weights only" if entry.use == "weights" else "a part")
    if entry.problem is not None:
        remarks.append(f"not a checkpoint: {_in_one_line(entry.problem)}")
    if entry.locked_by is not None:
        remarks.append(f"locked by {entry.locked_by}")
    return remarks
