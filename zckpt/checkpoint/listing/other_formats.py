"""Recognises checkpoints and models in formats of other programs by the names of their files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


class OtherFormat(NamedTuple):
    """A format that is not zckpt's own."""

    what: str
    """What a folder in this format is, with an article."""
    hint: str
    """How its state gets into a checkpoint of zckpt."""


_THROUGH_AN_ENGINE = "make an engine of the model, and write that with zckpt.write"
DEEPSPEED = OtherFormat(
    "a checkpoint in DeepSpeed's own format",
    "zckpt.attach(engine) makes engine.load_checkpoint load it; to convert it, `zckpt convert SOURCE DESTINATION` or "
    "zckpt.convert",
)
HUGGING_FACE = OtherFormat(
    "a Hugging Face model",
    "to begin a run with its weights, `zckpt convert SOURCE DESTINATION` or zckpt.convert makes a checkpoint of them",
)
_PEFT = OtherFormat(
    "an adapter of PEFT", f"load it with PeftModel.from_pretrained and is_trainable=True, {_THROUGH_AN_ENGINE}"
)
_CONVERT = "to convert it, `zckpt convert SOURCE DESTINATION` or zckpt.convert"
DCP = OtherFormat("a DCP checkpoint of torch.distributed.checkpoint", _CONVERT)
ACCELERATE_FSDP = OtherFormat("an FSDP checkpoint of Accelerate or Trainer", _CONVERT)
FSDP_MODELS = ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin")
"""The names under which Accelerate saves the weights of an FSDP model: a DCP folder, or a file of ``torch.save``."""
_ORBAX = OtherFormat(
    "a checkpoint of Orbax", "save its weights as a Hugging Face model, which `zckpt convert SOURCE DESTINATION` reads"
)
_MEGATRON = OtherFormat(
    "a checkpoint of Megatron-LM",
    "export its weights as a Hugging Face model, which `zckpt convert SOURCE DESTINATION` reads",
)
DEEPSPEED_FILES = ("*[_-]model_states.pt", "*_optim_states.pt", "offloaded_tensors/rank*/*.swp")
"""Patterns of the files of a checkpoint in DeepSpeed's own format, as ``zckpt.tools.exporting.place`` reads them.

DeepSpeed 0.16 to 0.19 gives every file a name that ends in ``_model_states.pt``, ``-model_states.pt`` or
``_optim_states.pt`` (``MODEL_FILE_SUFFIX`` and ``OPTIM_FILE_SUFFIX`` in ``deepspeed/checkpoint/constants.py``), and
copies NVMe swap files to the directory ``offloaded_tensors``."""
UNIVERSAL_FILES = (*DEEPSPEED_FILES, "zero/optimizer_state.pt", "zero/*/*.pt")
"""The same for a Universal Checkpoint."""
LATEST_UNIVERSAL = "latest_universal"
"""The name of the file that names the newest Universal Checkpoint of a run."""
_DEEPSPEED = re.compile(r"(?s).*([_-]model|_optim)_states\.pt|offloaded_tensors")
_WEIGHTS = re.compile(
    r"(model|pytorch_model)((-\d+-of-\d+)?\.(safetensors|bin)|\.(safetensors|bin)\.index\.json)", re.ASCII
)


def other_format(entries: Collection[str]) -> OtherFormat | None:
    """Returns the format of the folder with these entries, or None if it is in none of these formats."""
    kinds = {
        DEEPSPEED: bool(deepspeed_files(entries)),
        HUGGING_FACE: "config.json" in entries and any(map(_WEIGHTS.fullmatch, entries)),
        _PEFT: "adapter_config.json" in entries,
        DCP: ".metadata" in entries or any(name.endswith(".distcp") for name in entries),
        ACCELERATE_FSDP: any(name in entries for name in FSDP_MODELS),
        _ORBAX: "_CHECKPOINT_METADATA" in entries or "manifest.ocdbt" in entries,
        _MEGATRON: "latest_checkpointed_iteration.txt" in entries,
    }
    return next((kind for kind, here in kinds.items() if here), None)


def deepspeed_files(names: Iterable[str]) -> list[str]:
    """Returns those of the entries of one directory that belong to a checkpoint in DeepSpeed's own format, sorted."""
    return sorted(filter(_DEEPSPEED.fullmatch, names))
