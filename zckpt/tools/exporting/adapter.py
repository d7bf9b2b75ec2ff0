"""Plans the folder of one adapter of a model: the tensors that ``PeftModel.save_pretrained`` writes, and their keys."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zckpt.errors import KeyNotFoundError, MismatchError, UnsupportedError, first_few, from_os_error
from zckpt.plan.select import nearest
from zckpt.tools.exporting.plan import ExportPlan, Extent, OutputTensor, safetensors_file
from zckpt.tools.exporting.selection import first_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from zckpt.tools.exporting.plan import SourceTensor

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ADAPTER_FILES = (WEIGHTS, CONFIG)
"""The files that the export of an adapter may write."""
CONFIG_CHARACTERS_MAX = 16 << 20
"""The most characters of the configuration of an adapter."""
MODEL = "base_model.model."
"""What the names of all tensors of a ``PeftModel`` begin with."""
_EMBEDDINGS = ("embed_tokens", "lm_head")
"""The embedding modules whose weights PEFT saves together with an adapter that targets them."""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # This is false for NaN and infinities too.


_SWITCH = (False, "true or false", lambda value: type(value) is bool)
SETTINGS: Mapping[str, tuple[Any, str, Callable[[Any], bool]]] = {
    "bias": ("none", "none, all or lora_only", lambda value: value in ("none", "all", "lora_only")),
    "target_modules": (
        None, "a text or a list of texts", lambda value: value is None or isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(name, str) for name in value)),
    ),
    "lora_alpha": (8, "a number", _is_number),
    "alpha_pattern": (
        {}, "a map from names of modules to numbers",
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    ),
    "fan_in_fan_out": _SWITCH, "lora_bias": _SWITCH, "use_dora": _SWITCH, "use_rslora": _SWITCH,
}  # fmt: skip
"""The settings of an adapter that an export uses: PEFT's default, what the value has to be, and a function that checks
it."""
_DORA = ("lora_magnitude_vector.weight", "lora_magnitude_vector")
"""The kind of a tensor of DoRA: how it ends in the model, and in the file of the adapter."""


def _places(name: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yields each way to read the name of a tensor as that of one of a LoRA adapter: the module, the kind of the
    tensor, the adapter, and the rest of the name."""
    path = name.split(".")
    for place in range(1, len(path) - 1):
        if path[place].startswith("lora_"):
            yield ".".join(path[:place]), path[place], path[place + 1], path[place + 2 :]


def adapter_names(names: Iterable[str]) -> list[str]:
    """Returns the names of the LoRA adapters of a model whose tensors have these names."""
    places = (place for name in names for place in _places(name))
    return list(
        dict.fromkeys(
            adapter for _, kind, adapter, rest in places if kind == "lora_embedding_A" or (kind == "lora_A" and rest)
        )
    )


def refuse_adapters(names: Iterable[str], configs: Collection[str]) -> None:
    """Raises UnsupportedError if the model has adapters. Its tensors are then not those of the model's configuration.
    ``names``: the names of the tensors. ``configs``: the names of the adapters whose configurations are known."""
    adapters = list(dict.fromkeys([*configs, *adapter_names(names)]))
    if adapters:
        raise UnsupportedError(
            f"the model has adapters ({first_few(adapters, 5)}), which the folder of a model cannot hold",
            hint=f"adapter={adapters[0]!r} exports one of them for PeftModel.from_pretrained; merge={adapters[0]!r} "
            "exports the model with one of them merged into it; format='pt' exports all tensors under the names that "
            "they have in the model",
        )


