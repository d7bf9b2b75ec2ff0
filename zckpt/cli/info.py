"""Summarize a checkpoint, or all checkpoints of a run.

For a checkpoint, this prints its step, what wrote it, its parts with their dtypes and sizes, and whether it is
complete, which means that every file is there and has the right length. For the directory of a run, it prints all
checkpoints, the one that was committed last first, which of them `latest` names, and what dead writers have left. No
tensor is read.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from zckpt.cli import output

if TYPE_CHECKING:
    import argparse

    from zckpt.listing.summary import CheckpointSummary, RunEntry, RunSummary

EXAMPLES = """
  zckpt info checkpoints
  zckpt info checkpoints/global_step100
  zckpt info checkpoints --json | jq '.checkpoints[].step'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, or the directory of a run")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    from zckpt.listing.summary import CheckpointSummary, summary

    found = summary(arguments.path)
    if arguments.json:
        output.print_json(asdict(found))
    elif isinstance(found, CheckpointSummary):
        _print_checkpoint(found)
    else:
        _print_run(found)
    return 0


def _print_checkpoint(found: CheckpointSummary) -> None:
    output.print_fields(
        [
            ("path", found.path),
            ("step", found.step),
            ("world size", found.world_size),
            *found.writer.items(),
            ("age", output.age(found.age_seconds)),
            ("files", f"{found.files} with tensors, {output.size(found.nbytes)}"),
            *([("shared", f"{output.size(found.shared_bytes)} of them")] if found.shared_bytes else []),
            ("complete", "yes" if found.problem is None else f"no: {_in_one_line(found.problem)}"),
            ("locked", "no" if found.locked_by is None else f"by {found.locked_by}"),
            *(("leftover", name) for name in found.leftovers),
            ("save id", found.save_id),
        ]
    )
    print()
    output.print_table(
        ("part", "tensors", "elements", "size", "dtype"),
        (
            (part.name, f"{part.tensors:,}", f"{part.numel:,}", output.size(part.nbytes), ", ".join(part.dtypes))
            for part in found.parts
        ),
        numbers=("tensors", "elements", "size"),
    )


def _print_run(found: RunSummary) -> None:
    output.print_fields([("run", found.path), ("latest", found.latest or "there is no file `latest`")])
    print()
    output.print_table(
        ("checkpoint", "step", "ranks", "size", "age", ""),
        (
            (
                one.path,
                "" if one.step is None else str(one.step),
                "" if one.world_size is None else str(one.world_size),
                output.size(one.nbytes),
                output.age(one.age_seconds),
                "; ".join(_remarks(one)),
            )
            for one in found.checkpoints
        ),
        numbers=("step", "ranks", "size", "age"),
    )
    left = [*found.leftovers, *(f"{one.path}/{name}" for one in found.checkpoints for name in one.leftovers)]
    if left:
        print("\nleft by writers that have died or are still writing; `zckpt gc` removes what is not in use:")
        for name in left:
            print(f"  {output.printable(name)}")


def _in_one_line(problem: str) -> str:
    return "; ".join(line.strip() for line in problem.splitlines())


def _remarks(one: RunEntry) -> list[str]:
    found = ["latest"] if one.is_latest else []
    if one.problem is not None:
        found.append(f"not a checkpoint: {_in_one_line(one.problem)}")
    if one.locked_by is not None:
        found.append(f"locked by {one.locked_by}")
    return found
