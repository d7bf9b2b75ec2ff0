"""Makes models of transformers from their configuration without using memory for them, and writes their configuration
to files."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import torch

from zckpt.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping


def empty_model(folder: str, config: Mapping[str, Any]) -> Any:
    """Returns the model of a configuration on the device "meta", without running any code that is in the folder.
    Returns None if transformers does not have the class of the model that the configuration names.

    ``config``: the content of ``config.json`` in ``folder``. Raises UnsupportedError if transformers 5, or a library
    that the model needs, is not installed. Raises FormatError for a configuration from which no model can be made.
    """
    file = os.path.join(folder, "config.json")
    try:
        import transformers
        from transformers.core_model_loading import revert_weight_conversion  # noqa: F401  only in transformers 5
    except ImportError as error:
        raise UnsupportedError(
            "to make the model of this configuration takes transformers 5 or newer",
            file=file,
            hint="pip install 'transformers>=5'",
        ) from error
    try:
        name = next(iter(config.get("architectures") or []), None)
        kind = getattr(transformers, str(name), None)
        if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
            return None
        with torch.device("meta"):
            return kind(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except ImportError as error:
        raise UnsupportedError(f"transformers cannot make this model: {error}", file=file) from error
    except Exception as error:  # A configuration with wrong values can make transformers raise any error.
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise FormatError(f"transformers makes no model of it: {why}", file=file) from error


def write_config(model: Any, folder: str) -> None:
    """Writes to ``folder`` the files that ``save_pretrained`` of a model writes in addition to the weights. Does not
    change the model."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
