"""Reads the folder of a Hugging Face model as a ``Source``: its weights and buffers, from which a run can begin.

In the folder, the weights have the names that they have on the hub. A checkpoint needs the names of the model's
parameters. To compare the two, a model without memory is made from the configuration, without running any code that is
in the folder.
"""

from __future__ import annotations

import json
import math
import os
from importlib.metadata import version
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from zckpt.engines.tensors import dtype_name, named_parameters, persistent_buffers
from zckpt.errors import FormatError, MissingFileError, UnsupportedError, first_few
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.limits import NDIM_MAX
from zckpt.geometry import all_of
from zckpt.plan.inventory import BUFFER, PARAM, FileRange, Fragment
from zckpt.tools.converting.restricted_pickle import load
from zckpt.tools.converting.source import (
    AS_WRITTEN,
    COPY_AGAIN,
    RankPart,
    Source,
    check_regular,
    file_states,
    values_of,
)
from zckpt.tools.hugging_face import empty_model
from zckpt.transfer.stored import in_order, stored_range

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

HEADER_BYTES_MAX = 100_000_000
"""The largest header of a safetensors file, and the largest JSON file, that is read, in bytes. The safetensors library
has the same limit for headers."""


def read_hugging_face(path: str) -> Source:
    """Reads the folder at ``path``. Raises UnsupportedError if transformers is not installed, or if it would rename or
    reshape the weights. Raises MissingFileError, FormatError and StorageError."""
    with values_of(path):
        return _read(path)


def _read(path: str) -> Source:
    files = file_states(path)
    stored = list(_stored(path))
    model = _empty_model(path, len(stored))
    (parameters, tied_parameters), (buffers, tied_buffers) = named_parameters(model), persistent_buffers(model)
    aliases = {**tied_parameters, **tied_buffers}
    fragments: dict[str, Fragment] = {}
    for name, shape, dtype, data in stored:
        first_name = aliases.get(name, name)
        part = BUFFER if first_name in buffers else PARAM
        fragments.setdefault(first_name, Fragment(part, first_name, dtype, all_of(shape), data=data))
    shapes = {name: tuple(tensor.shape) for name, tensor in {**parameters, **buffers}.items()}
    wrong = [name for name, fragment in fragments.items() if shapes.get(name) != fragment.shape]
    absent = [name for name in shapes if name not in fragments]
    if wrong or absent:
        raise UnsupportedError(
            f"{path}: the names or shapes of its weights are not those of the model's parameters: "
            f"{first_few([*wrong, *absent], 3)}",
            hint="load the model with from_pretrained, make an engine of it, and write that with zckpt.write",
        )

    def rank(_: int) -> RankPart:
        return RankPart([fragments[name] for name in shapes], {}, {})

    description = {"framework": f"transformers {version('transformers')}", "mode": "weights alone"}
    parts = sorted({fragment.part for fragment in fragments.values()}, reverse=True)
    missing = (f"everything but weights and buffers: begin a run with zckpt.restore(engine, path, parts={parts})",)
    return Source(path, "Hugging Face model", 1, 0, aliases, {}, {}, description, missing, files, rank)


def _empty_model(path: str, tensors: int) -> Any:
    """Returns the model without memory that the configuration in the folder describes."""
    config = _json(os.path.join(path, "config.json"))
    model = empty_model(path, config, tensors)
    if model is None:
        name = next(iter(config.get("architectures") or []), None)
        raise UnsupportedError(
            f"{path} holds a model {name!r}, which transformers {version('transformers')} does not have",
            hint="load the model yourself, make an engine of it, and write that with zckpt.write",
        )
    return model


def _stored(path: str) -> Iterator[tuple[str, tuple[int, ...], str, FileRange | torch.Tensor]]:
    """Yields the name, shape, dtype and data of each tensor. If the folder has safetensors files, other files are not
    read."""
    for suffix, stem in ((".safetensors", "model"), (".bin", "pytorch_model")):
        names = _files(path, f"{stem}{suffix}")
        for name in names or ():
            file = os.path.join(path, name)
            if suffix == ".bin":
                with values_of(file):
                    for key, tensor in load(file).items():
                        dtype, ordered = dtype_name(tensor.dtype, key), in_order(tensor.detach())
                        yield key, tuple(tensor.shape), dtype, stored_range(ordered) or ordered.view(-1)
            else:
                yield from _safetensors(file)
        if names is not None:
            return


def _files(path: str, single: str) -> list[str] | None:
    """Returns the names of the files with the tensors: those that the index names, or the file ``single`` if there is
    no index. Returns None if there is neither. ``single``: the name of the file of a model that is in one file."""
    index = os.path.join(path, f"{single}.index.json")
    if os.path.exists(index):
        names = _json(index).get("weight_map")
        if not isinstance(names, dict):
            raise FormatError("the index has no weight_map", file=index, hint=COPY_AGAIN)
        if any(not isinstance(name, str) or os.path.basename(name) != name for name in names.values()):
            raise FormatError("the index names files elsewhere", file=index, hint=AS_WRITTEN)
        return sorted(set(names.values()))
    return [single] if os.path.exists(os.path.join(path, single)) else None


def _json(path: str) -> dict[str, Any]:
    """Returns the content of a JSON file. Raises FormatError if it is not a JSON object, and StorageError."""
    with values_of(path):
        check_regular(path)
        if os.path.getsize(path) > HEADER_BYTES_MAX:
            raise FormatError(f"the file has more than {HEADER_BYTES_MAX} bytes", file=path, hint=AS_WRITTEN)
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    if not isinstance(content, dict):
        raise FormatError("the file is not a JSON object", file=path, hint=COPY_AGAIN)
    return content


def _safetensors(path: str) -> Iterator[tuple[str, tuple[int, ...], str, FileRange]]:
    """Yields the name, shape, dtype and place of each tensor in a safetensors file."""
    if not os.path.exists(path):
        raise MissingFileError("a file that the index names is missing", file=path, hint=COPY_AGAIN)
    with values_of(path):
        check_regular(path)
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
                raise FormatError(
                    "the file is cut off, or not in the format of safetensors", file=path, hint=COPY_AGAIN
                )
            header = json.loads(file.read(length))
    ranges = []
    for name, entry in header.items() if isinstance(header, dict) else ():
        if name == "__metadata__":
            continue
        try:
            (start, stop), shape, itemsize = entry["data_offsets"], tuple(entry["shape"]), ITEM_BYTES[entry["dtype"]]
            natural = all(type(number) is int and number >= 0 for number in (start, stop, *shape))
            whole = natural and len(shape) <= NDIM_MAX and stop - start == math.prod(shape) * itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError("an entry of the header cannot be read", file=path, key=name, hint=COPY_AGAIN) from error
        if not whole or 8 + length + stop > size:
            raise FormatError("the file is cut off, or its header is wrong", file=path, key=name, hint=COPY_AGAIN)
        ranges.append((start, stop, name))
        yield name, shape, entry["dtype"], FileRange(path, 8 + length + start, stop - start)
    for (_, stop, _), (start, _, name) in pairwise(sorted(ranges)):
        if start < stop:
            raise FormatError("two tensors share bytes of the file", file=path, key=name, hint=COPY_AGAIN)
