"""The layers of a ``PipelineModule``, of which each stage of a pipeline has some.

The name of a parameter begins with the number of its layer among all layers of the model, so it does not depend on the
stages. A module that several layers share (``TiedLayerSpec``) has names that begin with ``tied_modules``. Each stage
that uses it has a copy. DeepSpeed sums the gradients of those of its parameters that ``tied_weight_attr`` names, so
these are equal on all of these stages. This file has all code that uses attributes of ``PipelineModule``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.adapters.deepspeed.classes import is_a

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TIED = "tied_modules."


class PipelineStage:
    """The layers that this rank has. ``module``: the ``PipelineModule``, or any other module, which has no stages."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.divided = is_a(module, "PipelineModule") and module._local_stop - module._local_start < module._num_layers
        """Whether other ranks have other layers."""
        self.count = int(module.num_stages) if is_a(module, "PipelineModule") else 1
        """The number of stages."""

    def has_elsewhere(self, name: str) -> bool:
        """Returns whether a tensor of a checkpoint belongs to a layer that only other stages have."""
        if not self.divided:
            return False
        module, (layer, *rest) = self._module, name.split(".")
        if name.startswith(TIED):
            keys = {getattr(spec, "key", None) for spec in module._layer_specs}
            return rest[0] in keys and rest[0] not in module.tied_modules
        number = int(layer) if layer.isdecimal() else -1
        return 0 <= number < module._num_layers and not module._local_start <= number < module._local_stop

    def tied(self, name: str) -> str:
        """Returns the key of the shared module to which a parameter belongs, if other stages have a copy of it, and
        otherwise an empty text."""
        key = name.removeprefix(TIED).partition(".")[0] if name.startswith(TIED) else ""
        comms = self._module.tied_comms if self.divided else {}
        return key if key in comms and len(comms[key]["ranks"]) > 1 else ""

    def unsupported(self, parameters: Mapping[str, Any]) -> Iterator[str]:
        """Yields a phrase for an error if other stages have a parameter under the same name with other values."""
        for name in parameters if self.divided else ():
            key = self.tied(name)
            if not name.startswith(TIED) and not name.partition(".")[0].isdecimal():
                yield f"{name}, which belongs to no layer, so that each pipeline stage has its own"
                return
            if key and name.removeprefix(f"{TIED}{key}.") not in self._module.tied_comms[key]["weight_attr"]:
                yield (
                    f"{name}, which is not in tied_weight_attr, so that its copies on other pipeline stages have other "
                    "values"
                )
                return
