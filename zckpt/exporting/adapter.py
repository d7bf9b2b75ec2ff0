"""Plans the folder of one adapter of a model: the tensors that ``PeftModel.save_pretrained`` writes, and their keys."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from zckpt.errors import KeyNotFoundError, MismatchError, UnsupportedError, first_few, from_os_error
from zckpt.exporting.plan import ExportPlan, OutputTensor, Run, safetensors_file
from zckpt.plan.select import nearest
from zckpt.storage.location import Location

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from zckpt.exporting.plan import SourceTensor

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FILES = (WEIGHTS, CONFIG)
"""The files that the export of an adapter may write."""
_LORA = re.compile(r"(?P<layer>.+)\.lora_\w+\.(?P<adapter>[^.]+)(?:\.\w+)?")
"""The name of a weight of a LoRA adapter. ``layer`` is the module that it belongs to."""
_EMBEDDINGS = ("embed_tokens", "lm_head")
"""The embedding modules whose weights PEFT saves together with an adapter that targets them."""


def adapter_names(names: Iterable[str]) -> list[str]:
    """Returns the names of the LoRA adapters of a model whose tensors have these names."""
    matches = (_LORA.fullmatch(name) for name in names)
    return list(dict.fromkeys(match["adapter"] for match in matches if match))


def refuse_adapters(sources: Iterable[str], configs: Collection[str]) -> None:
    """Raises UnsupportedError if the model has adapters. Its tensors are then not those of the model's configuration.
    ``sources``: the names of the tensors. ``configs``: the names of the adapters whose configurations are known."""
    adapters = list(dict.fromkeys([*configs, *adapter_names(sources)]))
    if adapters:
        raise UnsupportedError(
            f"the model has adapters ({first_few(adapters, 5)}), which the folder of a model cannot hold",
            hint=f"adapter={adapters[0]!r} exports one of them for PeftModel.from_pretrained; format='pt' exports all "
            "tensors under the names that they have in the model",
        )


def read_config(folder: str) -> str:
    """Returns the text of the ``adapter_config.json`` in the folder of an adapter. Raises StorageError if the file
    cannot be read, and MismatchError if it is not UTF-8."""
    path = str(Location.of(folder).child(CONFIG))
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise MismatchError(f"this is not JSON: {error}", file=path) from error
        storage_error = from_os_error(error, "read the adapter's configuration", path)
        storage_error.hint = f"config has to be a folder with the {CONFIG} of the adapter that was trained"
        raise storage_error from error


def plan_adapter(
    sources: Mapping[str, SourceTensor],
    aliases: Mapping[str, str],
    adapter: str,
    configs: Mapping[str, str],
) -> ExportPlan:
    """Plans the folder of one adapter. ``sources`` and ``aliases``: as for ``plan_hugging_face``. ``adapter``: the name
    of the adapter. ``configs``: the texts of the known files ``adapter_config.json``, by the names of the adapters.

    Raises UnsupportedError if the model has no adapter, or if this one is not LoRA; KeyNotFoundError if the model does
    not have this adapter; and MismatchError if its configuration or its weights are missing, or if its configuration is
    broken.
    """
    stored = {name: name for name in sources} | {alias: name for alias, name in aliases.items() if name in sources}
    known = list(dict.fromkeys([*configs, *adapter_names(stored)]))
    with_weights = adapter_names(stored)
    if not known:
        raise UnsupportedError(
            "the model has no adapter: none of its tensors belongs to a LoRA adapter of PEFT",
            hint="leave `adapter` out to export the model itself",
        )
    if adapter not in known:
        raise KeyNotFoundError(f"there is no adapter {adapter!r}", key=adapter, hint=nearest(known, adapter))
    if adapter not in configs:
        raise MismatchError(
            f"the configuration of the adapter {adapter!r} is not in the checkpoint",
            hint=f"give a folder with its {CONFIG} as `config`, such as one that PeftModel.save_pretrained has made",
        )
    config = _parsed(configs[adapter], adapter)
    if adapter not in with_weights:
        others = first_few(with_weights, 5) or "none"
        raise MismatchError(f"the source has no weights of the adapter {adapter!r}; it has those of: {others}")
    name_of_key = _tensors(stored, adapter, with_weights, config)
    tensors = [
        OutputTensor(key, source.dtype, source.shape, (Run(stored[name], 0, source.numel),))
        for key, name in name_of_key.items()
        for source in [sources[stored[name]]]
    ]
    return ExportPlan((safetensors_file(WEIGHTS, tensors),), small_files={CONFIG: configs[adapter].encode()})


def _parsed(text: str, adapter: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise MismatchError(f"the configuration of the adapter {adapter!r} is not JSON: {error}") from error
    if not isinstance(config, dict) or "peft_type" not in config:
        raise MismatchError(f"this is not the configuration of an adapter of PEFT: {text[:80]!r}")
    if config["peft_type"] != "LORA":
        raise UnsupportedError(
            f"the adapter {adapter!r} is of the type {config['peft_type']}, and only LoRA can be exported",
            hint="load the weights into the model (zckpt.open(path).state_dict()) and call its save_pretrained",
        )
    return config


def _tensors(
    stored: Mapping[str, str], adapter: str, adapters: Collection[str], config: Mapping[str, Any]
) -> dict[str, str]:
    """Selects and names the tensors of an adapter as ``peft.get_peft_model_state_dict`` does. Returns a dict from the
    key of each tensor in the adapter's file to the name of the tensor in the model. ``stored``: maps each name in the
    model to the name under which the tensor is in the sources.
    """
    with_base = {name.rpartition(".base_layer.")[0] for name in stored}
    layers = {match["layer"] for name in stored if (match := _LORA.fullmatch(name))} & with_base
    others = [name for name in adapters if name != adapter]
    names = [name for name in stored if not any(f".{other}." in name or name.endswith(f".{other}") for other in others)]
    chosen = [name for name in names if (match := _LORA.fullmatch(name)) and match["layer"] in layers]
    bias = config.get("bias", "none")
    if bias == "all":
        chosen += [name for name in names if name.endswith(".bias")]
    elif bias == "lora_only":
        chosen += [name for layer in layers if (name := f"{layer}.base_layer.bias") in names]
    targets = config.get("target_modules") or ()
    if config.get("trainable_token_indices") is None:
        chosen += [name for name in names if _is_embedding(name, layers, targets)]
    keys = {_without_dora_suffix(name, adapter): name for name in chosen}
    for name in names:
        module, kept, inner = name.partition(f".modules_to_save.{adapter}.")
        if kept:
            keys[f"{module}.{inner}"] = name
        elif name.endswith(f".token_adapter.trainable_tokens_delta.{adapter}") and stored[name] == name:
            keys[name] = name  # A tied module has the same tensor, which PEFT does not save a second time.
    return {_without_adapter(key, adapter): name for key, name in keys.items()}


def _is_embedding(name: str, layers: Collection[str], targets: str | Collection[str]) -> bool:
    """Returns whether the tensor is the weight of an embedding that has an adapter. PEFT saves such a weight too."""
    layer, base, _ = name.rpartition(".base_layer.")
    if not base or layer not in layers or layer.rpartition(".")[2] not in _EMBEDDINGS:
        return False
    if isinstance(targets, str):
        path = layer.removeprefix("base_model.model.")
        return targets != "all-linear" and re.fullmatch(targets, path) is not None
    return any(embedding in targets for embedding in _EMBEDDINGS)


def _without_dora_suffix(name: str, adapter: str) -> str:
    suffix = f"lora_magnitude_vector.{adapter}.weight"
    return name.removesuffix(".weight") if name.endswith(suffix) else name


def _without_adapter(key: str, adapter: str) -> str:
    if key.endswith(f".{adapter}"):
        return key.removesuffix(f".{adapter}")
    path, _, last = key.rpartition(".")
    return f"{path.removesuffix(f'.{adapter}')}.{last}"
