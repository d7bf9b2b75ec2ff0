"""The settings of an engine on which DeepSpeed's own files depend, as a plain tree. No restore needs it: it is for
those who write such files from a checkpoint, or a checkpoint from such files.

    {"stage": 3, "dtype": "bfloat16", "grad_accum_dtype": "bfloat16", "gradient_clipping": 1.0,
     "sub_group_size": 1000000000, "round_robin_gradients": False, "parameter_alignment": False, "cpu_offload": False,
     "other_dtypes": {"norm.weight": "float32"}, "groups": None}
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from zckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@dataclass(frozen=True, slots=True)
class Setup:
    """What each setting means says DeepSpeed's documentation of its configuration."""

    stage: int
    dtype: str
    """In which the model computes: torch's name."""
    grad_accum_dtype: str
    gradient_clipping: float = 0.0
    sub_group_size: int = 1_000_000_000
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    cpu_offload: bool = False
    """Whether the optimizer is offloaded."""
    other_dtypes: Mapping[str, str] = field(default_factory=dict)
    """Those of the parameters that have another dtype than the model."""
    groups: list[list[str]] | None = None
    """The names of all parameters of each param group, where frozen ones stand in the optimizer too: at stage 0 without
    master weights."""

    @property
    def bf16_optimizer(self) -> bool:
        """Whether DeepSpeed's wrapper is ``BF16_Optimizer``, which neither reorders nor aligns parameters."""
        mixed = (self.dtype, self.grad_accum_dtype) == ("bfloat16", "float32")
        return self.stage == 1 and mixed and not self.cpu_offload

    @property
    def reorders(self) -> bool:
        """Whether the parameters of a group are kept in another order than the optimizer was given them in. The
        optimizer's tree of a checkpoint has the order in which they are kept."""
        return self.stage in (1, 2) and self.round_robin_gradients and not self.bf16_optimizer

    @property
    def aligns(self) -> bool:
        """Whether there is padding between parameters."""
        return self.stage in (1, 2) and self.parameter_alignment and not self.bf16_optimizer

    def tree(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, tree: object) -> Setup:
        """Raises FormatError for what ``tree`` did not make. What a newer writer has added is left aside."""
        known = {one.name for one in fields(cls)}
        try:
            setup = cls(**{key: value for key, value in tree.items() if key in known})  # type: ignore[attr-defined]
            whole = (setup.stage, setup.sub_group_size)
            dtypes = (setup.dtype, setup.grad_accum_dtype, *setup.other_dtypes.values())
            groups = setup.groups or []
        except (AttributeError, TypeError) as error:
            raise FormatError(f"state: deepspeed is not the settings of an engine: {error}") from error
        sound = all(type(number) is int and number >= 0 for number in whole) and setup.stage <= 3
        named = all(isinstance(name, str) for name in (*dtypes, *(name for group in groups for name in group)))
        if not sound or not named or not isinstance(setup.gradient_clipping, (int, float)):
            raise FormatError("state: deepspeed is not the settings of an engine")
        return setup


def setup_of(engine: Any, parameters: Mapping[str, torch.nn.Parameter], groups: list[list[str]] | None) -> Setup:
    """The settings of a live engine. ``groups``: as in Setup."""
    zero = engine._config.zero_config
    dtype, grad_accum_dtype = engine.get_data_types()
    return Setup(
        stage=int(engine.zero_optimization_stage()),
        dtype=_name(dtype),
        grad_accum_dtype=_name(grad_accum_dtype),
        gradient_clipping=float(engine.gradient_clipping()),
        sub_group_size=int(zero.sub_group_size),
        round_robin_gradients=bool(zero.round_robin_gradients),
        parameter_alignment=bool(getattr(zero, "parameter_alignment", False)),  # since DeepSpeed 0.19
        cpu_offload=bool(engine.zero_cpu_offload()),
        other_dtypes={name: _name(p.dtype) for name, p in parameters.items() if p.dtype != dtype},
        groups=groups,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
