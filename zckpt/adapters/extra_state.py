"""The state that modules add to their ``state_dict`` by themselves, beside parameters and persistent buffers. torch
calls it extra state. The scales of the quantized weights of bitsandbytes are an example."""

from __future__ import annotations

import sys
import traceback
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines.tensors import local_of, plain_name
from zckpt.errors import FormatError, MismatchError, UnsupportedError, first_few
from zckpt.format.names import check_tensor_name
from zckpt.transfer.memory import not_plain
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    Gathered = Callable[[list[torch.nn.Parameter]], AbstractContextManager[Any]]

_SAVING = ("state_dict", "_save_to_state_dict", "get_extra_state"), ("_state_dict_hooks",)
_LOADING = ("load_state_dict", "_load_from_state_dict"), ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
"""The methods of a module, and its dicts of hooks, that may add to a state dict, and that may take it back."""


class ExtraState:
    """The extra state of all modules of a model, as it is when this object is made. If no module has a method or a hook
    that may add any, ``state_dict`` is not called."""

    def __init__(self, root: torch.nn.Module, names: Collection[str], tensors: Sequence[torch.Tensor]) -> None:
        """``tensors``: the parameters and persistent buffers of ``root``. ``names``: all names that they have. Raises
        UnsupportedError if ``state_dict`` fails."""
        self._root = root
        self.tensors: dict[str, torch.Tensor] = {}
        """The tensors by name. Some modules make them anew for each state dict."""
        self.unsaved: list[str] = []
        """A phrase for each value that cannot be saved, or that no module would take back."""
        if not any(_customizes(module, _SAVING) for module in root.modules()):
            return
        places = {_place(tensor) for tensor in tensors}
        for path, module in _outermost(root, ""):
            # One module at a time, because a hook may gather sharded parameters.
            state = self._state_dict(module, path, keep_vars=True)
            added = {plain_name(key): value for key, value in state.items()}
            # If a hook gives a parameter another name, or takes a view of it, this is not further state.
            added = {key: value for key, value in added.items() if key not in names and _place(value) not in places}
            self._look_at(added, _left_out(module, path, {*map(plain_name, state)}))

    def _look_at(self, added: Mapping[str, Any], left_out: Sequence[torch.Tensor]) -> None:
        """Notes what a module has added to its state dict. ``left_out``: the sharded parameters that it leaves out."""
        tensors = [value for value in added.values() if isinstance(value, torch.Tensor)]
        sharded = [value for value in tensors if local_of(value) is not value]
        # A hook has divided or joined these parameters, such as those of the query, key and value of an attention.
        made_of_them = bool(sharded) and sum(map(torch.numel, sharded)) == sum(map(torch.numel, left_out))
        for name, value in added.items():
            if made_of_them and any(value is one for one in sharded):
                continue
            reason = _unsaveable(name, value) or ("" if self._is_taken_back(name) else "no module takes it back")
            if reason:
                self.unsaved.append(f"{name}, which a module adds to its state_dict ({reason})")
            else:
                self.tensors[name] = value.detach()

    def takes(self, name: str) -> bool:
        """Returns whether a module may take a tensor of this name that it does not have now. Some modules make their
        extra state only in their first forward pass."""
        return _customizes(self._module(self._owner(name)), _SAVING) and self._is_taken_back(name)

    def load(self, values: Mapping[str, torch.Tensor], gathered: Gathered) -> None:
        """Gives the modules the values of their tensors, as ``load_state_dict`` of the model does. A module that gets
        any is also given its own parameters and buffers, which have their new values already, because it may need them
        together.

        ``values``: by the name of the tensor. ``gathered``: returns a context in which parameters are whole, for which
        all ranks have to call this with the same names. Raises MismatchError if no module takes a tensor, and whatever
        the modules raise.
        """
        by_owner: dict[str, dict[str, torch.Tensor]] = {}
        for name, value in values.items():
            by_owner.setdefault(self._owner(name), {})[name] = value
        modules = {path: self._module(path) for path in by_owner}
        quantized = {path: module for path, module in modules.items() if _is_quantized(module)}
        for module in quantized.values():  # No rank may fail before all have done this, because it is collective.
            _complete(module, gathered)
        for path, module in quantized.items():
            own = {name.removeprefix(f"{path}."): value for name, value in by_owner.pop(path).items()}
            _load_quantized(module, own)
        if not by_owner:
            return
        state = self._state_dict(self._root, "")
        keys = {plain_name(key): key for key in state}
        for name, key in keys.items():
            if self._owner(name) not in by_owner:
                del state[key]
        for owner, own in by_owner.items():
            for name, value in own.items():
                state[keys.get(name, self._paths[owner] + name[len(owner) :])] = value
        result = type(self._root).load_state_dict(self._root, state, strict=False)
        unexpected = [name for name in map(plain_name, result.unexpected_keys) if name in values]
        if unexpected:
            raise MismatchError(
                f"no module of the engine takes {first_few(unexpected, 5)}; all else is restored",
                hint='make the engine of the model that was saved; parts= without "buffer" restores it without buffers',
            )

    def _state_dict(self, module: torch.nn.Module, path: str, *, keep_vars: bool = False) -> dict[str, Any]:
        """``path``: the path of the module, which ends in a period unless it is empty."""
        try:
            # The attribute of the object may be another function: zckpt.offload replaces it to watch the calls.
            return type(module).state_dict(module, prefix=path, keep_vars=keep_vars)
        except Exception as error:  # A module of the user can raise any error.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise UnsupportedError(
                f"the state_dict of the model fails in {frame.name}, line {frame.lineno} of {frame.filename}: "
                f"{type(error).__name__}: {error}",
                hint="what bitsandbytes has quantized cannot be saved on a CPU after a forward pass in eval mode; "
                "call engine.train() before the first one"
                if "bitsandbytes" in frame.filename
                else None,
            ) from error

    @cached_property
    def _paths(self) -> dict[str, str]:
        """The path of each module, by the path without the names of wrappers."""
        return {plain_name(path): path for path, _ in self._root.named_modules(remove_duplicate=False)}

    def _module(self, path: str) -> torch.nn.Module:
        return self._root.get_submodule(self._paths[path])

    def _owner(self, name: str) -> str:
        """Returns the path, without the names of wrappers, of the module that a tensor of this name belongs to."""
        paths = accumulate(name.split(".")[:-1], lambda path, child: f"{path}.{child}")
        return max((path for path in paths if path in self._paths), key=len, default="")

    def _is_taken_back(self, name: str) -> bool:
        """Returns whether the owner of a tensor, or a module that contains it, may take the tensor out of a state
        dict."""
        owner = self._owner(name)
        module = self._module(owner)
        if _is_quantized(module):
            return True
        if name.endswith("_extra_state") and type(module).set_extra_state is not torch.nn.Module.set_extra_state:
            return True
        around = [self._root, *map(self._module, accumulate(owner.split("."), lambda path, child: f"{path}.{child}"))]
        return any(_customizes(module, _LOADING) for module in around)


