"""Convert a checkpoint of DeepSpeed or PyTorch to one of zckpt, or the other way.

SOURCE is a folder in DeepSpeed's own format of any ZeRO stage, a Universal Checkpoint, a folder of PyTorch's
distributed checkpoints (DCP), a file of torch.save, or a Hugging Face model. With --to it is a checkpoint of zckpt. If
SOURCE is the directory of a run, the checkpoint that `latest` names is converted. Code in the pickles of old
checkpoints is never executed. The command prints what the new checkpoint lacks because the source does not have it,
such as the states of random number generators. Under a launcher such as torchrun, the ranks share the work, and rank 0
prints the result.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import zckpt
from zckpt.cli import output

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
  zckpt convert old/global_step1000 checkpoints/global_step1000
  zckpt convert old checkpoints/global_step900 --tag global_step900 --json
  zckpt convert checkpoints/global_step2000 back --to deepspeed --world-size 16
  zckpt convert checkpoints/global_step2000 universal --to universal
  zckpt convert checkpoints/global_step2000 dcp --to dcp
  torchrun --nproc-per-node 8 -m zckpt convert old/global_step1000 checkpoints/global_step1000
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="the checkpoint, or the directory of a run")
    parser.add_argument(
        "destination", help="the directory of the new checkpoint; with --to deepspeed and universal, that of its run"
    )
    parser.add_argument(
        "--to",
        choices=["zckpt", "deepspeed", "universal", "dcp"],
        default="zckpt",
        help="the format to write; universal is DeepSpeed's Universal Checkpoint; default: zckpt",
    )
    parser.add_argument(
        "--tag",
        help="the checkpoint to convert in the run SOURCE; with --to deepspeed and universal, the tag of the "
        "new checkpoint",
    )
    parser.add_argument(
        "--stage", type=int, choices=range(4), help="with --to deepspeed: the ZeRO stage; default: that of the source"
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="with --to deepspeed: the number of ranks; with --to dcp: that of the data files; default: that of SOURCE",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint at DESTINATION")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    with output.launched() as rank:
        converted = zckpt.convert(
            arguments.source, arguments.destination, to=arguments.to, tag=arguments.tag, stage=arguments.stage,
            world_size=arguments.world_size, overwrite=arguments.overwrite, progress=output.progress_bar(),
        )  # fmt: skip
        if rank == 0:
            output.print_text(json.dumps(asdict(converted)) if arguments.json else converted)
    return 0
