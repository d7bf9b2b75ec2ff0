"""Lets torchtitan save and load its training with zckpt:

    from zckpt.torchtitan import CheckpointManager

    config.checkpoint = CheckpointManager.Config(enable=True, interval=500)

It takes the options of torchtitan's own manager. This module imports torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan.components.checkpointer import CheckpointManager as _TorchtitansManager
from torchtitan.components.checkpointer.base import DATALOADER, MODEL, OPTIMIZER

from zckpt.adapters.pytorch.train_state import TrainState
from zckpt.checkpoint.background import PendingWrite
from zckpt.checkpoint.listing.find import find
from zckpt.checkpoint.listing.runs import can_resume, directories_of, if_whole, is_begun, names_in
from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.restore import restore
from zckpt.checkpoint.write import write
from zckpt.errors import CheckpointNotFoundError, UnfinishedWriteError, UnsupportedError, warn
from zckpt.frameworks.attached_saves import moments
from zckpt.plan.inventory import WEIGHT_PARTS
from zckpt.ranks.collectives import Ranks
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


_STEP = "step-"
"""The names of torchtitan's checkpoints begin with this."""


class CheckpointManager(_TorchtitansManager):
    """torchtitan's manager of checkpoints, with zckpt in the place of PyTorch's distributed checkpoints.

    The checkpoint of step N is ``<folder>/step-<N>``. The state of the data loader is saved for each rank, and it is
    loaded if there are as many ranks as then. Everything else is loaded at any number of ranks. ``initial_load_path``
    may be any checkpoint of zckpt, such as one of a DeepSpeed run. Checkpoints in torchtitan's own formats are loaded
    by torchtitan, and so are files of Hugging Face, which it also writes. It is tested with torchtitan 0.3.0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_TorchtitansManager.Config):
        """The options of torchtitan's own manager, with these differences:

        - Every ``async_mode`` but "disabled" writes in the background, as ``zckpt.write(..., background=True)``.
        - ``keep_latest_k`` counts the checkpoints from which training can go on, and those of weights alone, each for
          itself, as ``keep_last`` of ``zckpt.write``. An older one is removed once the newer one is committed.
        - ``export_dtype`` is for files of Hugging Face. A checkpoint of zckpt has the weights as they are, and
          ``zckpt.export`` converts them.
        """

        copy_to: str | None = None
        """The directory of a run, such as "s3://bucket/run", to which each checkpoint is copied while the training goes
        on, as by ``zckpt.write``."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module], optimizers: Any, **others: Any) -> None:
        super().__init__(config, model_parts=model_parts, optimizers=optimizers, **others)
        if not self.enable:
            return
        if len(model_parts) != 1:
            raise UnsupportedError(
                f"pipeline parallelism: this rank has {len(model_parts)} parts of the model",
                hint="use torchtitan's own CheckpointManager with pipeline parallelism",
            )
        if unknown := set(self.exclude_from_loading).difference(self.states):
            raise ValueError(f"exclude_from_loading: there is no state {', '.join(sorted(unknown))}")
        self._copy_to, self._background = config.copy_to, config.async_mode != "disabled"
        self._train_state = TrainState(model_parts[0], [*optimizers])
        self._ranks = Ranks(None, call="torchtitan")

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        if last_step and self.last_save_in_hf:
            return bool(super()._save(curr_step, last_step))
        others = {name: state.state_dict() for name, state in self._others().items()}
        of_loader = {DATALOADER: others.pop(DATALOADER)} if DATALOADER in others else None
        written = write(
            self._train_state,
            str(Location.of(self.folder).child(f"{_STEP}{curr_step}")),
            step=curr_step,
            exclude=moments(self._train_state) if last_step and self.last_save_model_only else (),
            client_state=others,
            rank_state=of_loader,
            overwrite=True,
            background=self._background and not last_step,
            keep_last=self.keep_latest_k or None,
            copy_to=self._copy_to,
        )
        self.save_future = written if isinstance(written, PendingWrite) else None
        return True

    def _wait_for_saving(self) -> None:
        assert self.save_future is not None, "torchtitan calls this only then"
        self.save_future.wait()
        self.save_future = None

    def _maybe_wait_for_staging(self) -> None:
        """Does nothing, because ``zckpt.write`` has copied the state when it returns."""

    def _close(self) -> None:
        super()._close()
        self.maybe_wait_for_saving()

    def _load(self, step: int = -1) -> bool:
        self.maybe_wait_for_saving()
        found = self._ranks.first(lambda: self._find(step), "look for a checkpoint")
        if found is None:
            return bool(super()._load(step))
        path, only_weights = found
        parts = None
        if only_weights or OPTIMIZER in self.exclude_from_loading:
            parts = [part for part in open_loader(path).parts if part in WEIGHT_PARTS]
        client_state, of_ranks = restore(self._train_state, path, parts=parts, with_rank_state=True)
        if not only_weights:
            self._load_others({**client_state, **(of_ranks.own or {})})
        return True

    def _find(self, step: int) -> tuple[str, bool] | None:
        """Returns the path of the checkpoint of zckpt that is loaded, and whether only its weights are. Returns None if
        torchtitan looks for a checkpoint in its own formats."""
        folder = open_store(self.folder)
        if step != -1:
            there = is_begun(names_in(folder.child(f"{_STEP}{step}")))
            return (str(folder.location.child(f"{_STEP}{step}")), step == 0) if there else None
        names = [name.removeprefix(_STEP) for name in directories_of(folder) if name.startswith(_STEP)]
        steps = sorted((int(name) for name in names if name.isdecimal()), reverse=True)
        whole = next((step for step in steps if can_resume(folder.child(f"{_STEP}{step}"))), None)
        if whole is None:  # It may be a checkpoint of the weights of step 0, or a training that has ended.
            whole = next((step for step in steps if if_whole(folder.child(f"{_STEP}{step}"))), None)
        of_torchtitan = self._find_load_step()
        if whole is not None and whole >= of_torchtitan:
            return str(folder.location.child(f"{_STEP}{whole}")), whole == 0
        if (whole, of_torchtitan) == (None, -1) and self.initial_load_path and not self.initial_load_in_hf:
            try:
                return str(find(self.initial_load_path).location), self.initial_load_model_only
            except UnfinishedWriteError:
                raise
            except CheckpointNotFoundError:
                pass
        return None

    def _others(self) -> dict[str, Any]:
        """Returns all objects whose state is saved but the model and its optimizers, by the name of the state."""
        return {
            name: state
            for name, state in self.states.items()
            if state is not None and name not in (MODEL, OPTIMIZER)
        }  # fmt: skip

    def _load_others(self, saved: Mapping[str, Any]) -> None:
        missing = []
        for name, state in self._others().items():
            if name in self.exclude_from_loading:
                continue
            if name in saved:
                state.load_state_dict(saved[name])
            elif name != DATALOADER:  # It is there only with the same number of ranks, and ``restore`` warns if not.
                missing.append(name)
        if missing and self._ranks.rank == 0:
            warn(f"the checkpoint has no state of {', '.join(missing)}, which begin anew")
