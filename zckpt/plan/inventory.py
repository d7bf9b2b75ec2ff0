"""The state that one rank holds: fragments of tensors, and where their bytes are."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

from zckpt.format.names import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from zckpt.geometry import Span

MASTER, PARAM, BUFFER, STATE = "master", "param", "buffer", "state"
"""The parts that zckpt knows by name. ``master`` has the weights that the optimizer updates, even if the engine has no
other weights, as in fp32. ``param`` has all weights as the model computes with them. Those that have a master are
derived from it. ``buffer`` has the persistent buffers of the module, and the tensors that its modules add to their
``state_dict`` by themselves. ``state`` has the trees of non-tensor state and the arrays in them. It is not listed among
a model's tensors, and no adapter returns it.

Every other part is a *moment*: a value that an optimizer keeps in the shape of the weights. Its name is torch's name.
"""
RESERVED_PARTS = frozenset({MASTER, PARAM, BUFFER, STATE})
WEIGHT_PARTS = frozenset({MASTER, PARAM, BUFFER})
ANY_TIME = frozenset({PARAM, BUFFER, STATE})
"""The parts that may change between two steps of the optimizer, because the model's own forward pass changes tensors
that are not trained."""
EXTRA_STATE = "extra_state"
"""The tree in the state of an engine with the names of those buffers that modules add to their ``state_dict`` by
themselves, in a list. No restore reads it. It is missing if there are none."""
GRADIENT = "gradient"
"""The part of gradients between a backward pass and the step that uses them, and of the buffers in which they are
reduced. An engine holds them in memory, but no checkpoint has them."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """The bytes ``[offset, offset + nbytes)`` of a file that holds state on disk while it is not in use, such as a swap
    file."""

    path: str
    offset: int
    nbytes: int

    def narrow(self, start: int, nbytes: int) -> FileRange:
        """Returns the range of ``nbytes`` bytes from byte ``start`` of this range on."""
        return FileRange(self.path, self.offset + start, nbytes)


class Fragment(NamedTuple):
    """A span of the elements of one tensor, as one rank holds them.

    ``data`` has the bytes: a contiguous tensor of ``span.numel`` elements that shares memory with the state itself, or
    a range of a swap file. Only tensors of trees that do not lie in order are copies. It is None if only the other
    fields are needed. ``copy`` numbers the values of a tensor that differs from rank to rank, such as a buffer. Ranks
    that have no value of their own read copy 0. ``transfer.memory.check_fragments`` checks ``data`` before its memory
    is read or written.
    """

    part: str
    name: str
    dtype: str
    """The name of the dtype in safetensors, such as F32 or BF16."""
    span: Span
    tier: Tier = Tier.DEVICE
    copy: int = 0
    data: torch.Tensor | FileRange | None = None
    replicated: str = ""
    """The label of the set of replicas to which this fragment belongs, or an empty text if no other rank holds any of
    its elements. ``plan.replicas`` describes such sets."""

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.span.grid.shape


@dataclass(frozen=True, slots=True)
class Inventory:
    """All fragments that one rank writes or reads.

    ``fragments`` are ordered by part, and within a part by their place in memory. This is also their order in the
    files. ``aliases`` maps the other names of tied weights to the name under which the tensor is stored.
    """

    fragments: tuple[Fragment, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra: frozenset[str] = frozenset()
    """The names of those buffers that modules add to their ``state_dict`` by themselves, such as the scales of
    quantized weights. See ``unconverted``."""
    unsaved: tuple[str, ...] = ()
    """A phrase for each thing that modules add to their ``state_dict`` and no checkpoint can hold, so it is left
    out."""


def unconverted(extra: Iterable[str]) -> frozenset[str]:
    """Returns the names of the tensors whose dtype must not be changed if a model has this extra state: that state
    itself, and quantized weights. The state that belongs to a weight ``w`` has names such as ``w.absmax``."""
    paths = (accumulate(name.split("."), lambda path, component: f"{path}.{component}") for name in extra)
    return frozenset(chain.from_iterable(paths))


class Holding(NamedTuple):
    """A place in memory or in a swap file in which an engine holds values of one part of its state, on one rank."""

    part: str
    """The name of the part: ``master``, ``exp_avg``, ``param``, ``buffer``, ``gradient`` or another one."""
    name: str
    """The name for errors: that of the parameter or buffer, that of the first one if there are several, or the
    framework's name of the memory."""
    data: torch.Tensor | FileRange
    """A dense tensor of any shape that has elements, or a range of a swap file. A tensor may be a view, and several
    holdings may share a storage."""
    dtype: torch.dtype
    workspace: bool = False
    """Whether the values in this memory are not needed now, because the engine uses the memory only while it
    computes."""
    in_tree: bool = False
    """Whether a checkpoint has these values in a tree of state. They are not moved to disk, because a write needs the
    values of trees in memory."""
