"""The files of a folder in DeepSpeed's own format:

mp_rank_00_model_states.pt                           stages 0 to 2: weights, buffers, counters; at stage 0 also the
                                                     optimizer's state
zero_pp_rank_R_mp_rank_00_model_states.pt            stage 3: the same for rank R, but of the weights only frozen ones
zero_pp_rank_R_mp_rank_00_optim_states.pt            master weights and moments of rank R; in bf16 the name begins
                                                     with "bf16_"
offloaded_tensors/rankRR/ID_ID.tensor.swp            what rank R had offloaded to NVMe
zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt         a Universal Checkpoint: one whole parameter, and its moments
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zckpt.converting.restricted_pickle import load
from zckpt.converting.source import AS_WRITTEN
from zckpt.errors import FormatError, MissingFileError, UnsupportedError, first_few, from_os_error

if TYPE_CHECKING:
    from collections.abc import Iterable

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt", re.ASCII)
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt", re.ASCII)
ONE_FOLDER = "move the files of each into a folder of its own: files of the same step belong together"
RANKS_MIN, BYTES_PER_RANK = 1024, 4096
"""A folder without files of single ranks may be of ``RANKS_MIN`` ranks, and of one more for each ``BYTES_PER_RANK``
bytes, because the files of each rank of the new checkpoint take time."""
STOCK = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "checkpoint_parallel_dimensions",
    "universal_checkpoint_info", "sparse_tensor_module_names", "csr_tensor_module_names",
})  # fmt: skip
"""The keys that DeepSpeed itself uses in a file of model states. The same dict also has the keys of the caller's
``client_state``."""


class DeepSpeedFolder:
    """The files of one folder. Its methods raise UnsupportedError for state that zckpt cannot store, MissingFileError,
    FormatError and StorageError."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            names = sorted(os.listdir(path))
        except OSError as error:
            raise from_os_error(error, "list", path) from error
        _refuse_others(path, names)
        self.universal = "zero" in names
        """Whether the folder is a Universal Checkpoint."""
        self._models = _by_rank(path, _MODEL, names)
        self._optimizers = {} if self.universal else _by_rank(path, _OPTIMIZER, names)
        self.partitions_weights = None not in self._models
        """Whether the folder is of stage 3, in which each rank has its own file of model states."""

    @property
    def has_optimizer_files(self) -> bool:
        """Whether there are files of optimizer states. Every stage except 0 has them."""
        return bool(self._optimizers)

    def check_ranks(self, world_size: int, nbytes: int) -> None:
        """Raises MissingFileError unless there is a file of each kind for each rank. Raises FormatError if there are
        more files, or if a folder of ``nbytes`` bytes without such files says that the run had very many ranks."""
        if not self._optimizers and world_size > RANKS_MIN + nbytes // BYTES_PER_RANK:
            raise FormatError(
                f"it says that the run had {world_size} ranks, far too many for its {nbytes} bytes", file=self.path
            )
        kinds = [(self._optimizers, "optim_states.pt")] if self._optimizers else []
        if self.partitions_weights:
            kinds.append((self._models, "model_states.pt"))
        for files, kind in kinds:
            for rank in range(world_size):
                if rank not in files:
                    raise MissingFileError(
                        f"the run had {world_size} ranks, and the file of rank {rank} is missing",
                        file=os.path.join(self.path, f"zero_pp_rank_{rank}_mp_rank_00_{kind}"),
                        hint="bring all files of the checkpoint into one folder: each machine may have kept the files "
                        "of its own ranks",
                    )  # fmt: skip
            if len(files) > world_size:
                raise FormatError(
                    f"the folder has {len(files)} files {kind} and the run had {world_size} ranks: it holds the files "
                    "of two checkpoints", file=self.path, hint=ONE_FOLDER,
                )  # fmt: skip

    def model_path(self, rank: int) -> str:
        """Returns the path of the file with the model states of ``rank``."""
        return self._models[rank if self.partitions_weights else None]

    def optimizer_path(self, rank: int) -> str:
        """Returns the path of the file with the optimizer states of ``rank``, or of the folder that has them."""
        if self.universal:
            return os.path.join(self.path, "zero")
        return self._optimizers[rank] if self._optimizers else self.model_path(rank)

    def model(self, rank: int) -> dict[str, Any]:
        """Returns the model states of ``rank``. Below stage 3 they are the same for all ranks."""
        path = self.model_path(rank)
        state = load(path)
        steps = state.get("global_steps") if isinstance(state, dict) else None
        if not isinstance(state, dict) or "module" not in state or type(steps) is not int or not 0 <= steps < 1 << 62:
            raise FormatError("this is not a file of model states of DeepSpeed", file=path, hint=AS_WRITTEN)
        return state

    def zero(self, rank: int) -> dict[str, Any]:
        """Returns what ZeRO's wrapper of the optimizer has saved in the file of optimizer states of ``rank``."""
        path = self._optimizers[rank]
        state = load(path)
        inner = state.get("optimizer_state_dict") if isinstance(state, dict) else None
        if not isinstance(inner, dict):
            raise FormatError("this is not a file of optimizer states of DeepSpeed", file=path, hint=AS_WRITTEN)
        return inner

    def swap_file(self, rank: int, name: str) -> str:
        """Returns the path of the file that ``rank`` had offloaded to NVMe under this name."""
        path = os.path.join(self.path, "offloaded_tensors", f"rank{rank:02d}", f"{name}.tensor.swp")
        if not os.path.isfile(path):
            raise MissingFileError(
                "a file that was offloaded to NVMe is missing", file=path,
                hint="copy the folder offloaded_tensors of the checkpoint too, of every machine",
            )  # fmt: skip
        return path

    def universal_file(self, *names: str) -> Any:
        """Returns the content of a file in the folder ``zero``, or None if there is no such file. ``names``: the names
        of directories and of the file. They may come from another file, so they are checked."""
        for name in names:
            if os.path.basename(name) != name or name in ("", os.curdir, os.pardir) or "\0" in name:
                raise FormatError(f"a parameter of the name {name!r} has no file", file=self.path, hint=AS_WRITTEN)
        path = os.path.join(self.path, "zero", *names)
        return load(path) if os.path.exists(path) else None


