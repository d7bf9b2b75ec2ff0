"""Tensors that are composed of other tensors, such as the 8-bit states of torchao's optimizers.

Such a tensor has a class of its own, and no memory of its own. PyTorch has a protocol for these classes:
``__tensor_flatten__`` returns the names of the inner tensors, which are attributes of the tensor, and a context, which
has everything else. ``__tensor_unflatten__`` makes a tensor of both. A checkpoint has the inner tensors and a
description, by which a restore finds out whether the tensor of the engine is alike:

    {"composed": {"class": "OptimState8bit", "dtype": "torch.float32", "shape": [4096], "stride": [1],
                  "context": [True, {"torch.dtype": "float32"}], "inner": {"codes": ["torch.uint8", [4096]], ...}},
     "tensors": {"codes": <tensor>, ...}}

A restore copies the inner tensors into the tensor that the engine has. If the engine has none yet, the restore makes
one, but only of a class that this process has declared safe (``torch.serialization.add_safe_globals``). It imports
nothing that a checkpoint names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from zckpt.errors import FormatError
from zckpt.transfer.memory import has_own_operations

if TYPE_CHECKING:
    from collections.abc import Callable

_DESCRIPTION, _TENSORS = "composed", "tensors"
_DTYPE = "torch.dtype"
"""The only key of the map that stands for a dtype in a context."""


def is_composed(value: object) -> bool:
    """Returns whether a value is a tensor that says which tensors it is composed of."""
    return isinstance(value, torch.Tensor) and has_own_operations(value) and hasattr(value, "__tensor_flatten__")


def inner_tensors(tensor: Any) -> dict[str, torch.Tensor]:
    """Returns the inner tensors of a composed tensor by name."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def decomposed(value: Any) -> Any:
    """Returns the tree for a composed tensor, which shares the memory of its inner tensors. Returns any other value as
    it is. What no tree can contain, such as an object in the context, is in the tree too, so that a write names it."""
    return {_DESCRIPTION: _described(value), _TENSORS: inner_tensors(value)} if is_composed(value) else value


def is_decomposed(value: object) -> bool:
    """Returns whether a value of a tree has the form of what ``decomposed`` returns for a composed tensor."""
    if not isinstance(value, Mapping) or value.keys() != {_DESCRIPTION, _TENSORS}:
        return False
    description, tensors = value[_DESCRIPTION], value[_TENSORS]
    return (
        isinstance(description, Mapping)
        and description.keys() == {"class", "dtype", "shape", "stride", "context", "inner"}
        and isinstance(description["inner"], Mapping)
        and isinstance(tensors, Mapping)
        and description["inner"].keys() == tensors.keys()
    )


def class_of(tree: Mapping[str, Any]) -> str:
    """Returns the name of the class of the composed tensor for which ``decomposed`` has returned ``tree``."""
    return str(tree[_DESCRIPTION]["class"])


def misfit(tree: Mapping[str, Any], live: object) -> str | None:
    """Returns why a composed tensor cannot be restored, as the end of a sentence about it, or None if it can. ``tree``:
    what ``decomposed`` has returned, in which functions that read the tensors may be in their place. ``live``: what the
    engine has, or None if it has nothing yet."""
    saved = tree[_DESCRIPTION]
    if live is not None:
        here = _described(live) if is_composed(live) else type(live).__name__
        return None if here == saved else f"differs: {_told(saved)} in the checkpoint, {_told(here)} in the engine"
    try:
        made = _described(_made(tree, lambda kind, _: torch.empty(kind[1], dtype=_dtype(kind[0]), device="meta")))
        why = None if made == saved else f"it becomes {_told(made)}"
    except Exception as error:  # The code of each class fails in its own way.
        why = str(error) or type(error).__name__
    return why and (
        f"is {_told(saved)}, of which the engine has none before its first step, and no new one can be made ({why}): "
        f"restore after a step, or first call torch.serialization.add_safe_globals([{saved['class']}])"
    )


def compose(tree: Mapping[str, Any], live: Any, device: torch.device) -> Any:
    """Returns ``live``, filled with the values of ``tree``. If it is None, returns a new tensor on ``device``.
    ``misfit`` has returned None for both. Raises FormatError if a tensor of the tree is not as it is described."""
    if live is None:
        return _made(tree, lambda inner, value: _read(inner, value).to(device))
    for name, inner in tree[_DESCRIPTION]["inner"].items():
        getattr(live, name).copy_(_read(inner, tree[_TENSORS][name]))
    return live


def _described(tensor: Any) -> dict[str, Any]:
    return {
        "class": type(tensor).__qualname__,
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "context": _plain(tensor.__tensor_flatten__()[1]),
        "inner": {name: _kind(inner) for name, inner in inner_tensors(tensor).items()},
    }


def _kind(inner: Any) -> list[Any]:
    return [str(inner.dtype), list(inner.shape)]


def _told(description: Any) -> str:
    """Returns a description as text for people."""
    if not isinstance(description, Mapping):
        return str(description)
    inner = ", ".join(f"{name} {kind}" for name, kind in description["inner"].items())
    return f"{description['class']} {description['shape']} with {inner}, {description['context']}"


def _plain(context: Any) -> Any:
    """Returns a context with plain values in the place of dtypes and sizes."""
    if isinstance(context, torch.dtype):
        return {_DTYPE: str(context).removeprefix("torch.")}
    if isinstance(context, torch.Size):
        return tuple(context)
    if type(context) in (list, tuple):
        return type(context)(map(_plain, context))
    return {key: _plain(item) for key, item in context.items()} if type(context) is dict else context


def _context(plain: Any) -> Any:
    """Returns the context for which ``_plain`` has returned ``plain``, except that each size is a tuple."""
    if isinstance(plain, dict):
        return _dtype(plain[_DTYPE]) if plain.keys() == {_DTYPE} else {k: _context(item) for k, item in plain.items()}
    return type(plain)(map(_context, plain)) if isinstance(plain, (list, tuple)) else plain


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype


def _made(tree: Mapping[str, Any], inner: Callable[[Any, Any], torch.Tensor]) -> Any:
    """Returns a new composed tensor. ``inner`` returns an inner tensor for its description and its value in the
    tree."""
    description = tree[_DESCRIPTION]
    safe = (item[0] if isinstance(item, tuple) else item for item in torch.serialization.get_safe_globals())
    named: set[Any] = {item for item in safe if isinstance(item, type) and item.__qualname__ == description["class"]}
    if len(named) != 1 or not all(issubclass(item, torch.Tensor) for item in named):
        raise TypeError("there is no such class among those that were declared safe")
    tensors = {name: inner(kind, tree[_TENSORS][name]) for name, kind in description["inner"].items()}
    shape, stride = torch.Size(description["shape"]), tuple(description["stride"])
    return named.pop().__tensor_unflatten__(tensors, _context(description["context"]), shape, stride)


def _read(kind: Any, value: Any) -> torch.Tensor:
    tensor = value() if callable(value) else value
    if not isinstance(tensor, torch.Tensor) or _kind(tensor) != kind:
        raise FormatError(f"state: a tensor of the optimizer is not {kind}, as it is described")
    return tensor
