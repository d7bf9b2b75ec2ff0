"""Reads the folder of a distributed checkpoint of PyTorch (DCP), and files of ``torch.save``, as a ``Source``.

    <folder>/.metadata          a pickle: the names, shapes and dtypes of all tensors, and where each chunk is
    <folder>/__R_N.distcp       the chunks of tensors and the plain values that rank R has written, one after another,
                                each as torch.save writes it

Accelerate and Trainer save FSDP models in several folders or files: ``pytorch_model_fsdp_0`` and ``optimizer_0``, or
``pytorch_model_fsdp.bin`` and ``optimizer.bin``, and the scheduler beside them.
"""

from __future__ import annotations

import math
import os
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from zckpt.checkpoint.listing.other_formats import FSDP_MODELS
from zckpt.checkpoint.reading.state_dict import is_path
from zckpt.engines.state_dict import leaves_of
from zckpt.engines.tensors import dtype_name
from zckpt.errors import FormatError, MissingFileError, UnsupportedError, printable
from zckpt.format.limits import NDIM_MAX
from zckpt.geometry import all_of, box_of
from zckpt.plan.inventory import FileRange
from zckpt.tools.converting.restricted_pickle import load, load_pickle
from zckpt.tools.converting.source import AS_WRITTEN, COPY_AGAIN, Source, file_states, is_file_name, values_of
from zckpt.tools.converting.state_dicts import Leaves, Shard, StoredTensor, source_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.engines.state_dict import Path

METADATA = ".metadata"
_FILE = re.compile(r"__(\d{1,9})_\d+\.distcp", re.ASCII)
_OPTIMIZERS, _SCHEDULERS = ("optimizer_0", "optimizer.bin"), ("scheduler.pt", "scheduler.bin")
Bounds = tuple[tuple[int, int], ...]
"""The first index of a chunk and the number of its indices, in each dimension."""


def read_dcp(path: str) -> Source:
    """Reads a DCP folder. Raises UnsupportedError, MissingFileError, FormatError and StorageError."""
    files = file_states(path)
    with values_of(os.path.join(path, METADATA)):
        return source_of(_folder(path), path, "DCP folder", files)


def read_torch_file(path: str) -> Source:
    """Reads a file of ``torch.save`` that has a state dict. Raises the errors of ``read_dcp``."""
    files = file_states(path)
    with values_of(path):
        return source_of(_torch_file(path), path, "file of torch.save", files)


def read_accelerate(path: str) -> Source:
    """Reads what Accelerate or Trainer has saved of an FSDP model. Raises the errors of ``read_dcp``."""
    files, leaves = file_states(path), Leaves()
    with values_of(path):
        for names, prefix in ((FSDP_MODELS, ()), (_OPTIMIZERS, ()), (_SCHEDULERS, ("scheduler",))):
            for name in names:
                part = os.path.join(path, name)
                if os.path.exists(part):
                    leaves.add(_folder(part) if os.path.isdir(part) else _torch_file(part), prefix)
                    break
        return source_of(leaves, path, "FSDP checkpoint of Accelerate", files)


def _torch_file(path: str) -> Leaves:
    """Returns the leaves of the state dict in a file of ``torch.save``."""
    content = load(path)
    if not isinstance(content, dict):
        raise UnsupportedError(f"{printable(path)} has a {type(content).__name__}, and no state dict")
    leaves, made = leaves_of(content), Leaves()
    for name, leaf in leaves.items():
        made.paths[name] = leaf.path
        if leaf.is_tensor:
            shape = tuple(leaf.value.shape)
            dtype_name(leaf.value.dtype, name)
            made.tensors[name] = StoredTensor(leaf.value.dtype, shape, (Shard(0, all_of(shape), shape, leaf.value),))
        else:
            made.values[name] = leaf.value
    return made


def _folder(path: str) -> Leaves:
    """Returns the leaves of the state dict in a DCP folder. No chunk is read."""
    file = os.path.join(path, METADATA)
    if not os.path.exists(file):
        raise MissingFileError("the file .metadata of the DCP folder is missing", file=file, hint=COPY_AGAIN)
    with values_of(file):
        metadata = vars(_of_class(load_pickle(file), "Metadata"))
        places, ranks = _places(path, metadata["storage_data"])
        made, paths = Leaves(ranks=len(set(ranks.values())) or 1), metadata["planner_data"] or {}
        for name, entry in metadata["state_dict_metadata"].items():
            leaf_path = paths.get(name, (name,))
            if not is_path(leaf_path) or type(name) is not str:
                raise FormatError(f"{name!r} has the path {leaf_path!r}")
            made.paths[name] = leaf_path
            if type(entry).__name__ == "BytesStorageMetadata":
                made.values[name] = _value(name, places)
            else:
                made.tensors[name] = _tensor(name, vars(_of_class(entry, "TensorStorageMetadata")), places, ranks)
        return made


