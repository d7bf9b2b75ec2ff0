"""Puts the tree of an optimizer that was read back into a live optimizer."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters.flats import divided
from zckpt.adapters.optimizer.classes import (
    INTERCHANGEABLE,
    TORCH_CLASSES,
    class_name,
    counts_together,
    decouples,
    inner,
)
from zckpt.adapters.optimizer.values import has_tensor, placed
from zckpt.engines.composed import compose, is_composed, is_decomposed, misfit
from zckpt.errors import first_few

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from zckpt.adapters.flats import FlatBuffer
    from zckpt.adapters.optimizer.saved import Saved, State


class OptimizerRestoring:
    """Puts a ``Saved`` into a live optimizer. ``problems`` comes first, and changes nothing. If it returns any reasons,
    ``restore`` must not be called."""

    def __init__(self, saved: Saved, optimizer: Any, flats: Sequence[FlatBuffer], unknown: Collection[str]) -> None:
        """``unknown``: the parameters that ``saved`` need not have."""
        self._saved, self._optimizer, self._flats, self._unknown = saved, optimizer, flats, unknown
        names: dict[int, dict[str, None]] = {}
        for flat in flats:
            names.setdefault(flat.group, {}).update(dict.fromkeys(flat.stored_names))
        self._names = {group: list(of_group) for group, of_group in names.items()}
        """The names of the parameters of each param group, by the index of the group."""

    @property
    def saved_groups(self) -> int:
        """The number of param groups in the checkpoint."""
        return len(self._saved.groups)

    def matching_groups(self) -> list[int | None]:
        """Returns for each live param group the index of the saved one, or None if the checkpoint does not have it."""
        indices = range(len(self._optimizer.param_groups))
        return [
            self._saved.group_of(self._names[index]) if index in self._names else self._without_trained(index)
            for index in indices
        ]

    def problems(self, restored: Mapping[str, Collection[str]]) -> list[str]:
        """Returns the reasons why the tree cannot be restored. ``restored``: the names of the tensors that will be
        restored, by part."""
        of_settings = (reason for _, reasons in self._settings for reason in reasons)
        return [*self._other_class(), *of_settings, *self._misfits(restored)]

    def restore(self) -> None:
        """Sets the param groups, and the scalars of every flat buffer."""
        for group, (settings, _) in zip(self._optimizer.param_groups, self._settings, strict=True):
            for key, value in settings.items():
                group[key] = placed(value, group.get(key), torch.device("cpu"))
            # With ``foreach``, but without ``capturable``, torch's Adam refuses a step if a setting is a tensor.
            if group.get("foreach") and not group.get("capturable") and has_tensor([group[key] for key in settings]):
                group["foreach"] = False
        for flat, saved in zip(self._flats, self._states, strict=True):
            if saved is None or isinstance(saved, str):
                continue
            if not saved.values and not saved.moments:
                live = self._optimizer.state.get(flat.master, {})
                if self._begins_anew(flat):
                    live.clear()  # The optimizer makes it anew in its next step, as it did after the save.
                elif "step" in live:  # It belongs to moments that the engine had before, and that are gone now.
                    live["step"] = 0 * live["step"]
                continue
            state, group = self._optimizer.state[flat.master], self._optimizer.param_groups[flat.group]
            for key, value in saved.values.items():
                # As in torch.optim.Optimizer.load_state_dict, `step` stays in host memory unless the kernel reads it on
                # the device.
                on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
                device = torch.device("cpu") if on_host else flat.master.device
                place = compose if is_decomposed(value) else placed
                if key == "step" and self._saved.is_of_another_class:
                    value = _counted_as(value, self._optimizer)
                state[key] = place(value, state.get(key), device)
            for part in saved.moments:
                if part not in state:  # The flat buffer is only padding, or the checkpoint lacks its parameters.
                    state[part] = torch.zeros_like(flat.master, requires_grad=False)

    def _begins_anew(self, flat: FlatBuffer) -> bool:
        """Returns whether the state of a flat buffer is dropped. That in swap files cannot be, so it becomes zero."""
        return self._saved.begins_anew and not flat.files

    def _other_class(self) -> Iterator[str]:
        """Yields the reasons why another optimizer has saved the state."""
        saved, optimizer, fit = self._saved, self._optimizer, True
        inner_class = None if inner(optimizer) is None else type(inner(optimizer)).__name__
        classes = ((saved.optimizer_class, class_name(optimizer)), (saved.inner_class, inner_class))
        for saved_class, live_class in classes if saved.optimizer_class is not None else ():
            if saved_class != live_class and not {saved_class, live_class} <= INTERCHANGEABLE:
                fit = False
                yield f"optimizer: {saved_class} in the checkpoint, {live_class} in the engine"
        subtracts = decouples(optimizer)
        if fit and None not in (saved.decouples, subtracts) and saved.decouples != subtracts:
            ways = {True: "subtracts it from the weights (AdamW)", False: "adds it to the gradients (Adam)"}
            yield (
                f"weight decay: the optimizer of the checkpoint {ways[bool(saved.decouples)]}, that of the engine "
                f"{ways[bool(subtracts)]}"
            )

    def _misfits(self, restored: Mapping[str, Collection[str]]) -> Iterator[str]:
        """Yields the reasons why the states of flat buffers cannot be restored."""
        for flat, state in zip(self._flats, self._states, strict=True):
            if isinstance(state, str):
                yield state
            if state is None or isinstance(state, str):
                continue
            live = self._optimizer.state.get(flat.master)
            if live and not self._begins_anew(flat):
                not_saved = divided(flat, live).bound.keys() - state.values.keys() - self._saved.left_out
                if not_saved:
                    keys = ", ".join(sorted(map(str, not_saved)))
                    yield f"missing: optimizer state {keys} of {first_few(flat.stored_names, 1)}"
            for key, value in state.values.items():
                present, why = (live or {}).get(key), None
                if is_decomposed(value):
                    why = misfit(value, present)
                elif is_composed(present):
                    why = f"is no {type(present).__qualname__} in the checkpoint, as it is in the engine"
                if why is not None:
                    yield f"{key} of {first_few(flat.stored_names, 1)} {why}"
            absent = [
                f"{part}/{name}"
                for part in state.moments
                for name in flat.stored_names
                if name not in restored.get(part, ()) and self._saved.has_state(name)
            ]
            if absent:
                yield f"{first_few(absent, 1)}: not restored, though the optimizer's scalars would be"

    @cached_property
    def _settings(self) -> list[tuple[dict[str, Any], list[str]]]:
        """What ``Saved.settings`` returns for each live param group."""
        return [self._settings_of(index, group) for index, group in enumerate(self._optimizer.param_groups)]

    def _settings_of(self, index: int, live: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        if index in self._names:
            return self._saved.settings(self._names[index], self._unknown, live)
        if self._without_trained(index) is None:
            return {}, []
        group = self._saved.groups[index]
        return {key: value for key, value in group.items() if self._saved.restores(key, live, [group])}, []

    def _without_trained(self, index: int) -> int | None:
        """Returns ``index`` if the saved param group of that index has only frozen parameters, and otherwise None. A
        live group of frozen parameters is known only by its index."""
        saved = self._saved.groups
        return index if index < len(saved) and not saved[index]["params"] else None

    @cached_property
    def _states(self) -> list[State | str | None]:
        """For each flat buffer, what was saved for it, or the reason why that cannot be restored. It is None for a flat
        buffer that keeps its own state, because none of the parameters that share its step is restored."""
        together = {
            group: self._saved.together(names)
            for group, names in self._names.items()
            if counts_together(self._optimizer, group)
        }

        def keeps_own(flat: FlatBuffer) -> bool:
            return self._saved.keeps(self._names[flat.group] if flat.group in together else flat.stored_names)

        return [None if keeps_own(flat) else self._saved.state(flat, together.get(flat.group)) for flat in self._flats]


def _counted_as(step: Any, optimizer: Any) -> Any:
    """Returns a number of steps as a class in ``INTERCHANGEABLE`` counts them: those of torch in a tensor, those of
    DeepSpeed in an int."""
    count = step.item() if isinstance(step, torch.Tensor) else step
    in_tensor = class_name(optimizer) in TORCH_CLASSES
    return torch.tensor(float(count), dtype=torch.float32, device="cpu") if in_tensor else int(count)
