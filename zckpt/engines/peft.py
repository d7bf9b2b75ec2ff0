"""The configurations of the adapters of a PEFT model. PEFT is not imported here, because whoever has such a model has
imported it already."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from zckpt.errors import StateError

if TYPE_CHECKING:
    import torch


def adapter_configs(module: torch.nn.Module | None) -> dict[str, str]:
    """Returns for the name of each adapter its configuration: the text that ``PeftModel.save_pretrained`` writes to
    ``adapter_config.json``, except that sets are sorted. The result is empty if ``module`` is no ``PeftModel``. Raises
    StateError for a configuration that JSON cannot hold, which PEFT could not save either."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel):
        return {}
    return {name: _text(name, config, module.get_base_model()) for name, config in module.peft_config.items()}


def _text(name: str, config: Any, base: Any) -> str:
    about = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    about["base_model_name_or_path"] = about["base_model_name_or_path"] or vars(base).get("name_or_path") or None
    about["inference_mode"] = True  # as PEFT does it: whoever loads the adapter to train it has to say so
    if config.task_type is None:
        about["auto_mapping"] = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    try:
        return json.dumps(about, indent=2, sort_keys=True)
    except TypeError as error:
        raise StateError(f"the configuration of the adapter {name!r} cannot be written as JSON: {error}") from error