def _outermost(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields each module that may add to its state dict, and that is in no other such module, with its path."""
    if _customizes(module, _SAVING):
        yield path, module
    else:
        for name, child in module._modules.items():
            if child is not None:
                yield from _outermost(child, f"{path}{name}.")


def _left_out(module: torch.nn.Module, path: str, names: Collection[str]) -> list[torch.Tensor]:
    """Returns the sharded parameters of a module that its state dict, which has these names, does not have."""
    parameters = ((plain_name(path + name), parameter) for name, parameter in module.named_parameters())
    return [parameter for name, parameter in parameters if name not in names and local_of(parameter) is not parameter]


def _customizes(module: torch.nn.Module, methods_and_hooks: tuple[tuple[str, ...], tuple[str, ...]]) -> bool:
    """Returns whether any of the methods is not the one of ``torch.nn.Module``, or any of the dicts has a hook."""
    (methods, hooks), own, kind = methods_and_hooks, vars(module), type(module)
    return any(own.get(hook) for hook in hooks) or any(
        method in own or getattr(kind, method) is not getattr(torch.nn.Module, method) for method in methods
    )


def _place(value: object) -> int:
    """Returns a number that is the same for tensors that share memory, even if they have no elements."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return int(value.untyped_storage()._cdata)
    return id(value)


def _unsaveable(name: str, value: object) -> str:
    """Returns why a checkpoint cannot hold a value under this name, or an empty text if it can."""
    try:
        check_tensor_name(name)
    except FormatError as error:
        return f"its name is not allowed: {error}"
    if not isinstance(value, torch.Tensor):
        return f"it is of the type {type(value).__name__}, and only tensors can be saved"
    why = not_plain(value)
    if why is None and (value.is_meta or (value.numel() and not value.untyped_storage().nbytes())):
        why = "has no values"
    if why is None and value.dtype not in DTYPE_NAMES:
        why = f"has dtype {value.dtype}, which safetensors does not know"
    return f"it {why}" if why else ""


# bitsandbytes is not imported below, because it has been imported already if there is a module of it. Its quantized
# modules get their tensors here, because their own ``load_state_dict`` does not take those of 4-bit weights, nor those
# of 8-bit weights after the first forward pass.


def _is_quantized(module: Any) -> bool:
    """Returns whether the module is a linear layer of bitsandbytes whose weight is quantized."""
    bnb = sys.modules.get("bitsandbytes")
    if bnb is None or not isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
        return False
    return getattr(module.weight, "quant_state", None) is not None or _holder(module) is not None


def _complete(module: Any, gathered: Gathered) -> None:
    """Gives a quantized module the values of its weight. An 8-bit module has them in another tensor too, which is not
    the memory of the weight if ZeRO-3 has partitioned it. Collective. ``gathered``: as for ``ExtraState.load``."""
    holder = _holder(module)
    if holder is not None and holder.CB.data_ptr() != module.weight.data_ptr():
        with gathered([module.weight]):
            holder.CB.copy_(module.weight)


def _load_quantized(module: Any, values: Mapping[str, torch.Tensor]) -> None:
    """Gives a quantized module the tensors that belong to its weight, by the names that they have in the state dict of
    the module alone."""
    holder, weight = _holder(module), module.weight
    if holder is not None:
        holder.SCB = values.get("SCB", holder.SCB)
        return
    state = weight.quant_state
    named = {name.removeprefix("weight."): tensor for name, tensor in values.items()}
    state = type(state).from_dict({**state.as_dict(packed=True), **named}, state.absmax.device)
    weight.quant_state = module.quant_state = state
    weight.blocksize, weight.quant_type, weight.compress_statistics = state.blocksize, state.quant_type, state.nested


def _holder(module: Any) -> Any:
    """Returns the object that has the tensors of an 8-bit weight. It is the weight itself until the first forward pass,
    and the state of the module after it. Returns None if the module has no 8-bit weight."""
    places = (module.weight, getattr(module, "state", None))
    return next((place for place in places if getattr(place, "SCB", None) is not None), None)
