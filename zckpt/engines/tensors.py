"""What adapters need to know of tensors and modules, whatever the framework: dtype names, parameter names, buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from zckpt.errors import UnsupportedError
from zckpt.state.inventory import Holding
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T", bound=torch.Tensor)


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """The safetensors name of ``dtype``. Raises UnsupportedError that names ``what`` where there is none."""
    if dtype not in DTYPE_NAMES:
        raise UnsupportedError(f"{what} has dtype {dtype}, which safetensors does not know")
    return DTYPE_NAMES[dtype]


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile``."""
    while True:
        if isinstance(module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module.get_submodule("_orig_mod")
        else:
            return module


def named_parameters(root: torch.nn.Module) -> tuple[dict[str, torch.nn.Parameter], dict[str, str]]:
    """The parameters by their first name, in module order, and the further names of tied ones.

    Raises UnsupportedError where two parameters have the same name once wrappers are left out of it.
    """
    return _by_first_name(root.named_parameters(remove_duplicate=False))


def persistent_buffers(root: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The buffers that belong to the state dict by their first name, in module order, and further names.

    Raises UnsupportedError like ``named_parameters``.
    """
    return _by_first_name(
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in root.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )


def set_in_place(target: torch.Tensor, values: torch.Tensor) -> None:
    """Writes these values to the memory of ``target``, so that its views and what it is a view of have them too.

    Where several elements of ``target`` share a place in memory (``expand``) and are to have different values, it gets
    memory of its own: nothing else can hold them.
    """
    place, source = target.detach(), values
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            place, source = place.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    if source is values or _same_bytes(source.expand(values.shape), values):
        place.copy_(source)
    else:
        target.data = values


def holdings(part: str, name: str, value: Any, *, workspace: bool = False) -> Iterator[Holding]:
    """A holding for each dense tensor with elements in ``value``: a tensor, or collections with tensors in them.
    ``workspace``: as in ``Holding``."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.sparse_coo:
            yield from holdings(part, name, [value._indices(), value._values()], workspace=workspace)
        elif value.numel() and not value.is_meta:
            yield Holding(part, name, value, value.dtype, workspace)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from holdings(part, name, one, workspace=workspace)


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether all elements are zero; False for a tensor whose values are on disk."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # it has no memory
        return False
    return not tensor.any()


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(one, other)


def modules_with_extra_state(root: torch.nn.Module) -> Iterator[str]:
    """Names of the modules that keep state outside parameters and buffers (``get_extra_state``)."""
    for name, module in root.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield f"{name} ({type(module).__qualname__})"


def _by_first_name(named: Iterable[tuple[str, T]]) -> tuple[dict[str, T], dict[str, str]]:
    first: dict[int, str] = {}
    tensors: dict[str, T] = {}
    aliases: dict[str, str] = {}
    for raw, tensor in named:
        # torch.compile puts its wrapper into the names of every compiled submodule.
        name = ".".join(component for component in raw.split(".") if component != "_orig_mod")
        if id(tensor) in first:
            if name != first[id(tensor)]:
                aliases[name] = first[id(tensor)]
        elif name in tensors:
            raise UnsupportedError(f"two tensors of the module are both called {name}")
        else:
            first[id(tensor)] = name
            tensors[name] = tensor
    return tensors, aliases