def of_type(tree: Any, key: str, kind: type) -> Any:
    """Returns the value that ``tree`` has at ``key``. Raises FormatError if there is none, or if it is not of the type
    ``kind``."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get(key), kind):
        raise FormatError(f"{key} is missing, or is not what DeepSpeed puts there")
    return tree[key]


def _by_rank(path: str, pattern: re.Pattern[str], names: Iterable[str]) -> dict[int | None, str]:
    """Returns the paths of the files of one kind, by rank. A file that all ranks share has the key None."""
    paths: dict[int | None, str] = {}
    for match in filter(None, map(pattern.fullmatch, names)):
        rank, model_parallel_rank = match.groups()
        if int(model_parallel_rank):
            raise UnsupportedError(f"{path} was written by a run with tensor or pipeline parallelism: {match.string}")
        paths[None if rank is None else int(rank)] = os.path.join(path, match.string)
    if None in paths and len(paths) > 1:
        raise FormatError(
            f"the folder holds the files of two checkpoints: {first_few(list(paths.values()), 2)}", file=path,
            hint=ONE_FOLDER,
        )  # fmt: skip
    return paths


def _refuse_others(path: str, names: Iterable[str]) -> None:
    """Raises UnsupportedError if the names of the files show a run that zckpt does not support."""
    for name in names:
        if re.fullmatch(r"layer_\d+-model.*_states\.pt", name):
            raise UnsupportedError(f"{path} was written by a run with pipeline parallelism: {name}")
        if "_expert_" in name or name.startswith("expp_rank_"):
            raise UnsupportedError(f"{path} holds a model with a mixture of experts (deepspeed.moe): {name}")
