"""Restores a scheduler of the learning rate.

A scheduler may have lists with an entry for each param group. If an engine has other param groups than the writer, it
finds the entries by the parameters. If an engine keeps its own settings, or has param groups that are new, its own
scheduler takes as many steps as that of the checkpoint. Then the learning rates are those of its own schedule there.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zckpt.adapters.optimizer.values import like
from zckpt.engines.contract import is_left_out
from zckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_COUNTS = ("last_epoch", "last_batch_iteration")
"""The names under which the schedulers of torch and those of DeepSpeed count their steps."""


class SavedScheduler:
    """The tree of a scheduler that was read back, for a restore into a live scheduler. Raises FormatError for anything
    that is not such a tree.

    ``tree`` and ``scheduler`` are None if there is none. ``groups`` has, for each param group of the live optimizer,
    the number of the param group of the checkpoint with the same parameters, or None if there is none.
    ``saved_count``: the number of param groups in the checkpoint, or None if only the scheduler may know it.
    """

    def __init__(self, tree: Any, scheduler: Any, groups: Sequence[int | None], saved_count: int | None) -> None:
        if tree is not None and not (isinstance(tree, Mapping) and isinstance(tree.get("state"), Mapping)):
            raise FormatError("state: scheduler is not the state of a scheduler")
        self._state: Mapping[str, Any] = {} if tree is None else tree["state"]
        self._class = None if tree is None else tree.get("class")
        self._class_unknown = tree is not None and self._class is None  # A conversion's source may not name the class.
        self._scheduler, self._groups = scheduler, groups
        self._saved_count = len(self._state.get("base_lrs", groups)) if saved_count is None else saved_count
        self._live: Mapping[str, Any] = {} if scheduler is None else scheduler.state_dict()

    def problems(self, *, strict: bool, keeps_settings: bool) -> list[str]:
        """Returns the reasons why the scheduler cannot be restored. The arguments are those of ``Selection``."""
        live_class = None if self._scheduler is None else type(self._scheduler).__name__
        if keeps_settings:
            why = self._why_no_steps()
            return [f"scheduler: {live_class} cannot take the steps of the checkpoint: {why}"] if why else []
        if live_class != self._class and not (live_class and self._class_unknown):
            return [f"scheduler: {self._class or 'none'} in the checkpoint, {live_class or 'none'} in the engine"]
        if strict and self._differs_in_groups(self._state, self._live):
            counts = f"{self._saved_count} param groups in the checkpoint, {len(self._groups)} in the engine"
            return [f"scheduler: {live_class} of {counts}"]
        return []

    def take_steps(self, *, keeps_settings: bool) -> None:
        """Brings the learning rates of the engine's own schedule to the step of the checkpoint, if they are needed and
        the scheduler can do it. Call this before the param groups are changed."""
        if not keeps_settings and not self._differs_in_groups(self._state, self._live):
            return
        if self._scheduler is None or self._why_no_steps():
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects a step of the optimizer before each of these steps.
            for _ in range(*self._steps()):
                self._scheduler.step()

    def restore(self, param_groups: Iterable[Mapping[str, Any]]) -> None:
        """Gives the scheduler the saved state. Param groups that the checkpoint does not have keep their entries.
        ``param_groups``: those of the optimizer, with the settings that were restored."""
        if self._scheduler is None:
            return
        self._scheduler.load_state_dict(self._fitted(dict(self._state), self._scheduler.state_dict()))
        if hasattr(self._scheduler, "_last_lr") and "_last_lr" not in self._state:
            # DeepSpeed's own schedulers save only a step number. Without this, get_last_lr() would return the learning
            # rates of the first step.
            self._scheduler._last_lr = [group["lr"] for group in param_groups]

    def _steps(self) -> tuple[int, int] | tuple[()]:
        """Returns how many steps the live scheduler has counted, and the scheduler of the checkpoint. Returns an empty
        tuple if they do not count alike."""
        counts = ((getattr(self._scheduler, name, None), self._state.get(name)) for name in _COUNTS)
        return next(((a, b) for a, b in counts if type(a) is int and type(b) is int), ())

    def _why_no_steps(self) -> str:
        """Returns the reason why the live scheduler cannot take as many steps as were saved. The text is empty if it
        can, and if there is no scheduler."""
        if self._scheduler is None:
            return ""
        if not self._state:
            return "the checkpoint has no scheduler"
        steps = self._steps()
        if not steps:
            return "one of the two schedulers does not count its steps, or they count them in different ways"
        if steps[0] > steps[1]:
            return f"it has taken {steps[0]} steps already, and that of the checkpoint only {steps[1]}"
        optional = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        arguments = inspect.signature(self._scheduler.step).parameters.values()
        needed = [p.name for p in arguments if p.default is p.empty and p.kind not in optional]
        return f"its step() needs {', '.join(needed)}" if needed else ""

    def _is_by_group(self, saved: object, live: object) -> bool:
        """Whether both are lists with an entry for each param group, and there are other param groups now."""
        lengths = (self._saved_count, len(self._groups))
        lists = isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple))
        return lengths[0] != lengths[1] and lists and (len(saved), len(live)) == lengths  # type: ignore[arg-type]

    def _differs_in_groups(self, saved: object, live: object) -> bool:
        return self._is_by_group(saved, live) or any(self._differs_in_groups(*pair) for pair in _inside(saved, live))

    def _fitted(self, saved: Any, live: Any) -> Any:
        """Returns a saved value, with entries for the live param groups in lists by param group, and with the types of
        numbers that the scheduler has now. What the save has left out is as it is now."""
        if is_left_out(saved):
            return live
        if self._is_by_group(saved, live):
            return [live[number] if group is None else saved[group] for number, group in enumerate(self._groups)]
        if type(saved) is dict and isinstance(live, Mapping):
            return {key: self._fitted(value, live.get(key)) for key, value in saved.items()}
        if type(saved) is list and isinstance(live, list) and len(saved) == len(live):
            return [self._fitted(*pair) for pair in zip(saved, live, strict=True)]
        return like(saved, live)


def unsupported_scheduler(scheduler: Any) -> Iterator[str]:
    """Yields a phrase for an error if the state of a scheduler cannot be read or set."""
    if scheduler is not None and not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        yield f"a scheduler without state_dict() and load_state_dict(): {type(scheduler).__qualname__}"


def _inside(saved: object, live: object) -> Iterable[tuple[object, object]]:
    """Returns the pairs of values at the same places in two values that are both maps or both lists."""
    if isinstance(saved, Mapping) and isinstance(live, Mapping):
        return [(value, live.get(key)) for key, value in saved.items()]
    if isinstance(saved, list) and isinstance(live, list) and len(saved) == len(live):
        return zip(saved, live, strict=True)
    return ()
