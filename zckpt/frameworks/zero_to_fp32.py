"""Reads checkpoints of zckpt with functions that have the names of those in ``deepspeed.utils.zero_to_fp32``."""

from __future__ import annotations

import functools
import inspect
import json
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.reading.checkpoint import Checkpoint
from zckpt.errors import UnsupportedError, first_few, warn
from zckpt.format import names
from zckpt.plan.inventory import unconverted
from zckpt.storage.location import Location
from zckpt.storage.process_names import own_temporary
from zckpt.storage.schemes import open_store
from zckpt.tools.exporting.checkpoint_source import refuse_no_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.storage.location import StrPath

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

_MARK = "_zckpt_reads"
_OPENERS = ("get_model_state_file", "get_model_state_files", "get_optim_files")
"""The functions of DeepSpeed that return the names of files in its own format."""


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor of a checkpoint that is read only when ``contiguous()`` is called."""

    key: str
    """The key of the tensor in the checkpoint."""
    dtype: torch.dtype
    """The dtype of what ``contiguous()`` returns. It is float32 for all floating point tensors."""
    shape: torch.Size
    """The shape of the tensor."""
    _checkpoint: Checkpoint = field(repr=False)

    def contiguous(self) -> torch.Tensor:
        """Reads the tensor, and returns it in CPU memory."""
        return _read({self.key: self})[self.key]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: StrPath,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Returns the weights of a zckpt checkpoint in float32, like DeepSpeed's function of the same name.

    Args:
        checkpoint_dir: the directory of a run, or that of a checkpoint.
        tag: the name of the checkpoint in the run. None means the checkpoint that ``latest`` names, or
            ``checkpoint_dir`` itself.
        exclude_frozen_parameters: whether parameters that were not trained are left out.
        lazy_mode: whether the values are objects with ``shape``, ``dtype`` and ``contiguous()``, which reads the
            tensor. So only the tensors in use take memory. All names of a tied weight have the same object.

    Returns:
        A dict for ``model.load_state_dict`` with the weights and persistent buffers, on the CPU. A tied weight has all
        of its names. All floating point tensors are float32.

    Raises:
        ZckptError: the checkpoint cannot be read. ``zckpt.open`` and ``Checkpoint.load`` list these errors.
    """
    path = Location.of(checkpoint_dir).child("" if tag is None else str(tag))
    tensors = _lazy_tensors(open_loader(str(path)), exclude_frozen_parameters)
    return dict(tensors) if lazy_mode else _read(tensors)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: StrPath, tag: str | int | None = None
) -> torch.nn.Module:
    """Moves a model to the CPU, and loads the weights and buffers of a zckpt checkpoint into it.

    The checkpoint is read in float32, and the values are converted to the dtypes of the model. If the model or the
    checkpoint has tensors that the other does not have, they are left out, with a warning.

    Args:
        model: the model.
        checkpoint_dir: the directory of a run, or that of a checkpoint.
        tag: the name of the checkpoint in the run. None means the checkpoint that ``latest`` names, or
            ``checkpoint_dir`` itself.

    Returns:
        The model.

    Raises:
        RuntimeError: a tensor of the checkpoint has another shape than the tensor of the same name in the model.
        ZckptError: the checkpoint cannot be read. ``zckpt.open`` and ``Checkpoint.load`` list these errors.
    """
    state_dict = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    missing, unexpected = model.load_state_dict(state_dict, strict=False)
    lacking = [("the checkpoint", missing), ("the model", unexpected)]
    lines = [f"{which} lacks {len(keys)} tensors: {first_few(keys, 5, ', ...')}" for which, keys in lacking if keys]
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
    """Writes the weights and buffers of a zckpt checkpoint in float32 to one file, or to several.

    The tensors of one file are in memory at the same time. In ``pytorch_model.bin``, all names of a tied weight share
    its memory. safetensors does not support that, so its file has a copy of the weight for every name. Each file
    appears once it is whole, so several ranks may call this with the same arguments.

    Args:
        checkpoint_dir: the directory of a run, or that of a checkpoint.
        output_dir: the directory of the new files. It is made if it does not exist.
        max_shard_size: the largest size of one file, as a number of bytes or a text such as "5GB". Larger output is
            split into several files with an index, which are named as Hugging Face names them. This needs the package
            ``huggingface_hub``. None writes a single file.
        safe_serialization: whether ``model.safetensors`` is written instead of ``pytorch_model.bin``.
        tag: the name of the checkpoint in the run. None means the checkpoint that ``latest`` names, or
            ``checkpoint_dir`` itself.
        exclude_frozen_parameters: whether parameters that were not trained are left out.

    Raises:
        ZckptError: the checkpoint cannot be read. ``zckpt.open`` and ``Checkpoint.load`` list these errors.
    """
    tensors = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True)
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    files, index = {f"{stem}{suffix}": list(tensors)}, None
    if max_shard_size is not None:
        from huggingface_hub import split_torch_state_dict_into_shards

        split = split_torch_state_dict_into_shards(
            {lazy.key: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta") for lazy in tensors.values()},
            filename_pattern=f"{stem}{{suffix}}{suffix}",
            max_shard_size=max_shard_size,
        )
        file_of = split.tensor_to_filename
        files = {
            file: [name for name in tensors if file_of[tensors[name].key] == file] for file in split.filename_to_tensors
        }
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": {name: file_of[tensors[name].key] for name in tensors}}
    os.makedirs(output_dir, exist_ok=True)
    for file, names_in_file in files.items():
        _save({name: tensors[name] for name in names_in_file}, os.path.join(output_dir, file), safe_serialization)
    if index is not None:
        path = os.path.join(output_dir, f"{stem}{suffix}.index.json")
        with _appearing_whole(path) as temporary, open(temporary, "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2, sort_keys=True)


def is_zckpts(path: StrPath) -> bool:
    """Returns whether this directory has a manifest. The manifest may be damaged."""
    return open_store(path).entry(names.MANIFEST) is not None


def teach_deepspeed() -> None:
    """Makes every function of ``deepspeed.utils.zero_to_fp32`` read the checkpoints of zckpt as well as those of
    DeepSpeed, even if it was imported before. Functions that return the names of DeepSpeed's files raise
    UnsupportedError for a checkpoint of zckpt."""
    from deepspeed.utils import zero_to_fp32 as module

    inner = "_get_fp32_state_dict_from_zero_checkpoint"  # All of these functions read a folder by calling this one.
    original: Callable[..., Any] = getattr(module, inner)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def read(ds_checkpoint_dir: StrPath, exclude_frozen_parameters: bool) -> Any:
        if is_zckpts(ds_checkpoint_dir):
            return _lazy_tensors(open_loader(ds_checkpoint_dir), exclude_frozen_parameters)
        return original(ds_checkpoint_dir, exclude_frozen_parameters)

    setattr(read, _MARK, True)
    setattr(module, inner, read)
    for opener in _OPENERS:
        setattr(module, opener, _refusing(getattr(module, opener)))


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        checkpoint_dir, *_ = signature.bind(*args, **kwargs).arguments.values()
        if is_zckpts(checkpoint_dir):
            raise UnsupportedError(
                f"{os.fspath(checkpoint_dir)} is a zckpt checkpoint, "
                f"without the files that {original.__name__} looks for",
                hint="zckpt.get_fp32_state_dict_from_zero_checkpoint(directory) returns the weights, "
                f'zckpt.open(directory).state["{names.CLIENT_STATE}"] what was saved beside them',
            )
        return original(*args, **kwargs)

    return refuse


def _lazy_tensors(loader: Loader, exclude_frozen_parameters: bool) -> dict[str, LazyTensor]:
    """Returns the weights and buffers by name. A tied weight has all of its names. A weight that has master weights is
    read from these."""
    trained, kept = "master" in loader.parts, unconverted(loader.extra_state)
    parts = ("buffer", "master") if exclude_frozen_parameters and trained else ("buffer", "param", "master")
    refuse_no_weights(loader, (info for info in loader.contents.values() if info.part in parts))
    checkpoint, tensors = Checkpoint(loader), {}
    for part in parts:
        for key, info in loader.contents.items():
            if info.part == part:
                dtype = torch.float32 if info.dtype.is_floating_point and info.name not in kept else info.dtype
                tensors[info.name] = LazyTensor(key, dtype, torch.Size(info.shape), checkpoint)
    return tensors | {alias: tensors[name] for alias, name in checkpoint.aliases.items() if name in tensors}


def _read(tensors: Mapping[str, LazyTensor]) -> dict[str, torch.Tensor]:
    """Reads all tensors in one pass. All names of a tied weight get the same object."""
    by_key = {lazy.key: torch.empty(lazy.shape, dtype=lazy.dtype, device="cpu") for lazy in tensors.values()}
    for checkpoint in {id(lazy._checkpoint): lazy._checkpoint for lazy in tensors.values()}.values():
        checkpoint.load(by_key.__contains__, out=by_key)
    return {name: by_key[lazy.key] for name, lazy in tensors.items()}


def _save(tensors: Mapping[str, LazyTensor], path: str, safetensors: bool) -> None:
    loaded = _read(tensors)
    with _appearing_whole(path) as temporary:
        if safetensors:
            _save_safetensors(loaded, temporary)
        else:
            torch.save(loaded, temporary)


@contextmanager
def _appearing_whole(path: str) -> Iterator[str]:
    """Yields the path of a temporary file. At the end of this block, the file is renamed to ``path``. After an error,
    it is removed, and what was at ``path`` is unchanged."""
    temporary = own_temporary(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _save_safetensors(loaded: Mapping[str, torch.Tensor], path: str) -> None:
    from safetensors.torch import save_file

    # safetensors refuses tensors that share memory.
    first_name: dict[int, str] = {}
    separate = {
        name: tensor if first_name.setdefault(id(tensor), name) == name else tensor.clone()
        for name, tensor in loaded.items()
    }
    save_file(separate, path, metadata={"format": "pt"})
