"""Finds out which format a folder is in, by the names of its files."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from zckpt.errors import CheckpointNotFoundError, UnsupportedError, first_few, from_os_error
from zckpt.format import names
from zckpt.listing.deepspeed_files import deepspeed_files

DEEPSPEED, HUGGINGFACE, ZCKPT = "deepspeed", "huggingface", "zckpt"
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)", re.ASCII)


class Found(NamedTuple):
    """A checkpoint that was found, and its format."""

    format: str
    """``DEEPSPEED``, ``HUGGINGFACE`` or ``ZCKPT``."""
    path: str
    """The directory of the checkpoint itself, also where the given folder is that of a run."""


def find_format(path: str, tag: str | None) -> Found:
    """Finds the checkpoint at ``path``. If ``path`` is the directory of a run, it is the checkpoint that ``tag`` names,
    or, without ``tag``, the one that ``latest`` names. Raises CheckpointNotFoundError, UnsupportedError for the format
    of another program, and StorageError."""
    if tag is not None:
        path = os.path.join(path, tag)
    entries = _entries(path)
    latest = next((name for name in ("latest", "latest_universal") if name in entries), None)
    if tag is None and latest is not None and not _is_checkpoint(entries):
        path = os.path.join(path, _named(os.path.join(path, latest)))
        entries = _entries(path)
    if names.MANIFEST in entries:
        return Found(ZCKPT, path)
    if deepspeed_files(entries):
        return Found(DEEPSPEED, path)
    if "config.json" in entries and any(map(_WEIGHTS.fullmatch, entries)):
        return Found(HUGGINGFACE, path)
    raise _unknown(path, entries)


def _unknown(path: str, entries: list[str]) -> Exception:
    kinds = {
        "a DCP checkpoint of torch.distributed.checkpoint": any(name == ".metadata" for name in entries),
        "an adapter of PEFT": "adapter_config.json" in entries,
        "a checkpoint of Orbax": any(name in ("_CHECKPOINT_METADATA", "manifest.ocdbt") for name in entries),
        "a checkpoint of Megatron-LM": "latest_checkpointed_iteration.txt" in entries,
        "data of a write of zckpt that never committed": any(map(names.is_data_dir, entries)),
    }
    found = next((kind for kind, here in kinds.items() if here), None)
    if found is not None:
        return UnsupportedError(
            f"{path} is {found}",
            hint="zckpt converts from DeepSpeed's own checkpoints, Universal Checkpoints and Hugging Face models",
        )
    inner = [name for name in entries if os.path.isdir(os.path.join(path, name))]
    runs = [name for name in inner if _is_checkpoint(_entries(os.path.join(path, name)))]
    hint = f"name one of the checkpoints in it: {first_few(runs, 3)}" if runs else None
    return CheckpointNotFoundError(
        f"there is no checkpoint of a known format: it has {first_few(entries, 5) or 'no entries'}",
        file=path,
        hint=hint,
    )


def _is_checkpoint(entries: list[str]) -> bool:
    return names.MANIFEST in entries or bool(deepspeed_files(entries))


def _entries(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError("there is no such folder", file=path) from error
    except OSError as error:
        raise from_os_error(error, "list", path) from error


def _named(latest: str) -> str:
    """Returns the tag that a file ``latest`` holds."""
    try:
        with open(latest, encoding="utf-8") as file:
            return file.read(4096).strip()
    except UnicodeDecodeError as error:
        raise CheckpointNotFoundError("the file does not name a checkpoint", file=latest) from error
    except OSError as error:
        raise from_os_error(error, "read", latest) from error
