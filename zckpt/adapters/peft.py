"""Returns the configurations of the adapters of a PEFT model. PEFT is not imported here, because it has been imported
already if there is such a model."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from zckpt.errors import StateError

if TYPE_CHECKING:
    import torch


def adapter_configs(module: torch.nn.Module | None) -> dict[str, str]:
    """Returns the configuration of each adapter, by the adapter's name. It is the text that
    ``PeftModel.save_pretrained`` writes to ``adapter_config.json``, except that sets are sorted. The result is empty if
    ``module`` is not a ``PeftModel``. Raises StateError for a configuration that JSON cannot represent, which PEFT
    could not save either."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel):
        return {}
    return {name: _text(name, config, module.get_base_model()) for name, config in module.peft_config.items()}


def _text(name: str, config: Any, base: Any) -> str:
    settings = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    settings["base_model_name_or_path"] = settings["base_model_name_or_path"] or vars(base).get("name_or_path") or None
    settings["inference_mode"] = True  # As in PEFT's own files. Whoever loads the adapter to train it changes this.
    if config.task_type is None:
        settings["auto_mapping"] = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    try:
        return json.dumps(settings, indent=2, sort_keys=True)
    except TypeError as error:
        raise StateError(f"the configuration of the adapter {name!r} cannot be written as JSON: {error}") from error
