"""The files of a folder in DeepSpeed's own format. M is the number of a rank of model parallelism, and D that of a rank
of data parallelism. Without model parallelism, M is 00 and D is the rank.

mp_rank_M_model_states.pt                            stages 0 to 2: weights, buffers, counters; at stage 0 also the
                                                     optimizer's state
zero_pp_rank_D_mp_rank_M_model_states.pt             stage 3: the same for one rank, but of the weights only frozen ones
zero_pp_rank_D_mp_rank_M_optim_states.pt             master weights and moments of one rank; in bf16 the name begins
                                                     with "bf16_"
layer_L_expert_E_mp_rank_M_model_states.pt           one expert (deepspeed_experts.py)
layer_LL-model_states.pt                             one layer of a pipeline (deepspeed_layers.py)
expp_rank_R_mp_rank_M_optim_states.pt                stage 0: the optimizer's state of the ranks with the same experts
offloaded_tensors/rankRR/ID_ID.tensor.swp            what rank R had offloaded to NVMe
zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt         a Universal Checkpoint: one whole parameter, and its moments
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.errors import FormatError, MissingFileError, UnsupportedError, first_few, from_os_error
from zckpt.tools.converting.restricted_pickle import load
from zckpt.tools.converting.source import AS_WRITTEN, is_file_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt", re.ASCII)
_LAYER = re.compile(r"layer_(\d{1,9})(?:-model_(\d+))?-model_states\.pt", re.ASCII)
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt", re.ASCII)
ONE_FOLDER = "move the files of each into a folder of its own: files of the same step belong together"
ALL_FILES = "bring all files of the checkpoint into one folder: each machine may have kept the files of its own ranks"
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

STOCK_OF_EXPERTS = frozenset({"num_experts", "ds_autoep_layers", "folding"})
"""More such keys, if the model has experts. Then there is the first of them."""


class Coordinates(NamedTuple):
    """The numbers that say which part of the work a rank has."""

    data_rank: int
    """The number of the rank among those of data parallelism."""
    model_rank: int
    """The number of the rank among those of model parallelism: that of its tensor-parallel part of a stage."""


class DeepSpeedFolder:
    """The files of one folder. Its methods raise UnsupportedError for state that zckpt cannot store, MissingFileError,
    FormatError and StorageError."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            names = sorted(os.listdir(path))
        except OSError as error:
            raise from_os_error(error, "list", path) from error
        self.universal = "zero" in names
        """Whether the folder is a Universal Checkpoint."""
        self._layers = {
            (int(match[1]), int(match[2] or 0)): os.path.join(path, match.string)
            for match in filter(None, map(_LAYER.fullmatch, names))
        }
        models = [*filter(None, map(_MODEL.fullmatch, names))]
        if self.universal and len({match[1] is None for match in models}) == 2:
            raise UnsupportedError(
                "this Universal Checkpoint was made by zckpt", file=path,
                hint="give the checkpoint of zckpt that it was made from, of which it has only a part; or load it into "
                "an engine with checkpoint.load_universal, and write that with zckpt.write",
            )  # fmt: skip
        self._models = _by_coordinates(path, _MODEL, names)
        self._optimizers = {} if self.universal else _by_coordinates(path, _OPTIMIZER, names)
        self.partitions_weights = not any(data_rank is None for data_rank, _ in self._models)
        """Whether the folder is of stage 3, in which each rank has its own file of model states."""

    @property
    def has_optimizer_files(self) -> bool:
        """Whether there are files of optimizer states. Every stage except 0 has them."""
        return bool(self._optimizers)

    def check_ranks(self, data_ranks: int, model_ranks: int, nbytes: int) -> None:
        """Raises MissingFileError unless there is a file of each kind for each rank. Raises FormatError if there are
        more files, or if a folder of ``nbytes`` bytes without such files says that the run had very many ranks."""
        ranks = data_ranks * model_ranks
        if not self._optimizers and ranks > RANKS_MIN + nbytes // BYTES_PER_RANK:
            raise FormatError(
                f"it says that the run had {ranks} ranks, far too many for its {nbytes} bytes", file=self.path
            )
        of_ranks: list[tuple[Mapping[tuple[int | None, int], str], str, Sequence[int | None]]]
        of_ranks = [(self._optimizers, "optim_states.pt", range(data_ranks))] if self._optimizers else []
        of_ranks.append((self._models, "model_states.pt", range(data_ranks) if self.partitions_weights else [None]))
        for files, kind, data_numbers in of_ranks:
            for data_rank, model_rank in product(data_numbers, range(model_ranks)):
                if (data_rank, model_rank) not in files:
                    which = str(data_rank) if model_ranks == 1 else f"{model_rank} of model parallelism"
                    if model_ranks > 1 and data_rank is not None:
                        which += f" and {data_rank} of data parallelism"
                    prefix = "" if data_rank is None else f"zero_pp_rank_{data_rank}_"
                    raise MissingFileError(
                        f"the run had {ranks} ranks, and the file of rank {which} is missing",
                        file=os.path.join(self.path, f"{prefix}mp_rank_{model_rank:02d}_{kind}"),
                        hint=ALL_FILES,
                    )  # fmt: skip
            if len(files) > len(data_numbers) * model_ranks:
                raise FormatError(
                    f"the folder has {len(files)} files {kind} and the run had {ranks} ranks: it holds the files of "
                    "two checkpoints", file=self.path, hint=ONE_FOLDER,
                )  # fmt: skip

    def model_path(self, coordinates: Coordinates) -> str:
        """Returns the path of the file with the model states of a rank."""
        return self._models[coordinates.data_rank if self.partitions_weights else None, coordinates.model_rank]

    def optimizer_path(self, coordinates: Coordinates) -> str:
        """Returns the path of the file with the optimizer states of a rank, or of the folder that has them."""
        if self.universal:
            return os.path.join(self.path, "zero")
        return self._optimizers[coordinates] if self._optimizers else self.model_path(coordinates)

    def model(self, coordinates: Coordinates) -> dict[str, Any]:
        """Returns the model states of a rank. Below stage 3 they are the same for all ranks of data parallelism."""
        if not self._models:
            raise MissingFileError(
                "the folder has no file of model states", file=os.path.join(self.path, "mp_rank_00_model_states.pt"),
                hint=AS_WRITTEN,
            )  # fmt: skip
        path = self.model_path(coordinates)
        state = load(path)
        steps = state.get("global_steps") if isinstance(state, dict) else None
        if not isinstance(state, dict) or "module" not in state or type(steps) is not int or not 0 <= steps < 1 << 62:
            raise FormatError("this is not a file of model states of DeepSpeed", file=path, hint=AS_WRITTEN)
        return state

    def zero(self, coordinates: Coordinates) -> dict[str, Any]:
        """Returns what ZeRO's wrapper of the optimizer has saved in the file of optimizer states of a rank."""
        path = self._optimizers[coordinates]
        state = load(path)
        inner = state.get("optimizer_state_dict") if isinstance(state, dict) else None
        if not isinstance(inner, dict):
            raise FormatError("this is not a file of optimizer states of DeepSpeed", file=path, hint=AS_WRITTEN)
        return inner

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers of a pipeline that have files, in their order."""
        return sorted({layer for layer, _ in self._layers})

    def layer_path(self, layer: int, tensor_rank: int) -> str:
        """Returns the path of the file of a layer of a pipeline."""
        path = os.path.join(self.path, f"layer_{layer:02d}-model_states.pt")
        return self._layers.get((layer, tensor_rank), path)

    def layer(self, layer: int, tensor_rank: int) -> dict[str, Any]:
        """Returns what the module of a layer of a pipeline has in its ``state_dict``, by name."""
        made = "copy the files layer_* of the checkpoint that it was made from into it: ds_to_universal.py does not"
        return _expected(self.layer_path(layer, tensor_rank), "a layer", made if self.universal else ALL_FILES)

    def expert_path(self, layer: int, expert: int, model_rank: int) -> str:
        """Returns the path of the file of one expert. ``layer``: the number of its layer among the layers with experts
        that a rank of model parallelism has. ``model_rank``: the number of this rank."""
        return os.path.join(self.path, f"layer_{layer}_expert_{expert}_mp_rank_{model_rank:02d}_model_states.pt")

    def expert(self, layer: int, expert: int, model_rank: int) -> dict[str, Any]:
        """Returns the weights and buffers of one expert by name. The arguments are those of ``expert_path``."""
        return _expected(self.expert_path(layer, expert, model_rank), "an expert")

    def expert_optimizer(self, expert_rank: int, model_rank: int) -> dict[str, Any]:
        """Returns the state of the optimizer of stage 0 of the ranks that have the same experts."""
        path = os.path.join(self.path, f"expp_rank_{expert_rank}_mp_rank_{model_rank:02d}_optim_states.pt")
        state = _expected(path, "the optimizer of an expert").get("optimizer")
        if not isinstance(state, dict):
            raise FormatError("this is not a file of optimizer states of DeepSpeed", file=path, hint=AS_WRITTEN)
        return state

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
            if not is_file_name(name):
                raise FormatError(f"a parameter of the name {name!r} has no file", file=self.path, hint=AS_WRITTEN)
        path = os.path.join(self.path, "zero", *names)
        return load(path) if os.path.exists(path) else None


def _expected(path: str, what: str, hint: str = ALL_FILES) -> dict[str, Any]:
    """Returns the content of a file that the folder has to have. ``what``: what it has, for people. ``hint``: that of
    the error if it is missing."""
    if not os.path.isfile(path):
        raise MissingFileError(f"the file of {what} is missing", file=path, hint=hint)
    state = load(path)
    if not isinstance(state, dict):
        raise FormatError(f"this is not a file of {what} of DeepSpeed", file=path, hint=AS_WRITTEN)
    return state


def of_type(tree: Any, key: str, kind: type) -> Any:
    """Returns the value that ``tree`` has at ``key``. Raises FormatError if there is none, or if it is not of the type
    ``kind``."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get(key), kind):
        raise FormatError(f"{key} is missing, or is not what DeepSpeed puts there")
    return tree[key]


def _by_coordinates(path: str, pattern: re.Pattern[str], names: Iterable[str]) -> dict[tuple[int | None, int], str]:
    """Returns the paths of the files of one kind, by the coordinates of the rank. In those of a file
    that all ranks of data parallelism share, the number among these ranks is None."""
    paths: dict[tuple[int | None, int], str] = {}
    for match in filter(None, map(pattern.fullmatch, names)):
        data, model = match.groups()
        coordinates = None if data is None else int(data), int(model)
        if coordinates in paths or (paths and (None in next(iter(paths))) != (data is None)):
            raise FormatError(
                f"the folder holds the files of two checkpoints: {first_few([*paths.values(), match.string], 2)}",
                file=path, hint=ONE_FOLDER,
            )  # fmt: skip
        paths[coordinates] = os.path.join(path, match.string)
    return paths
