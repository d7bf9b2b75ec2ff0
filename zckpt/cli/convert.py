"""Convert a checkpoint of DeepSpeed to one of zckpt, and back.

SOURCE is a folder in DeepSpeed's own format of any ZeRO stage, a Universal Checkpoint, or a Hugging Face model; with
--to deepspeed, a checkpoint of zckpt. In the directory of a run it is the checkpoint that `latest` names. Nothing that
is in its pickles is run. What the source has not, such as the states of random generators, is printed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import zckpt

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
  zckpt convert old/global_step1000 checkpoints/global_step1000
  zckpt convert old checkpoints/global_step900 --tag global_step900 --json
  zckpt convert checkpoints/global_step2000 back --to deepspeed --world-size 16
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="the checkpoint, or the directory of a run")
    parser.add_argument("destination", help="the directory of the new checkpoint; with --to deepspeed, of the run")
    parser.add_argument("--to", choices=["zckpt", "deepspeed"], default="zckpt", help="the format to write")
    parser.add_argument("--tag", help="the checkpoint in the run SOURCE; with --to deepspeed, in the run DESTINATION")
    parser.add_argument("--stage", type=int, choices=range(4), help="with --to deepspeed: the ZeRO stage")
    parser.add_argument("--world-size", type=int, metavar="N", help="with --to deepspeed: the number of ranks")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint at DESTINATION")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    if arguments.to == "zckpt" and (arguments.stage, arguments.world_size) != (None, None):
        raise zckpt.UnsupportedError(
            "--stage and --world-size are about --to deepspeed", hint="a checkpoint of zckpt fits any of them"
        )
    converted = zckpt.convert(
        arguments.source, arguments.destination, to=arguments.to, tag=arguments.tag, stage=arguments.stage,
        world_size=arguments.world_size, overwrite=arguments.overwrite, progress=zckpt.ProgressBar(),
    )  # fmt: skip
    print(json.dumps(asdict(converted)) if arguments.json else converted)
    return 0
