"""Plans the tensors and files of a model as Hugging Face's ``save_pretrained`` writes them, by transformers' own rules.

Some weights, such as those of a mixture of experts, have other names and shapes in memory than in files. Therefore a
model without memory (on the device "meta") is made from its configuration, and transformers converts the weights of
this model. Most of the results are views of the weights. The strides of a view tell which elements of the source the
file has, so such a weight need not be whole in memory.
"""

from __future__ import annotations

import fnmatch
import json
import os
import tempfile
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zckpt.errors import MismatchError, UnsupportedError, first_few, from_os_error
from zckpt.geometry import all_of
from zckpt.tools.exporting.plan import (
    EXTENT_BYTES_MIN,
    Conversion,
    ExportPlan,
    Extent,
    Memory,
    OutputTensor,
    SourceTensor,
    count_runs,
    runs_of_view,
    safetensors_files,
    split_into_files,
)
from zckpt.tools.exporting.selection import first_names
from zckpt.tools.hugging_face import empty_model, write_config
from zckpt.transfer.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES, torch_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

INDEX = "model.safetensors.index.json"
TAKEN_ALONG = (
    "generation_config.json", "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json",
    "*.model", "*.tiktoken", "*.spm", "*.jinja", "chat_template*", "*processor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Patterns of the files in a model's folder that are copied as they are: the tokenizer, the processor and the terms of
use."""
MODEL_CODE = ("*.py",)
"""Patterns of the files that are copied too if the class of the model is not one of transformers."""
FILES = ("model.safetensors", "model-*-of-*.safetensors", INDEX, "config.json", *TAKEN_ALONG, *MODEL_CODE)
"""Patterns of all files that the export of a model may write."""


def plan_hugging_face(
    names: Mapping[str, str], sources: Mapping[str, SourceTensor], folder: str | None, file_bytes_max: int
) -> ExportPlan:
    """Plans the files of a model's folder.

    ``names``: maps the names of all weights and persistent buffers in the model in memory to their names in
    ``sources``. ``folder``: the folder with the configuration of the model. If it is None, tensors keep their names and
    shapes, a tied weight has one of its names, and no configuration is written. ``file_bytes_max``: the largest size of
    a file in bytes.

    Raises MismatchError if the model of this configuration has other tensors; UnsupportedError if transformers does not
    have the class of the model, or is not installed; FormatError if no model can be made from the configuration; and
    StorageError.
    """
    small_files: dict[str, bytes] = {}
    tensors: list[OutputTensor] = []
    memory: dict[str, Memory] = {}
    exported = {name: sources[source] for source, name in first_names(names).items()}
    parameters = sum(tensor.numel for tensor in exported.values())
    model = None
    if folder is not None:
        config = _read_config(folder)
        model = _empty_model(folder, config, len(sources))
        small_files = dict(_taken_along(folder, (*TAKEN_ALONG, *(MODEL_CODE if model is None else ()))))
        if model is None:
            small_files["config.json"] = _with_dtype(config, exported)
    if model is None:
        tensors = [
            OutputTensor(name, tensor.dtype, tensor.shape, (Extent(names[name], tensor.all),))
            for name, tensor in sorted(exported.items(), key=lambda item: _natural(item[0]))
        ]
    else:
        _fill(model, names, sources)
        tensors, memory = convert_names(model, names)
        parameters = model.num_parameters()
        small_files = {**_written_by(model), **small_files}
    groups = split_into_files(tensors, file_bytes_max, memory)
    files = safetensors_files(groups)
    if len(files) > 1:
        blocks = set(memory.values()) if memory else tensors
        nbytes = sum(block.nbytes for block in blocks)
        small_files[INDEX] = _index(dict(zip([file.name for file in files], groups, strict=True)), parameters, nbytes)
    return ExportPlan(files, small_files)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a sort key for the names of tensors. It sorts numbers by their values, so layer 2 comes before layer
    10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def _index(groups: Mapping[str, Sequence[OutputTensor]], parameters: int, nbytes: int) -> bytes:
    """Returns the index file as ``save_pretrained`` writes it. ``groups``: the tensors of each file, by its name.
    ``parameters`` and ``nbytes``: the number of parameters, and of their bytes."""
    weight_map = {tensor.name: file for file, group in groups.items() for tensor in group}
    index = {"metadata": {"total_parameters": parameters, "total_size": nbytes}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


# The configuration


def _read_config(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        storage_error = from_os_error(error, "read the model's configuration", path)
        storage_error.hint = (
            "--config (config= in Python) has to be the folder of the model that was trained, with config.json"
        )
        raise storage_error from error
    except (ValueError, RecursionError) as error:
        raise MismatchError(f"this is not JSON: {error}", file=path) from error
    if not isinstance(config, dict):
        raise MismatchError("this is not the configuration of a model", file=path)
    if "quantization_config" in config:
        raise UnsupportedError(
            "the configuration is for quantized weights, and zckpt does not write the folder of such a model",
            file=path,
            hint="format='pt' exports all tensors under the names that they have in the model; remove "
            "quantization_config from config.json if the model was trained without quantization",
        )
    return config


def _empty_model(folder: str, config: Mapping[str, Any], tensors: int) -> Any:
    """Returns the model of this configuration, without memory. Returns None if the class of the model is not one of
    transformers, but is defined by code in the model's folder. Raises UnsupportedError if there is no such code."""
    model = empty_model(folder, config, tensors)
    if model is None and "auto_map" not in config:
        name = next(iter(config.get("architectures") or []), None)
        problem = f"has no model {name!r}" if name else "cannot know the class of the model: there are no architectures"
        raise UnsupportedError(
            f"transformers {version('transformers')} {problem}",
            file=os.path.join(folder, "config.json"),
            hint='name the class of the model that was trained, such as "architectures": ["LlamaForCausalLM"]',
        )
    return model


def _taken_along(folder: str, patterns: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            try:
                with open(path, "rb") as file:
                    yield name, file.read()
            except OSError as error:
                raise from_os_error(error, "read", path) from error


def _with_dtype(config: Mapping[str, Any], sources: Mapping[str, SourceTensor]) -> bytes:
    """Returns the configuration of a model that transformers does not know, with the dtype of the exported weights."""
    dtypes = [dtype for source in sources.values() if (dtype := TORCH_DTYPES[source.dtype]).is_floating_point]
    name = torch_name(dtypes[0]) if dtypes else None
    return (json.dumps({**config, "dtype": name}, indent=2, sort_keys=True) + "\n").encode()


def _written_by(model: Any) -> dict[str, bytes]:
    """Returns the files that ``save_pretrained`` writes in addition to the weights, by their names."""
    model.config.dtype = torch_name(model.dtype)
    with tempfile.TemporaryDirectory() as directory:
        write_config(model, type(model).__name__, directory)
        return dict(_taken_along(directory, ["*"]))


# Names and shapes


def _fill(model: Any, names: Mapping[str, str], sources: Mapping[str, SourceTensor]) -> None:
    """Gives the model tensors without memory, which have the shapes and dtypes of ``sources`` and are tied as ``names``
    says. Raises MismatchError if the model does not have the tensors of ``names``."""
    of_model = model.state_dict(keep_vars=True)
    known = {names[name] for name in of_model if name in names}
    different_shapes = [
        f"{name} is {list(tensor.shape)} by the configuration, {list(sources[names[name]].shape)} here"
        for name, tensor in of_model.items()
        if name in names and tuple(tensor.shape) != sources[names[name]].shape
    ]
    lines = [
        f"{which} lacks {len(lacking)} tensors: {first_few(lacking, 5)}"
        for which, lacking in [
            ("the source", [name for name in of_model if name not in names]),
            (
                "the model of the configuration",
                [name for source, name in first_names(names).items() if source not in known],
            ),
        ]
        if lacking
    ]
    if different_shapes:
        lines.append(f"{len(different_shapes)} shapes differ: {first_few(different_shapes, 5)}")
    if lines:
        prefix = _unknown_prefix(names, of_model)
        raise MismatchError(
            f"this is not a {type(model).__name__} of that configuration: {'; '.join(lines)}",
            hint="give the configuration of the model that was trained, with the changes that the training has made to "
            "it, such as a larger vocabulary; or give none: then tensors keep their names (a live engine has its own, "
            "which format='pt' does not use)"
            if prefix is None
            else f"if this model is the module {prefix!r} of the one that was trained, export this module: "
            f"strip_prefix={prefix!r} (--strip-prefix {prefix})",
        )
    empty = {
        source: torch.empty(sources[source].shape, dtype=TORCH_DTYPES[sources[source].dtype], device="meta")
        for source in known
    }
    parameters = {source: torch.nn.Parameter(tensor, requires_grad=False) for source, tensor in empty.items()}
    model.load_state_dict(
        {
            name: (parameters if isinstance(tensor, torch.nn.Parameter) else empty)[names[name]]
            for name, tensor in of_model.items()
        },
        assign=True,
    )


def _unknown_prefix(names: Collection[str], of_model: Collection[str]) -> str | None:
    """Returns the path, with a dot at the end, of a module that has all tensors ``of_model`` below it, or that all
    ``names`` and none of ``of_model`` begin with. Returns None if there is no such module."""
    first = next(iter(of_model), "")
    for name in names:
        prefix = name.removesuffix(first)
        if prefix.endswith(".") and all(prefix + other in names for other in of_model):
            return prefix
    modules = {name.partition(".")[0] for name in names}
    if len(modules) == 1 and modules.isdisjoint(name.partition(".")[0] for name in of_model):
        return f"{modules.pop()}."
    return None


class _Views(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which copies of tensors on the device "meta" become views of them. It records from which sources every
    new tensor is made."""

    def __init__(self, sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: list[torch.Tensor] = list(sources.values())
        self.source = {_storage(tensor): name for name, tensor in sources.items()}
        """The names of the sources, by their storages. A view of a source has the storage of the source."""
        self._made_of = {storage: frozenset([name]) for storage, name in self.source.items()}

    def made_of(self, tensor: torch.Tensor) -> frozenset[str]:
        """Returns the names of the sources from which a tensor is made."""
        return self._made_of.get(_storage(tensor), frozenset())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.clone.default:
            return aten.alias.default(args[0])
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func in (aten.view.default, aten._unsafe_view.default):
            try:
                return aten.view.default(*args)
            except RuntimeError:  # Without this mode, the input would be a contiguous copy, of which there is a view.
                out = aten.view.default(args[0].clone(memory_format=torch.contiguous_format), *args[1:])
        else:
            out = func(*args, **(kwargs or {}))
        names = frozenset[str]().union(*map(self.made_of, inputs))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in self._made_of:
                self._made_of[_storage(tensor)] = names
                self._alive.append(tensor)
        return out


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def convert_names(model: Any, names: Mapping[str, str]) -> tuple[list[OutputTensor], dict[str, Memory]]:
    """Returns the tensors that ``save_pretrained`` of a model on "meta" writes, in their order, and the memory in which
    each tensor would be. ``names``: maps the names of the model's tensors to the names of their sources."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, model)
    views = _Views(state)
    with views:
        outputs: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(state))
    extents: dict[str, tuple[Extent, ...]] = {}
    made: dict[str, frozenset[str]] = {}
    for name, tensor in outputs.items():
        source = views.source.get(_storage(tensor))
        if source is not None and _has_long_runs(tensor):
            whole, start = all_of(state[source].shape), int(tensor.storage_offset())
            columns = runs_of_view(tensor.shape, tensor.stride(), start)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            extents[name] = tuple(Extent(names[source], whole.narrow(first, numel)) for first, numel in rows)
        else:
            made[name] = views.made_of(tensor)
    conversions = _conversions(model, names, state, made, {name: outputs[name].shape for name in made})
    tensors = [
        OutputTensor(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), extents.get(name), conversions.get(name))
        for name, tensor in outputs.items()
    ]
    copies: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(state))
    memory = {name: Memory(_storage(copy), copy.untyped_storage().nbytes()) for name, copy in copies.items()}
    return tensors, memory


