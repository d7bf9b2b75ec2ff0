"""DeepSpeed's functions that gather the weights of a checkpoint in float32, for the checkpoints of zckpt."""

from __future__ import annotations

import functools
import inspect
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from zckpt.api.open import open as open_path
from zckpt.errors import UnsupportedError, first_few, warn
from zckpt.format import names
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zckpt.reading.checkpoint import Checkpoint
    from zckpt.storage.location import StrPath

_MARK = "_zckpt_reads"
_OPENERS = ("get_model_state_file", "get_model_state_files", "get_optim_files")
"""DeepSpeed's functions that tell their callers the names of its files."""


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor of a checkpoint that is read when ``contiguous()`` is called, in float32 if it is floating point."""

    key: str
    dtype: torch.dtype
    shape: torch.Size
    _checkpoint: Checkpoint = field(repr=False)

    def contiguous(self) -> torch.Tensor:
        return _read({self.key: self})[self.key]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: StrPath,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The weights, persistent buffers and tied weights by every name: what ``model.load_state_dict`` takes, on the CPU.

    ``checkpoint_dir``: the directory of a run, in which ``tag`` is a checkpoint; None: the one that ``latest`` names,
    or ``checkpoint_dir`` itself. All that is floating point is converted to float32. ``exclude_frozen_parameters``:
    leaves out what was not trained. ``lazy_mode``: objects with ``shape``, ``dtype`` and ``contiguous()``, which reads
    the tensor; so only what is in use is in memory. Names of one tied weight have the same object.

    Raises what ``zckpt.open`` and ``Checkpoint.load`` raise.
    """
    path = Location.of(checkpoint_dir).child("" if tag is None else str(tag))
    found = _lazy_tensors(open_path(str(path)), exclude_frozen_parameters)
    return dict(found) if lazy_mode else _read(found)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: StrPath, tag: str | int | None = None
) -> torch.nn.Module:
    """Moves ``model`` to the CPU and loads the weights and buffers of a checkpoint into it; returns it.

    What one of them has and the other has not is left out, with a warning. Arguments and errors otherwise as for
    ``get_fp32_state_dict_from_zero_checkpoint``; RuntimeError from PyTorch where shapes differ.
    """
    found = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    missing, unexpected = model.load_state_dict(found, strict=False)
    lacks = [("the checkpoint", missing), ("the model", unexpected)]
    lines = [f"{which} lacks {len(keys)} tensors: {first_few(keys, 5, ', ...')}" for which, keys in lacks if keys]
    if lines:
        warn("loaded in part: " + "; ".join(lines))
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: StrPath,
    output_dir: StrPath,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the weights and buffers of a checkpoint in float32 into ``output_dir``: ``pytorch_model.bin``, or with
    ``safe_serialization`` ``model.safetensors``.

    ``max_shard_size``: what is larger is split into several files and an index as Hugging Face names them, for which
    ``huggingface_hub`` must be installed; None: one file. One file's tensors are in memory at a time. The names of a
    tied weight share its memory in ``pytorch_model.bin``; safetensors cannot say so and has a copy for every name.
    Other arguments and errors as for ``get_fp32_state_dict_from_zero_checkpoint``.
    """
    found = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True)
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    files, index = {f"{stem}{suffix}": list(found)}, None
    if max_shard_size is not None:
        from huggingface_hub import split_torch_state_dict_into_shards

        split = split_torch_state_dict_into_shards(
            {lazy.key: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta") for lazy in found.values()},
            filename_pattern=f"{stem}{{suffix}}{suffix}",
            max_shard_size=max_shard_size,
        )
        file_of = split.tensor_to_filename
        files = {
            file: [name for name in found if file_of[found[name].key] == file] for file in split.filename_to_tensors
        }
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": {name: file_of[found[name].key] for name in found}}
    os.makedirs(output_dir, exist_ok=True)
    for file, own in files.items():
        _save({name: found[name] for name in own}, os.path.join(output_dir, file), safe_serialization)
    if index is not None:
        with open(os.path.join(output_dir, f"{stem}{suffix}.index.json"), "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2, sort_keys=True)


def is_zckpts(path: StrPath) -> bool:
    """Whether there is a manifest in this directory, sound or not."""
    return open_store(path).exists(names.MANIFEST)


def teach_deepspeed() -> None:
    """Has every function of ``deepspeed.utils.zero_to_fp32`` read the checkpoints of zckpt beside DeepSpeed's own,
    wherever it was imported to. Those that give others the names of DeepSpeed's files refuse a checkpoint of zckpt."""
    from deepspeed.utils import zero_to_fp32 as module

    inner = "_get_fp32_state_dict_from_zero_checkpoint"  # through which all of them read a folder
    stock: Callable[..., Any] = getattr(module, inner)
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def read(ds_checkpoint_dir: StrPath, exclude_frozen_parameters: bool) -> Any:
        if is_zckpts(ds_checkpoint_dir):
            return _lazy_tensors(open_path(ds_checkpoint_dir), exclude_frozen_parameters)
        return stock(ds_checkpoint_dir, exclude_frozen_parameters)

    setattr(read, _MARK, True)
    setattr(module, inner, read)
    for opener in _OPENERS:
        setattr(module, opener, _refusing(getattr(module, opener)))


def _refusing(stock: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        checkpoint_dir, *_ = signature.bind(*args, **kwargs).arguments.values()
        if is_zckpts(checkpoint_dir):
            raise UnsupportedError(
                f"{os.fspath(checkpoint_dir)} is a zckpt checkpoint, without the files that {stock.__name__} looks for",
                hint="zckpt.get_fp32_state_dict_from_zero_checkpoint(directory) returns the weights, "
                f'zckpt.open(directory).state["{names.CLIENT_STATE}"] what was saved beside them',
            )
        return stock(*args, **kwargs)

    return refuse


def _lazy_tensors(checkpoint: Checkpoint, exclude_frozen_parameters: bool) -> dict[str, LazyTensor]:
    """The tensors under every name of theirs. A weight is read from the master, if there is one."""
    trained = "master" in checkpoint.parts
    parts = ("buffer", "master") if exclude_frozen_parameters and trained else ("buffer", "param", "master")
    found = {}
    for part in parts:
        for key, info in checkpoint.items():
            if info.part == part:
                dtype = torch.float32 if info.dtype.is_floating_point else info.dtype
                found[info.name] = LazyTensor(key, dtype, torch.Size(info.shape), checkpoint)
    return found | {alias: found[name] for alias, name in checkpoint.aliases.items() if name in found}


def _read(tensors: Mapping[str, LazyTensor]) -> dict[str, torch.Tensor]:
    """Reads all tensors in one pass. Names of the same tensor get the same object."""
    by_key = {lazy.key: torch.empty(lazy.shape, dtype=lazy.dtype) for lazy in tensors.values()}
    for checkpoint in {id(lazy._checkpoint): lazy._checkpoint for lazy in tensors.values()}.values():
        checkpoint.load(by_key.__contains__, out=by_key)
    return {name: by_key[lazy.key] for name, lazy in tensors.items()}


def _save(tensors: Mapping[str, LazyTensor], path: str, safetensors: bool) -> None:
    read = _read(tensors)
    if not safetensors:
        torch.save(read, path)
        return
    from safetensors.torch import save_file

    first: dict[int, str] = {}
    own = {name: t if first.setdefault(id(t), name) == name else t.clone() for name, t in read.items()}
    save_file(own, path, metadata={"format": "pt"})