def read_config(path: str) -> str:
    """Returns the text of a file ``adapter_config.json``, or the beginning of a text that is too long. Raises
    StorageError if the file cannot be read, and MismatchError if it is not UTF-8."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(CONFIG_CHARACTERS_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise MismatchError(f"this is not JSON: {error}", file=path) from error
        storage_error = from_os_error(error, "read the adapter's configuration", path)
        storage_error.hint = f"config has to be a folder with the {CONFIG} of the adapter that was trained"
        raise storage_error from error


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of a model."""

    name: str
    """The name of the adapter."""
    text: str
    """The text of its ``adapter_config.json``."""
    settings: Mapping[str, Any]
    """The settings in ``text``, with the defaults of those that it lacks."""
    layers: Mapping[str, Mapping[str, str]]
    """For each module that has a LoRA adapter, whichever it is, the tensors of this adapter: their names by their kind,
    such as ``lora_A.weight``. It is empty for a module that only other adapters have."""
    file: str | None
    """The path of the checkpoint or the file that the configuration comes from, if there is one."""

    @classmethod
    def find(cls, names: Mapping[str, str], adapter: str, configs: Mapping[str, str], file: str | None) -> Adapter:
        """Returns an adapter of the model with these tensors. ``configs``: the texts of the known files
        ``adapter_config.json``, by the names of the adapters.

        Raises UnsupportedError if the model has no adapter, or if this one is not LoRA; KeyNotFoundError if the model
        does not have this adapter; and MismatchError if its configuration or some of its weights are missing, or if its
        configuration is broken.
        """
        with_weights = adapter_names(names)
        known = list(dict.fromkeys([*configs, *with_weights]))
        if not known:
            raise UnsupportedError(
                "the model has no adapter: none of its tensors belongs to a LoRA adapter of PEFT",
                hint="leave `adapter` and `merge` out to export the model itself",
            )
        if adapter not in known:
            raise KeyNotFoundError(f"there is no adapter {adapter!r}", key=adapter, hint=nearest(known, adapter))
        if adapter not in configs:
            raise MismatchError(
                f"the configuration of the adapter {adapter!r} is not in the checkpoint",
                file=file,
                hint=f"give a folder with its {CONFIG} as `config` (--config), such as one that "
                "PeftModel.save_pretrained has made",
            )
        settings = _parsed(configs[adapter], adapter, file)
        if adapter not in with_weights:
            others = first_few(with_weights, 5) or "none"
            raise MismatchError(
                f"the source has no weights of the adapter {adapter!r}; it has those of: {others}", file=file
            )
        layers: dict[str, dict[str, str]] = {}
        all_adapters = {adapter, *with_weights}
        for name in names:
            for layer, kind, owner, rest in _places(name):
                if owner in all_adapters:
                    kinds = layers.setdefault(layer, {})
                    if owner == adapter:
                        kinds[".".join([kind, *rest]).replace(*_DORA)] = name
                    break
        required = ("lora_A", "lora_B", *(_DORA[1:] if settings["use_dora"] else ()))
        absent = [
            f"{layer}.{kind}"
            for layer, kinds in layers.items()
            for kind in required
            if kinds and not {kind, f"{kind}.weight", kind.replace("_", "_embedding_")}.intersection(kinds)
        ]
        if absent:
            raise MismatchError(
                f"the source has only a part of the adapter {adapter!r}: it lacks {first_few(absent, 3)}", file=file
            )
        return cls(adapter, configs[adapter], settings, layers, file)

    def own(self, names: Mapping[str, str]) -> dict[str, str]:
        """Selects and names the tensors of the adapter as ``peft.get_peft_model_state_dict`` does. ``names``: the
        tensors of the model."""
        others: list[str] = []
        if self.settings["bias"] == "all":
            foreign = {*adapter_names(names)} - {self.name}
            others = [name for name in names if name.endswith(".bias") and foreign.isdisjoint(name.split("."))]
        elif self.settings["bias"] == "lora_only":
            others = [name for layer in self.layers if (name := f"{layer}.base_layer.bias") in names]
        if self._targets_an_embedding:
            layers = {layer for layer in self.layers if layer.rpartition(".")[2] in _EMBEDDINGS}
            others += [name for name in names if name.rpartition(".base_layer.")[0] in layers]
        keys = {name: name for name in others}
        first = {*first_names(names).values()}
        for name in names:
            module, kept, inner = name.partition(f".modules_to_save.{self.name}.")
            if kept:
                keys[f"{module}.{inner}"] = name
            elif name.endswith(f".token_adapter.trainable_tokens_delta.{self.name}") and name in first:
                keys[name] = name  # A tied module has the same tensor, which PEFT does not save a second time.
        keys = {self._without_name(key): name for key, name in keys.items()}
        keys |= {f"{layer}.{kind}": name for layer, kinds in self.layers.items() for kind, name in kinds.items()}
        return {f"{MODEL}{key.removeprefix(MODEL)}": names[name] for key, name in keys.items()}

    @property
    def _targets_an_embedding(self) -> bool:
        """Whether the adapter targets an embedding. Then PEFT saves the weights of all embeddings with adapters."""
        targets = self.settings["target_modules"] or ()
        if self.settings.get("trainable_token_indices") is not None or targets == "all-linear":
            return False
        if isinstance(targets, str):  # It is a regular expression. The modules that it matches have the adapter.
            return any(kinds and layer.rpartition(".")[2] in _EMBEDDINGS for layer, kinds in self.layers.items())
        return any(embedding in targets for embedding in _EMBEDDINGS)

    def _without_name(self, key: str) -> str:
        if key.endswith(f".{self.name}"):
            return key.removesuffix(f".{self.name}")
        path, _, last = key.rpartition(".")
        return f"{path.removesuffix(f'.{self.name}')}.{last}"


def _parsed(text: str, adapter: str, file: str | None) -> dict[str, Any]:
    """Returns the settings in a text, with the defaults of those that it lacks. Raises MismatchError if it is not the
    configuration of an adapter, and UnsupportedError if the adapter is not LoRA."""
    what = f"the configuration of the adapter {adapter!r}"
    if len(text) > CONFIG_CHARACTERS_MAX:
        raise MismatchError(f"{what} has more than {CONFIG_CHARACTERS_MAX:,} characters", file=file)
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MismatchError(f"{what} is not JSON: {error}", file=file) from error
    if not isinstance(settings, dict) or "peft_type" not in settings:
        raise MismatchError(f"{what} is not one of PEFT: {text[:80]!r}", file=file)
    if settings["peft_type"] != "LORA":
        raise UnsupportedError(
            f"the adapter {adapter!r} has the peft_type {reprlib.repr(settings['peft_type'])}, and only LORA can be "
            "exported",
            file=file,
            hint="load the weights into the model (zckpt.open(path).state_dict()) and call its save_pretrained",
        )
    for name, (default, allowed, fits) in SETTINGS.items():
        value = settings.setdefault(name, default)
        if not fits(value):
            raise MismatchError(f"{what} has {reprlib.repr(value)} for {name!r} instead of {allowed}", file=file)
    return settings


def plan_adapter(names: Mapping[str, str], sources: Mapping[str, SourceTensor], config: str) -> ExportPlan:
    """Plans the folder of an adapter. ``names``: what ``Adapter.own`` returns. ``config``: the text of its
    ``adapter_config.json``."""
    tensors = [
        OutputTensor(name, tensor.dtype, tensor.shape, (Extent(source, tensor.all),))
        for name, source in names.items()
        for tensor in [sources[source]]
    ]
    return ExportPlan((safetensors_file(WEIGHTS, tensors),), small_files={CONFIG: config.encode()})
