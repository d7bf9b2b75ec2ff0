"""Turns what an optimizer keeps, apart from weights and moments, into a plain tree keyed by parameter names, and back.

    {"class": "FusedAdam",
     "param_groups": [{"params": ["a.weight", ...], "lr": 0.001, "betas": (0.9, 0.999), ...}, ...],
     "states": [{"params": ["a.weight", ...], "moments": ["exp_avg", "exp_avg_sq"], "values": {"step": 5}}, ...]}

The groups are in the order of the optimizer. ``states`` has one entry for all parameters that have equal values. A
parameter without any state is in no entry. Because the tree uses names, it does not depend on the world size, the
sub-groups or the stage. The class is None if the tree was made from files that do not name the optimizer's class. Such
a tree fits every optimizer.

Values that are bound to a flat buffer (see flats.py) cannot be shared between parameters. If the flat buffer is one
whole parameter that is equal on every rank, they are among the ``values`` of that parameter. Otherwise they are in the
tree of their rank, and ``"bound": ["factors"]`` in the entry of ``states`` names them:

    [{"params": ["a.weight", ...], "geometry": {...}, "values": {"factors": <tensor>}}, ...]

For the classes in ``INTERCHANGEABLE``, ``"decoupled_weight_decay": True`` says whether the optimizer subtracts the
weight decay from the weights, as AdamW does, or adds it to the gradients. It is missing if there is no weight decay.

``"joined": True`` says that the tree was joined of those of ranks with different parameters.

Muon leaves some parameters to another optimizer inside it, whose class is in ``"inner_class": "FusedAdam"``.

A numpy scalar is kept as the number of Python that equals it. If it has fewer than 64 bits, arithmetic with it is less
precise than with that number, so ``"numpy": [[0, "lr", "float32"], ...]`` has the index of the group, the key and the
dtype. For a list or tuple, it has a list of the dtypes of the items, and null for items of other types.
"""

from __future__ import annotations

from zckpt.adapters.optimizer.capture import capture, capture_bound, joined
from zckpt.adapters.optimizer.classes import COUNTING_TOGETHER, DEEPSPEED_CLASSES, class_name, counts_together, inner
from zckpt.adapters.optimizer.restoring import OptimizerRestoring
from zckpt.adapters.optimizer.saved import Saved

__all__ = [
    "COUNTING_TOGETHER", "DEEPSPEED_CLASSES", "OptimizerRestoring", "Saved", "capture", "capture_bound", "class_name",
    "counts_together", "inner", "joined",
]  # fmt: skip
