"""The settings of an engine on which DeepSpeed's own files depend, as a plain tree. No restore reads this tree. It is
for ``zckpt.convert``, which makes DeepSpeed's files from a checkpoint, and a checkpoint from such files. An example:

    {"stage": 3, "dtype": "bfloat16", "grad_accum_dtype": "bfloat16", "gradient_clipping": 1.0,
     "sub_group_size": 1000000000, "round_robin_gradients": False, "parameter_alignment": False, "cpu_offload": False,
     "other_dtypes": {"norm.weight": "float32"}, "groups": None, "divided": False,
     "own_names": {}}
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from zckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""For each name of a dtype in DeepSpeed's configuration, torch's name of this dtype."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of an engine. DeepSpeed's documentation of its configuration describes each of them."""

    stage: int
    """The ZeRO stage, from 0 to 3."""
    dtype: str
    """Torch's name of the dtype that the model computes with, such as ``"bfloat16"``."""
    grad_accum_dtype: str
    """Torch's name of the dtype in which gradients are accumulated."""
    gradient_clipping: float = 0.0
    """The norm to which gradients are clipped. 0 means that they are not clipped."""
    sub_group_size: int = 1_000_000_000
    """The setting ``sub_group_size`` of stage 3. A sub-group is full once a rank has this number of elements of it, or
    more."""
    round_robin_gradients: bool = False
    """Whether stages 1 and 2 reorder the parameters of each group, so that they are given to the ranks in turn."""
    parameter_alignment: bool = False
    """Whether stages 1 and 2 put padding between parameters, so that each of them begins at an aligned offset."""
    cpu_offload: bool = False
    """Whether the optimizer is offloaded to host memory."""
    other_dtypes: Mapping[str, str] = field(default_factory=dict)
    """The dtypes of those parameters whose dtype is not that of the model: torch's name of the dtype, by the name of
    the parameter."""
    groups: list[list[str]] | None = None
    """The names of all parameters of each param group, including frozen ones. It is None unless the optimizer may have
    frozen parameters in its groups. That is possible only at stage 0 without separate master weights."""

    divided: bool = False
    """Whether the engine had layers of AutoEP, or experts or pipeline stages on several ranks. Then the names above are
    those of rank 0."""
    own_names: Mapping[str, list[str]] = field(default_factory=dict)
    """What ``AutoExperts.own_names`` is for the engine."""

    @property
    def bf16_optimizer(self) -> bool:
        """Whether DeepSpeed's wrapper of the optimizer is ``BF16_Optimizer``, which neither reorders nor aligns
        parameters."""
        mixed = (self.dtype, self.grad_accum_dtype) == ("bfloat16", "float32")
        return self.stage == 1 and mixed and not self.cpu_offload

    @property
    def reorders(self) -> bool:
        """Whether DeepSpeed keeps the parameters of a group in another order than that in which the optimizer was given
        them. The optimizer's tree in a checkpoint has them in the order in which DeepSpeed keeps them."""
        return self.stage in (1, 2) and self.round_robin_gradients and not self.bf16_optimizer

    @property
    def aligns(self) -> bool:
        """Whether there is padding between parameters."""
        return self.stage in (1, 2) and self.parameter_alignment and not self.bf16_optimizer

    def tree(self) -> dict[str, Any]:
        """Returns the settings as a plain tree."""
        return asdict(self)

    @classmethod
    def of(cls, tree: object) -> Setup:
        """Returns the settings that ``tree`` returned. Entries that a newer version of zckpt has added are ignored.
        Raises FormatError for anything that is not such a tree."""
        field_names = {setting.name for setting in fields(cls)}
        try:
            setup = cls(**{key: value for key, value in tree.items() if key in field_names})  # type: ignore[attr-defined]
            numbers = (setup.stage, setup.sub_group_size)
            dtypes = (setup.dtype, setup.grad_accum_dtype, *setup.other_dtypes.values())
            groups = [*(setup.groups or []), *setup.own_names.values()]
        except (AttributeError, TypeError) as error:
            raise FormatError(f"state: deepspeed is not the settings of an engine: {error}") from error
        valid = all(type(number) is int and number >= 0 for number in numbers) and setup.stage <= 3
        valid = valid and {setup.dtype, setup.grad_accum_dtype} <= set(DTYPES.values())
        all_text = all(isinstance(name, str) for name in (*dtypes, *(name for group in groups for name in group)))
        if not valid or not all_text or not isinstance(setup.gradient_clipping, (int, float)):
            raise FormatError("state: deepspeed is not the settings of an engine")
        return setup


def parallelism(**ranks: int) -> dict[str, str]:
    """Returns the entry of ``EngineAdapter.description`` that says over how many ranks a model is divided in each way,
    such as ``tensor=2``, or no entry if it is not divided."""
    told = ", ".join(f"{way} {size}" for way, size in ranks.items() if size > 1)
    return {"parallelism": told} if told else {}
