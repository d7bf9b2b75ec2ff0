"""The state that modules add to their ``state_dict`` by themselves, beside parameters and persistent buffers. torch
calls it extra state. The scales of the quantized weights of bitsandbytes are an example."""

from __future__ import annotations

import traceback
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines import bitsandbytes
from zckpt.engines.tensors import local_of, plain_name
from zckpt.errors import FormatError, MismatchError, UnsupportedError, first_few
from zckpt.format.names import check_tensor_name
from zckpt.transfer.memory import not_plain
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from zckpt.engines.bitsandbytes import Gathered

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
        sharded = any(local_of(tensor) is not tensor for tensor in tensors)
        for key, value in self._state_dict(_without_values(root, {}) if sharded else root, keep_vars=True).items():
            name = plain_name(key)
            # If a hook gives a parameter another name, takes a view of it, or computes something from sharded
            # parameters, this is not further state.
            if name in names or _place(value) in places or (sharded and isinstance(value, _FromShards)):
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
        quantized = {path: module for path, module in modules.items() if bitsandbytes.is_quantized(module)}
        for module in quantized.values():  # No rank may fail before all have done this, because it is collective.
            bitsandbytes.complete(module, gathered)
        for path, module in quantized.items():
            own = {name.removeprefix(f"{path}."): value for name, value in by_owner.pop(path).items()}
            bitsandbytes.load(module, own)
        if not by_owner:
            return
        state = self._state_dict(self._root)
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

    def _state_dict(self, root: torch.nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
        try:
            # The attribute of the object may be another function: zckpt.offload replaces it to watch the calls.
            return type(root).state_dict(root, keep_vars=keep_vars)
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
        if bitsandbytes.is_quantized(module):
            return True
        if name.endswith("_extra_state") and type(module).set_extra_state is not torch.nn.Module.set_extra_state:
            return True
        around = [self._root, *map(self._module, accumulate(owner.split("."), lambda path, child: f"{path}.{child}"))]
        return any(_customizes(module, _LOADING) for module in around)


class _FromShards(torch.Tensor):
    """A tensor without values in the place of a sharded parameter. What is computed from it is of this class too."""

    def _same(self, *_: object, **__: object) -> _FromShards:
        return self

    full_tensor = to_local = redistribute = _same
    """Methods of a DTensor."""


def _without_values(module: torch.nn.Module, made: dict[int, torch.Tensor]) -> torch.nn.Module:
    """Returns a module that makes the same state dict, but in which sharded parameters have no values. A hook that
    divides or joins parameters, such as those of the query, key and value of an attention, gathers sharded ones on all
    ranks. Here it must not: this costs memory, and a rank that has failed before
    would leave the others waiting. ``made``: what stands for each sharded parameter, by its ``id``; a tied parameter is
    one object here, too."""

    def without_values(parameter: torch.nn.Parameter | None) -> torch.Tensor | None:
        if parameter is None or local_of(parameter) is parameter:
            return parameter
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return made.setdefault(id(parameter), empty.as_subclass(_FromShards))

    copy = object.__new__(type(module))
    # An assignment to an attribute of a compiled module would change the module that it has compiled.
    children = module._modules.items()
    vars(copy).update(
        vars(module),
        _modules={name: None if child is None else _without_values(child, made) for name, child in children},
        _parameters={name: without_values(parameter) for name, parameter in module._parameters.items()},
    )
    return copy


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