def _has_long_runs(view: torch.Tensor) -> bool:
    """Returns whether the runs of a view are long enough to read them one by one."""
    count = count_runs(view.shape, view.stride())
    return count <= 1 or view.nbytes >= EXTENT_BYTES_MIN * count


def _conversions(
    model: Any,
    names: Mapping[str, str],
    state: Mapping[str, torch.Tensor],
    made: Mapping[str, frozenset[str]],
    shapes: Mapping[str, torch.Size],
) -> dict[str, Conversion]:
    """Returns the conversion that makes each output. Outputs that have tensors of the model in common are made by one
    conversion. ``names``: the names of the sources of the model's tensors. ``made``: the names of the tensors of the
    model that each output is made of. ``shapes``: the shapes of the outputs. Raises UnsupportedError if an output
    cannot be made from these tensors alone."""
    from transformers.core_model_loading import revert_weight_conversion

    def converted(ordered: Sequence[str], elements: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {name: flat.view(state[name].shape) for name, flat in zip(ordered, elements, strict=True)}
        outputs: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
        return outputs

    conversions: dict[str, Conversion] = {}
    groups: list[tuple[set[str], list[str]]] = []
    for name, of_model in made.items():
        sources, outputs = set(of_model), [name]
        for group in [group for group in groups if sources & group[0]]:
            sources |= group[0]
            outputs = group[1] + outputs
            groups.remove(group)
        groups.append((sources, outputs))
    for sources, outputs in groups:
        # transformers needs the sources in the order of the model. If they are converted without the other weights, the
        # outputs must be the same as with them.
        ordered = tuple(name for name in state if name in sources)
        alone = converted(ordered, [state[name].view(-1) for name in ordered])
        wrong = [name for name in outputs if name not in alone or alone[name].shape != shapes[name]]
        if wrong:
            raise UnsupportedError(
                f"transformers makes {first_few(wrong, 3)} not only from {first_few(ordered, 3)}, but from other "
                "weights too",
                hint="load the weights into the model (model.load_state_dict(checkpoint.state_dict())) and call its "
                "save_pretrained",
            )
        extents = tuple(Extent(names[name], all_of(state[name].shape)) for name in ordered)
        conversions |= dict.fromkeys(outputs, Conversion(extents, partial(converted, ordered)))
    return conversions
