"""What the adapters of all frameworks need to know about tensors and modules: names of dtypes, names of parameters,
buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from zckpt.engines.composed import inner_tensors, is_composed
from zckpt.errors import UnsupportedError
from zckpt.plan.inventory import Holding
from zckpt.transfer.memory import PLAIN_CLASSES, not_plain, why_no_memory
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from zckpt.engines.contract import StateAdapter

T = TypeVar("T", bound=torch.Tensor)
T_ = TypeVar("T_")
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""The names of the attributes in which wrapper modules keep the module that they wrap."""
SAMPLED_TENSORS, SAMPLED_ELEMENTS = 16, 16
"""How many tensors, and how many elements of each, are looked at to tell engines apart."""


def for_training(adapter: StateAdapter) -> AbstractContextManager[object]:
    """Returns a context in which new tensors can take part in the training of an engine, even if the caller is in
    ``torch.inference_mode``, as in an evaluation. For an engine that does not train, it changes nothing."""
    return torch.inference_mode(torch.is_inference_mode_enabled() and not adapter.trains)


def dtype_name(dtype: torch.dtype, *what: str) -> str:
    """Returns the name that safetensors has for ``dtype``. Raises UnsupportedError if there is none. ``what``: the name
    of the tensor in that error, in one or several components."""
    if dtype not in DTYPE_NAMES:
        raise UnsupportedError(f"{'/'.join(what)} has dtype {dtype}, which safetensors does not know")
    return DTYPE_NAMES[dtype]


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the user's own module inside ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile``."""
    while True:
        if isinstance(module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            module = module.module
        elif any(kind.__name__ == "OptimizedModule" for kind in type(module).__mro__):  # torch.compile has made it.
            module = module.get_submodule("_orig_mod")
        else:
            return module


def named_parameters(root: torch.nn.Module) -> tuple[dict[str, torch.nn.Parameter], dict[str, str]]:
    """Returns the parameters by their first names, in the order of the module, and for each other name of a tied
    parameter its first name.

    Raises UnsupportedError if two parameters have the same name after the names of wrappers have been removed.
    """
    return _by_first_name(root.named_parameters(remove_duplicate=False))


def persistent_buffers(root: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns the buffers that the state dict has by their first names, in the order of the module, and for each other
    name of a tied buffer its first name.

    Raises UnsupportedError as ``named_parameters`` does.
    """
    return _by_first_name(
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in root.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )


def set_in_place(target: torch.Tensor, values: torch.Tensor) -> None:
    """Writes ``values`` to the memory of ``target``, so that all tensors that share this memory get them too. If
    several elements of ``target`` share a place in memory (``expand``), and their values differ, it gets memory of its
    own."""
    place, source = target.detach(), values
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            place, source = place.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    if source is values or _same_bytes(source.expand(values.shape), values):
        place.copy_(source)
    else:
        target.data = values


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank holds of a tensor: the local tensor of a DTensor, and otherwise the tensor itself."""
    if type(tensor) in PLAIN_CLASSES:  # It takes longer to look for an attribute that is not there.
        return tensor
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def unsaveable(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """Yields a phrase for an error about the first tensor that no data file can hold, if there is one."""
    for name, tensor in named:
        if why := not_plain(tensor):
            yield f"{name}, which {why}"
            return
        if tensor.dtype not in DTYPE_NAMES:
            yield f"{name} of dtype {tensor.dtype}, which safetensors does not know"
            return


def holdings(
    part: str,
    name: str,
    value: Any,
    *,
    workspace: bool = False,
    in_tree: bool = False,
    inside: frozenset[int] = frozenset(),
) -> Iterable[Holding]:
    """Returns a holding for each dense tensor with elements that is in ``value``. ``value`` is a tensor, or a
    collection in which there are tensors. ``workspace``, ``in_tree``: as in ``Holding``. ``inside``: the collections in
    which ``value`` is, by ``id``, because a collection may contain itself."""
    items: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        if value.layout == torch.sparse_coo:
            items = value._indices(), value._values()
        elif is_composed(value):
            items = inner_tensors(value).values()
        else:
            local = local_of(value)
            is_here = local.numel() and not value.is_meta
            return [Holding(part, name, local, value.dtype, workspace, in_tree)] if is_here else []
    elif isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):  # To iterate over other objects may change them.
        items = value
    if id(value) in inside:
        return []
    within = inside | {id(value)}
    found = (holdings(part, name, item, workspace=workspace, in_tree=in_tree, inside=within) for item in items)
    return chain.from_iterable(found)


def some_bytes(tensors: Sequence[torch.Tensor]) -> bytes:
    """Returns the bytes of some elements of up to ``SAMPLED_TENSORS`` of the tensors, chosen at equal distances.
    Returns no bytes if the values of one of these are not in memory, because they are encoded or on disk."""
    chosen = some_of([tensor.detach() for tensor in tensors if tensor.numel()])
    if any(why_no_memory(tensor) for tensor in chosen):
        return b""
    rows = (tensor[(0,) * (tensor.dim() - 1)] if tensor.dim() else tensor.reshape(1) for tensor in chosen)
    return b"".join(row[:SAMPLED_ELEMENTS].cpu().contiguous().view(torch.uint8).numpy().tobytes() for row in rows)


def some_of(items: Sequence[T_]) -> Sequence[T_]:
    """Returns up to ``SAMPLED_TENSORS`` of the items, chosen at equal distances."""
    return items[:: -(-len(items) // SAMPLED_TENSORS) or 1]


def is_zero(tensor: torch.Tensor) -> bool:
    """Returns whether all elements are zero. Returns False for a tensor that has no memory because its values are on
    disk."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # torch raises this if the storage has no memory.
        return False
    return not tensor.any()


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    first, second = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(first, second)


def plain_name(name: str) -> str:
    """Returns the name that zckpt uses for what ``name`` names in a module. torch.compile adds the name of its wrapper,
    ``_orig_mod``, to the names in every compiled submodule, and torch's ``checkpoint_wrapper`` does so with every
    module whose activations are recomputed. zckpt removes both."""
    for wrapper in _WRAPPERS:
        if wrapper in name:
            return ".".join(component for component in name.split(".") if component not in _WRAPPERS)
    return name


def _by_first_name(named: Iterable[tuple[str, T]]) -> tuple[dict[str, T], dict[str, str]]:
    first_names: dict[int, str] = {}
    tensors: dict[str, T] = {}
    aliases: dict[str, str] = {}
    for wrapped_name, tensor in named:
        name = plain_name(wrapped_name)
        if id(tensor) in first_names:
            if name != first_names[id(tensor)]:
                aliases[name] = first_names[id(tensor)]
        elif name in tensors:
            raise UnsupportedError(f"two tensors of the module are both called {name}")
        else:
            first_names[id(tensor)] = name
            tensors[name] = tensor
    return tensors, aliases
