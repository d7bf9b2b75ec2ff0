"""Makes models of transformers from their configuration without using memory for them, and writes their configuration
to files."""

from __future__ import annotations

import copy
import os
import re
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module

from zckpt.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MODULES_MIN, MODULES_PER_TENSOR = 1000, 8
"""A model may have ``MODULES_MIN`` modules, parameters and buffers, and ``MODULES_PER_TENSOR`` more for each tensor of
its weights. The models of transformers have about 2, and up to 3, for each tensor."""
COUNT_MAX = 1 << 16
"""The most layers or labels that a configuration may ask for. transformers makes lists of them before it makes a model,
whatever the weights have."""
_COUNTED = re.compile(r"layer|label|block|depth|stage|expert|head")
"""What the name of a number in a configuration contains if it may be the length of such a list."""


def empty_model(folder: str, config: Mapping[str, Any], tensors: int) -> Any:
    """Returns the model of a configuration on the device "meta", without running any code that is in the folder.
    Returns None if transformers does not have the class of the model that the configuration names.

    ``config``: the content of ``config.json`` in ``folder``. ``tensors``: the number of tensors in the weights of the
    model. A configuration that asks for far more of them is refused before the model is whole. Raises UnsupportedError
    if transformers 5, or a library that the model needs, is not installed. Raises FormatError for a configuration from
    which no model can be made.
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
        _check_counts(config)
        # Another implementation of attention, which the configuration may name, could be code from the internet.
        made = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, attn_implementation="eager")
        with torch.device("meta"), _modules_at_most(MODULES_MIN + MODULES_PER_TENSOR * tensors):
            return kind(made)
    except ImportError as error:
        raise UnsupportedError(f"transformers cannot make this model: {error}", file=file) from error
    except Exception as error:  # A configuration with wrong values can make transformers raise any error.
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise FormatError(f"transformers makes no model of it: {why}", file=file) from error


def _check_counts(value: Any, name: str = "") -> None:
    """Raises ValueError if a configuration asks for too many layers or labels."""
    for key, item in value.items() if isinstance(value, dict) else ():
        _check_counts(item, key)
    for item in value if isinstance(value, list) else ():
        _check_counts(item, name)
    if isinstance(value, int) and value > COUNT_MAX and _COUNTED.search(name):
        raise ValueError(f"{name} is {value}, and may be {COUNT_MAX} at most")


@contextmanager
def _modules_at_most(count: int) -> Iterator[None]:
    """A context in which this thread can make modules that have so many submodules, parameters and buffers together.
    Raises ValueError if it makes more."""
    made, thread = 0, get_ident()

    def register(*_: object) -> None:
        nonlocal made
        made += get_ident() == thread
        if made > count and get_ident() == thread:
            raise ValueError(f"it has more than {count} modules and parameters, far more than its weights have tensors")

    handles = [
        torch_module.register_module_module_registration_hook(register),
        torch_module.register_module_parameter_registration_hook(register),
        torch_module.register_module_buffer_registration_hook(register),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def write_config(model: Any, architecture: str, folder: str) -> None:
    """Writes to ``folder`` the files that ``save_pretrained`` of a model writes in addition to the weights. Does not
    change the model. ``architecture``: the name of its class in transformers."""
    config = copy.deepcopy(model.config)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