def _places(path: str, storage_data: Any) -> tuple[dict[tuple[str, Path | None], FileRange], dict[str, int]]:
    """Returns the range of a file for each chunk, by its name and its first index in each dimension, and for each file
    the number of the rank that has written it."""
    places: dict[tuple[str, Path | None], FileRange] = {}
    for index, info in storage_data.items():
        index, info = vars(_of_class(index, "MetadataIndex")), vars(_of_class(info, "_StorageInfo"))
        if info.get("transform_descriptors"):
            raise UnsupportedError(
                f"{printable(path)} was written with an extension: {info['transform_descriptors']}",
                hint="load it with torch.distributed.checkpoint, and write the state with zckpt.write",
            )
        name, offset, nbytes = info["relative_path"], info["offset"], info["length"]
        if type(name) is not str or not is_file_name(name):
            raise FormatError(f"it names a file that is not in the folder: {name!r}")
        if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes < 0:
            raise FormatError(f"it names the bytes {offset!r} to {nbytes!r} of {name}")
        first = index.get("offset")
        places[index["fqn"], None if first is None else tuple(first)] = FileRange(
            os.path.join(path, name), offset, nbytes
        )
    numbers = {place.path: _FILE.fullmatch(os.path.basename(place.path)) for place in places.values()}
    of_files = {file: int(match[1]) if match else 0 for file, match in numbers.items()}
    order = {number: rank for rank, number in enumerate(sorted(set(of_files.values())))}
    return places, {file: order[number] for file, number in of_files.items()}


def _value(name: str, places: Mapping[tuple[str, Path | None], FileRange]) -> Any:
    """Returns a plain value."""
    place = places.get((name, None))
    if place is None:
        raise FormatError(f"it does not say where {name} is", key=name)
    value = load(place.path, place)
    if isinstance(value, torch.Tensor):
        raise FormatError(f"{name} is a tensor, and .metadata says it is none", file=place.path, key=name)
    return value


def _tensor(
    name: str,
    entry: Mapping[str, Any],
    places: Mapping[tuple[str, Path | None], FileRange],
    ranks: Mapping[str, int],
) -> StoredTensor:
    """Returns a tensor. ``entry``: what ``.metadata`` has of it. Raises FormatError if its chunks do not have each of
    its elements once."""
    dtype, shape = _of_class(entry["properties"], "TensorProperties").args[0], tuple(entry["size"])
    dtype_name(dtype, name)
    if len(shape) > NDIM_MAX or not all(type(size) is int and size >= 0 for size in shape):
        raise FormatError(f"{name} has the shape {shape}", key=name)
    held: list[tuple[Bounds, FileRange]] = []
    for of_chunk in entry["chunks"]:
        chunk = vars(_of_class(of_chunk, "ChunkStorageMetadata"))
        first, sizes = tuple(chunk["offsets"]), tuple(chunk["sizes"])
        if not len(first) == len(sizes) == len(shape) or not all(
            type(begin) is int and type(size) is int and 0 <= begin <= begin + size <= total
            for begin, size, total in zip(first, sizes, shape, strict=True)
        ):
            raise FormatError(f"{name} of shape {list(shape)} has a chunk of {list(sizes)} at {list(first)}", key=name)
        if (name, first) not in places:
            raise FormatError(f"it does not say where the chunk of {name} at {list(first)} is", key=name)
        held.append((tuple(zip(first, sizes, strict=True)), places[name, first]))
    divided = divisions(name, shape, [bounds for bounds, _ in held])
    chunks = [
        Shard(ranks[place.path], box_of(shape, divided, bounds), tuple(size for _, size in bounds), place)
        for bounds, place in held
    ]
    # DCP lists the chunks of HSDP in the order of the ranks of which it has chosen one for each.
    chunks.sort(key=lambda chunk: chunk.span)
    if not chunks:  # It has no elements, so no rank has written any.
        chunks = [Shard(0, all_of(shape), shape, torch.empty(shape, dtype=dtype, device="cpu"))]
    return StoredTensor(dtype, shape, tuple(chunks))


def divisions(name: str, shape: Sequence[int], chunks: Sequence[Bounds]) -> list[list[tuple[int, int]]]:
    """Returns how each dimension of a tensor is divided. ``chunks``: all chunks of the tensor, some of which may be
    empty. Raises FormatError unless they are the boxes of such a division."""
    held = [bounds for bounds in chunks if all(size for _, size in bounds)]
    numel = sum(math.prod(size for _, size in bounds) for bounds in held)
    if numel != math.prod(shape):
        raise FormatError(
            f"the chunks of {name} have {numel} elements, and it has {math.prod(shape)}: some are missing, or there "
            "twice", key=name, hint=AS_WRITTEN,
        )  # fmt: skip
    divided = [sorted(set(of_dim)) for of_dim in zip(*held, strict=True)] or [[] for _ in shape]
    ends = ([(0, 0), *division, (size, 0)] for division, size in zip(divided, shape, strict=True))
    whole = not numel or all(sum(one) == other[0] for division in ends for one, other in pairwise(division))
    if not whole or len(set(held)) != len(held) or (numel and math.prod(map(len, divided)) != len(held)):
        raise FormatError(
            f"the chunks of {name} overlap, or do not lie in rows and columns: {list(held[:4])}", key=name,
            hint="save the state with zckpt.write or zckpt.write_state_dict",
        )  # fmt: skip
    return divided


def _of_class(value: Any, name: str) -> Any:
    """Returns an object in the place of one of torch's class ``name``. Raises FormatError for any other."""
    if type(value).__name__ != name:
        raise FormatError(f"it has a {type(value).__name__} in the place of a {name}")
    return value
