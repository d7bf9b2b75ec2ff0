"""Reads the folder of a Hugging Face model as a ``Source``: its weights and buffers, to begin a run with.

The folder has the weights under the names that they have on the hub. A checkpoint needs the names of the model's
parameters. To compare both, a model without memory is made from the configuration, without running any code of the
folder.
"""

from __future__ import annotations

import json
import math
import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from zckpt.converting.restricted_pickle import TorchFiles
from zckpt.converting.source import AS_WRITTEN, COPY_AGAIN, RankPart, Source, check_regular, values_of
from zckpt.engines.hugging_face import empty_model
from zckpt.engines.tensors import dtype_name, named_parameters, persistent_buffers
from zckpt.errors import FormatError, MissingFileError, UnsupportedError, first_few
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.limits import NDIM_MAX
from zckpt.state.inventory import BUFFER, PARAM, FileSpan, Fragment

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

HEADER_BYTES_MAX = 100_000_000
"""The limit that safetensors itself has."""


def read_hugging_face(path: str) -> Source:
    """Reads the folder at ``path``. Raises UnsupportedError where transformers is not installed, or would rename or
    reshape the weights; MissingFileError, FormatError and StorageError."""
    with values_of(path):
        return _read(path)


def _read(path: str) -> Source:
    model = _empty_model(path)
    (parameters, tied), (buffers, shared) = named_parameters(model), persistent_buffers(model)
    aliases = {**tied, **shared}
    files = TorchFiles()
    found: dict[str, Fragment] = {}
    for name, shape, dtype, data in _stored(path, files):
        own = aliases.get(name, name)
        place = BUFFER if own in buffers else PARAM
        numel = data.nbytes // ITEM_BYTES[dtype] if isinstance(data, FileSpan) else data.numel()
        found.setdefault(own, Fragment(place, own, shape, dtype, 0, numel, data=data))
    wanted = {name: tuple(tensor.shape) for name, tensor in {**parameters, **buffers}.items()}
    wrong = [name for name, one in found.items() if wanted.get(name) != one.shape]
    absent = [name for name in wanted if name not in found]
    if wrong or absent:
        raise UnsupportedError(
            f"{path}: the names or shapes of its weights are not those of the model's parameters: "
            f"{first_few([*wrong, *absent], 3)}",
            hint="load the model with from_pretrained, make an engine of it, and write that with zckpt.write",
        )

    def rank(_: int) -> RankPart:
        return RankPart([found[name] for name in wanted], {}, {}, files.place)

    description = {"framework": f"transformers {version('transformers')}", "mode": "weights alone"}
    parts = sorted({one.part for one in found.values()}, reverse=True)
    missing = (f"everything but weights and buffers: begin a run with zckpt.restore(engine, path, parts={parts})",)
    return Source(path, "Hugging Face model", 1, 0, aliases, {}, {}, description, missing, rank)


def _empty_model(path: str) -> Any:
    config = _json(os.path.join(path, "config.json"))
    model = empty_model(path, config)
    if model is None:
        name = next(iter(config.get("architectures") or []), None)
        raise UnsupportedError(
            f"{path} holds a model {name!r}, which transformers {version('transformers')} does not have",
            hint="load the model yourself, make an engine of it, and write that with zckpt.write",
        )
    return model


def _stored(path: str, files: TorchFiles) -> Iterator[tuple[str, tuple[int, ...], str, FileSpan | torch.Tensor]]:
    """Yields the name, shape, dtype and data of each tensor. If there are safetensors files, others are not read."""
    for suffix, stem in ((".safetensors", "model"), (".bin", "pytorch_model")):
        for name in _files(path, f"{stem}{suffix}"):
            file = os.path.join(path, name)
            if suffix == ".bin":
                with values_of(file):
                    for key, tensor in files.load(file).items():
                        dtype = dtype_name(tensor.dtype, key)
                        yield key, tuple(tensor.shape), dtype, tensor.detach().contiguous().view(-1)
            else:
                yield from _safetensors(file)
        if os.path.exists(os.path.join(path, f"{stem}{suffix}")) or _index(path, f"{stem}{suffix}"):
            return


def _files(path: str, single: str) -> list[str]:
    index = _index(path, single)
    if index:
        names = _json(index).get("weight_map")
        if not isinstance(names, dict):
            raise FormatError("the index has no weight_map", file=index, hint=COPY_AGAIN)
        if any(not isinstance(name, str) or os.path.basename(name) != name for name in names.values()):
            raise FormatError("the index names files elsewhere", file=index, hint=AS_WRITTEN)
        return sorted(set(names.values()))
    return [single] if os.path.exists(os.path.join(path, single)) else []


def _index(path: str, single: str) -> str | None:
    index = os.path.join(path, f"{single}.index.json")
    return index if os.path.exists(index) else None


def _json(path: str) -> dict[str, Any]:
    """Raises FormatError for what is not a JSON object, and StorageError."""
    with values_of(path):
        check_regular(path)
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    if not isinstance(found, dict):
        raise FormatError("the file is not a JSON object", file=path, hint=COPY_AGAIN)
    return found


def _safetensors(path: str) -> Iterator[tuple[str, tuple[int, ...], str, FileSpan]]:
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
    for name, entry in header.items() if isinstance(header, dict) else ():
        if name == "__metadata__":
            continue
        try:
            (start, stop), shape, item = entry["data_offsets"], tuple(entry["shape"]), ITEM_BYTES[entry["dtype"]]
            natural = all(type(one) is int and one >= 0 for one in (start, stop, *shape))
            whole = natural and len(shape) <= NDIM_MAX and stop - start == math.prod(shape) * item
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError("an entry of the header cannot be read", file=path, key=name, hint=COPY_AGAIN) from error
        if not whole or 8 + length + stop > size:
            raise FormatError("the file is cut off, or its header is wrong", file=path, key=name, hint=COPY_AGAIN)
        yield name, shape, entry["dtype"], FileSpan(path, 8 + length + start, stop - start)
