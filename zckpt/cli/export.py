"""Write the weights of a checkpoint as the folder of a Hugging Face model, or as one file for torch.load.

--config names the folder of the model that was trained, and needs transformers 5 or newer. With it, OUT has the files
that save_pretrained writes, which transformers, vLLM and others load. OUT appears only once all of it is written. If
only some of the weights and buffers are exported, the result says which ones are left out. Under a launcher such as
torchrun, the ranks share the work, and rank 0 prints the result.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import zckpt
from zckpt.cli import output

EXAMPLES = """
  zckpt export checkpoints llama-sft --dtype bf16 --config Llama-3.1-8B
  zckpt export checkpoints/global_step100 model.pt --format pt
  zckpt export checkpoints adapter --adapter default --dtype bf16
  zckpt export checkpoints merged --merge default --dtype bf16 --config Llama-3.1-8B
  zckpt export checkpoints policy --strip-prefix policy. --config Llama-3.1-8B
  torchrun --nproc-per-node 8 -m zckpt export checkpoints llama-sft --dtype bf16 --config Llama-3.1-8B
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, or the directory of a run with a `latest` file")
    parser.add_argument("out", help="the new directory; with --format pt, the new file")
    parser.add_argument(
        "--format",
        choices=["hf", "pt"],
        default="hf",
        help="hf: safetensors files and the configuration; pt: a dict of tensors for torch.load; default: hf",
    )
    parser.add_argument(
        "--dtype", choices=["bf16", "fp16", "fp32"], help="convert floating point tensors to this dtype"
    )
    parser.add_argument("--config", metavar="DIR", help="a folder with the model's config.json and tokenizer")
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        type=_size,
        help="the largest size of a safetensors file, such as 500MB; default: 5GB",
    )
    parser.add_argument(
        "--strip-prefix",
        metavar="PREFIX",
        help="write only the module at this path, such as policy., without this prefix",
    )
    parser.add_argument("--adapter", metavar="NAME", help="write the folder of this LoRA adapter of PEFT instead")
    parser.add_argument("--merge", metavar="NAME", help="merge this LoRA adapter of PEFT into the weights of its model")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def _size(text: str) -> int:
    from zckpt.tools.exporting.plan import size_in_bytes

    try:
        return size_in_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(arguments: argparse.Namespace) -> int:
    with output.launched() as rank:
        exported = zckpt.export(
            arguments.path,
            arguments.out,
            format=arguments.format,
            dtype=arguments.dtype,
            config=arguments.config,
            max_shard_size=arguments.max_shard_size,
            strip_prefix=arguments.strip_prefix,
            adapter=arguments.adapter,
            merge=arguments.merge,
            overwrite=arguments.overwrite,
            progress=output.progress_bar(),
        )
        if rank == 0:
            output.print_text(json.dumps(asdict(exported)) if arguments.json else exported)
    return 0
