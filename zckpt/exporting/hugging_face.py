"""Plans the tensors and files of a model as Hugging Face's ``save_pretrained`` writes them, by transformers' own rules.

transformers gives some weights other names and shapes in memory than in files; the experts of a mixture are an example.
Therefore a model without memory (on the device "meta") is made from its configuration, and transformers converts the
weights of this model. Most of the results are views of the weights. The strides of a view say which elements of the
checkpoint the file has, so such a weight is never whole in memory.
"""

from __future__ import annotations

import fnmatch
import json
import os
import tempfile
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zckpt.engines.hugging_face import empty_model, write_config
from zckpt.errors import MismatchError, UnsupportedError, first_few, from_os_error
from zckpt.exporting.plan import (
    RUN_BYTES_MIN,
    Conversion,
    ExportPlan,
    Memory,
    OutputTensor,
    Run,
    SourceTensor,
    count_runs,
    runs_of_view,
    safetensors_files,
    split_into_files,
)
from zckpt.transfer.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES, torch_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

INDEX = "model.safetensors.index.json"
TAKEN_ALONG = (
    "generation_config.json", "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json",
    "*.model", "*.tiktoken", "*.spm", "*.jinja", "chat_template*", "*processor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""The files of a model's folder that are copied as they are: those of its tokenizer, those of its processor, and its
terms of use."""
MODEL_CODE = ("*.py",)
"""The files that are copied too if the class of the model is not one of transformers' own."""
FILES = ("*.safetensors", INDEX, "config.json", *TAKEN_ALONG, *MODEL_CODE)
"""The files that the export of a model may write."""


def plan_hugging_face(
    sources: Mapping[str, SourceTensor],
    aliases: Mapping[str, str],
    folder: str | None,
    shard_bytes_max: int,
) -> ExportPlan:
    """Plans the files of a model's folder.

    ``sources``: all weights and persistent buffers, by the names that they have in the model in memory. ``aliases``:
    for each other name of a tied weight the one under which it is in ``sources``. ``folder``: the folder with the
    configuration of the model. Without it, tensors keep their names and shapes, a tied weight has one of its names, and
    there is no configuration.

    Raises MismatchError if the model of this configuration has other tensors; UnsupportedError for a class of models
    that transformers does not have, and where transformers is not installed; FormatError for a configuration that no
    model can be made from; and StorageError.
    """
    small_files: dict[str, bytes] = {}
    tensors: list[OutputTensor] = []
    conversions: tuple[Conversion, ...] = ()
    memory: dict[str, Memory] = {}
    parameters = sum(source.numel for name, source in sources.items() if name not in aliases)
    model = None
    if folder is not None:
        config = _read_config(folder)
        model = _empty_model(folder, config)
        small_files = dict(_taken_along(folder, (*TAKEN_ALONG, *(MODEL_CODE if model is None else ()))))
        if model is None:
            small_files["config.json"] = _with_dtype(config, sources)
    if model is None:
        tensors = [
            OutputTensor(name, source.dtype, source.shape, (Run(name, 0, source.numel),))
            for name, source in sorted(sources.items(), key=lambda item: _natural(item[0]))
        ]
    else:
        _fill(model, sources, aliases)
        tensors, conversions, memory = convert_names(model)
        parameters = model.num_parameters()
        small_files = {**_written_by(model), **small_files}
    shards = split_into_files(tensors, shard_bytes_max, memory)
    files = safetensors_files(shards)
    if len(files) > 1:
        nbytes = sum(one.nbytes for one in set(memory.values())) if memory else sum(one.nbytes for one in tensors)
        small_files[INDEX] = _index(dict(zip([file.name for file in files], shards, strict=True)), parameters, nbytes)
    return ExportPlan(files, conversions, small_files)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a sort key by which layer 2 comes before layer 10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def _index(shards: Mapping[str, Sequence[OutputTensor]], parameters: int, nbytes: int) -> bytes:
    """Returns the index as ``save_pretrained`` writes it."""
    weight_map = {tensor.name: file for file, shard in shards.items() for tensor in shard}
    index = {"metadata": {"total_parameters": parameters, "total_size": nbytes}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


# The configuration


def _read_config(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        found = from_os_error(error, "read the model's configuration", path)
        found.hint = "--config (config= in Python) has to be the folder of the model that was trained, with config.json"
        raise found from error
    except ValueError as error:
        raise MismatchError(f"this is not JSON: {error}", file=path) from error
    if not isinstance(config, dict):
        raise MismatchError("this is not the configuration of a model", file=path)
    if "quantization_config" in config:
        raise UnsupportedError(
            "the configuration is for quantized weights, and the weights of the source are not quantized",
            file=path,
            hint="remove quantization_config from config.json if the model was trained without quantization",
        )
    return config


def _empty_model(folder: str, config: Mapping[str, Any]) -> Any:
    """Returns the model of this configuration, without memory. Returns None if the class of the model is not one of
    transformers', but code that belongs to the model."""
    model = empty_model(folder, config)
    if model is None and "auto_map" not in config:
        name = next(iter(config.get("architectures") or []), None)
        what = f"has no model {name!r}" if name else "cannot know the class of the model: there are no architectures"
        raise UnsupportedError(
            f"transformers {version('transformers')} {what}",
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
    """Returns the files that ``save_pretrained`` writes beside the weights."""
    model.config.dtype = torch_name(model.dtype)
    with tempfile.TemporaryDirectory() as directory:
        write_config(model, directory)
        return dict(_taken_along(directory, ["*"]))


# Names and shapes


def _fill(model: Any, sources: Mapping[str, SourceTensor], aliases: Mapping[str, str]) -> None:
    """Gives the model tensors of the shapes and dtypes of ``sources``, tied as they are tied there. Raises
    MismatchError unless the model has them all, and no others."""
    own = model.state_dict(keep_vars=True)
    stored = {name: aliases.get(name, name) for name in (*sources, *aliases)}
    unlike = [
        f"{name} is {list(own[name].shape)} by the configuration, {list(sources[key].shape)} here"
        for name, key in stored.items()
        if name in own and key in sources and tuple(own[name].shape) != sources[key].shape
    ]
    lines = [
        f"{which} lacks {len(names)} tensors: {first_few(names, 5)}"
        for which, names in [
            ("the source", [name for name in own if stored.get(name) not in sources]),
            ("the model of the configuration", [name for name in sources if name not in own]),
        ]
        if names
    ]
    if unlike:
        lines.append(f"{len(unlike)} shapes differ: {first_few(unlike, 5)}")
    if lines:
        raise MismatchError(
            f"this is not a {type(model).__name__} of that configuration: {'; '.join(lines)}",
            hint="give the configuration of the model that was trained, with the changes that the training has made to "
            "it, such as a larger vocabulary; or give none: then tensors keep their names",
        )
    empty = {
        key: torch.empty(sources[key].shape, dtype=TORCH_DTYPES[sources[key].dtype], device="meta")
        for key in {stored[name] for name in own}
    }
    parameters = {key: torch.nn.Parameter(tensor, requires_grad=False) for key, tensor in empty.items()}
    model.load_state_dict(
        {
            name: (parameters if isinstance(tensor, torch.nn.Parameter) else empty)[stored[name]]
            for name, tensor in own.items()
        },
        assign=True,
    )


class _Views(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, copies of tensors on "meta" become views of them. For every tensor that is not a view, it
    records what the tensor was made from."""

    def __init__(self, sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: list[torch.Tensor] = list(sources.values())
        self.source = {_storage(tensor): name for name, tensor in sources.items()}
        """For the storage of each source its name. A view of a source has the same storage."""
        self._made_of = {storage: frozenset([name]) for storage, name in self.source.items()}

    def made_of(self, tensor: torch.Tensor) -> frozenset[str]:
        """Returns the names of the sources that a tensor was made from."""
        return self._made_of.get(_storage(tensor), frozenset())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.clone.default:
            return aten.alias.default(args[0])
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if func in (aten.view.default, aten._unsafe_view.default):
            try:
                return aten.view.default(*args)
            except RuntimeError:  # its input is a view here that would be a contiguous copy elsewhere
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


def convert_names(model: Any) -> tuple[list[OutputTensor], tuple[Conversion, ...], dict[str, Memory]]:
    """Returns what ``save_pretrained`` of a model on "meta" writes: the tensors in their order, the conversions that
    make those tensors that are not views, and the memory that each tensor would be in."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, model)
    views = _Views(state)
    with views:
        found: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(state))
    tensors: list[OutputTensor] = []
    made: dict[str, frozenset[str]] = {}
    for name, tensor in found.items():
        shape, strides, source = tuple(tensor.shape), tensor.stride(), views.source.get(_storage(tensor))
        runs = None
        if source is not None and _are_long(tensor):
            runs = runs_of_view(source, shape, strides, int(tensor.storage_offset()))
        else:
            made[name] = views.made_of(tensor)
        tensors.append(OutputTensor(name, DTYPE_NAMES[tensor.dtype], shape, runs))
    conversions = tuple(_conversions(model, state, made, {name: found[name].shape for name in made}))
    copied: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(state))
    memory = {name: Memory(_storage(one), one.untyped_storage().nbytes()) for name, one in copied.items()}
    return tensors, conversions, memory


def _are_long(view: torch.Tensor) -> bool:
    count = count_runs(view.shape, view.stride())
    return count <= 1 or view.nbytes >= RUN_BYTES_MIN * count


def _conversions(
    model: Any, state: Mapping[str, torch.Tensor], made: Mapping[str, frozenset[str]], shapes: Mapping[str, torch.Size]
) -> Iterator[Conversion]:
    """Yields one conversion for all outputs that have sources in common."""
    from transformers.core_model_loading import revert_weight_conversion

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converted: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
        return converted

    groups: list[tuple[set[str], list[str]]] = []
    for name, names in made.items():
        own, outputs = set(names), [name]
        for group in [group for group in groups if own & group[0]]:
            own |= group[0]
            outputs = group[1] + outputs
            groups.remove(group)
        groups.append((own, outputs))
    for own, outputs in groups:
        # The sources are in the order of the model. Converted alone, they have to give the same as among all others.
        ordered = tuple(name for name in state if name in own)
        alone = convert({name: state[name] for name in ordered})
        wrong = [name for name in outputs if name not in alone or alone[name].shape != shapes[name]]
        if wrong:
            raise UnsupportedError(
                f"transformers makes {first_few(wrong, 3)} not only from {first_few(ordered, 3)}, but from other "
                "weights too",
                hint="load the weights into the model (model.load_state_dict(checkpoint.state_dict())) and call its "
                "save_pretrained",
            )
        yield Conversion(ordered, tuple(outputs), convert)
