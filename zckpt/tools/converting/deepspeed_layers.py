"""The files of the layers of a ``PipelineModule``. In a file, the names begin inside of the layer:

layer_LL-model_states.pt            the weights and buffers of layer LL of the whole model
layer_LL-model_TT-model_states.pt   the same for tensor-parallel rank TT

The file of a layer that shares its module with other layers (``TiedLayerSpec``) has the weights of this module. No file
tells the name of a shared module, but the files of model states have the names of all trained parameters and buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.adapters.deepspeed.pipeline_stage import TIED
from zckpt.engines.tensors import plain_name
from zckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from zckpt.tools.converting.deepspeed_folder import DeepSpeedFolder


class PipelineLayers:
    """The layers of a pipeline. ``names``: for each stage, the names of its trained parameters and of its buffers.
    ``tensor_ranks``: the number of tensor-parallel ranks in a stage."""

    def __init__(self, folder: DeepSpeedFolder, names: Sequence[Collection[str]], tensor_ranks: int) -> None:
        self._folder, self._names, self._tensor_ranks = folder, names, tensor_ranks
        self._stages: dict[int, int] = {}
        """The stage of each layer that has a module of its own."""
        for stage, of_stage in enumerate(names):
            for name in of_stage:
                number = name.partition(".")[0]
                if number.isdecimal():
                    self._stages[int(number)] = stage
                elif not name.startswith(TIED):
                    raise UnsupportedError("it belongs to no layer of the pipeline", key=name)
        shared = {key: inside for of_stage in names for key, inside in _shared(of_stage).items()}
        self._shared: dict[str, int] = {}
        """The first layer with a file of each shared module, by the key of the module."""
        stage = 0
        for layer in folder.layers:
            if layer not in self._stages:
                inside = {plain_name(name) for name in folder.layer(layer, 0)}
                keys = [key for key, own in shared.items() if own <= inside]
                if len(keys) > 1:
                    raise UnsupportedError(
                        f"the folder does not tell which of the shared modules {', '.join(keys)} layer {layer} has",
                        file=folder.layer_path(layer, 0),
                    )
                if keys:
                    self._shared.setdefault(keys[0], layer)
                else:  # It has only frozen weights, so it does not matter which stage has it.
                    self._stages[layer] = stage
            stage = self._stages.get(layer, stage)

    def tensors(self, model_rank: int) -> dict[str, Any]:
        """Returns the weights and buffers that a rank of model parallelism has, by name."""
        stage, tensor_rank = divmod(model_rank, self._tensor_ranks)
        prefixes = {f"{TIED}{key}.": self._shared[key] for key in _shared(self._names[stage]) if key in self._shared}
        prefixes |= {f"{layer}.": layer for layer, owner in sorted(self._stages.items()) if owner == stage}
        return {
            prefix + plain_name(name): value
            for prefix, layer in prefixes.items()
            for name, value in self._folder.layer(layer, tensor_rank).items()
        }


def _shared(names: Iterable[str]) -> dict[str, set[str]]:
    """Returns the keys of the shared modules, and for each of them the names inside of it."""
    shared: dict[str, set[str]] = {}
    for name in names:
        if name.startswith(TIED):
            key, _, inside = name.removeprefix(TIED).partition(".")
            shared.setdefault(key, set()).add(inside)
    return shared
