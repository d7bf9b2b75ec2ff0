"""The contract of engines: what writes and restores ask of a training engine.

A new framework is a folder here with a class that has the methods of ``EngineAdapter`` and one with those of
``Restoring``, one line in the table ``zckpt.engines.FRAMEWORKS``, and a test class that derives from
``zckpt.testing.EngineContract``. ``zckpt.testing.adapter`` is the shortest example.

The engine is one object, and its class stands in that table. Where a framework has a model and an optimizer but nothing
that holds both, the adapter's folder also has a class that does, for users to pass to zckpt.

State is divided into *parts*, such as ``master`` and ``exp_avg``: ``zckpt.state.inventory`` says what each of them is,
and what a ``Fragment`` is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Mapping

    import torch
    from torch.distributed import ProcessGroup

    from zckpt.state.inventory import Fragment, Holding, Inventory


class EngineAdapter(Protocol):
    """One live engine on one rank. Ranks are numbered within the engine's own group of ranks (``group_of``).

    ``refuse_unsupported`` comes first. A write calls ``inventory``, ``state``, ``rank_state``, maybe ``before_change``,
    and ``after_write``. A restore chooses from ``wanted`` what fits, and makes a ``Restoring`` of that. Only the
    methods of a ``Restoring`` change the state that the engine holds. Of all methods of both, only ``after_write`` and
    ``Restoring.finish`` are collective: the ranks agree before that each of them has done all the rest, so a rank that
    fails earlier leaves no other one waiting.

    An engine without an optimizer, made to evaluate, holds weights and buffers. It wants the weights as the part
    ``param``; the masters of a checkpoint stand in for them, and what an optimizer would keep is not missed.
    """

    def __init__(self, engine: Any) -> None:
        """Changes nothing, and may not fail."""

    @staticmethod
    def process_group(engine: Any) -> ProcessGroup | None:
        """The process group of the engine's ranks; None if these are all ranks of the job. Never raises."""

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer."""

    @property
    def trees(self) -> tuple[str, ...]:
        """The keys of ``state()``."""

    @property
    def step(self) -> int:
        """Optimizer steps taken (``global_steps``)."""

    @property
    def description(self) -> dict[str, str]:
        """Framework, versions and mode, for people; never read back by a program."""

    @property
    def module(self) -> torch.nn.Module | None:
        """The model, without what the framework has wrapped around it, or None for an engine that has no such object.
        Its parameters and buffers have the names under which ``inventory`` returns them."""

    @property
    def devices(self) -> Collection[torch.device]:
        """The devices that the engine uses; the CPU may be among them.

        A write and a restore first wait for everything queued on these devices. A device from which state is still
        being copied to host memory therefore belongs here too.
        """

    def refuse_unsupported(self, *, drop_gradients: bool = False) -> None:
        """Raises UnsupportedError that names each thing in the engine that could not be saved and restored whole.

        ``drop_gradients``: do not refuse gradients that no optimizer step has used yet. They are not saved, and the
        engine keeps them; a restore drops those of the engine that it restores into.
        """

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the state that the engine has now."""

    def refuse_lazy(self) -> None:
        """Raises UnsupportedError if anything but a step of the optimizer changes the masters and moments that
        ``inventory`` returns: the forward and backward passes between two steps must leave them alone."""

    def inventory(self, parts: Collection[str] | None) -> Inventory:
        """What this rank writes: fragments with ``data``. ``parts=None``: all that a bit-exact resume needs, and so no
        weight that has a master. With ``parts``, all of each: ``param`` then has every weight.

        The fragments of all ranks make up every tensor, without a gap and without any element twice. So of a weight or
        moment that several ranks hold, each returns a share, or one returns all. A buffer may differ from rank to rank:
        each rank returns it whole, its rank as ``copy``, and a write keeps those that differ from rank 0's. Whatever is
        no buffer has copy 0. One rank may return several fragments of a key. No fragment is empty, except that of a
        tensor without elements, which one rank returns.

        Raises ValueError for a part that the engine does not have, naming those it has.
        """

    def memory(self) -> Iterable[Holding]:
        """All memory and all swap files in which this rank holds tensors of the state, and gradients too. Unlike
        ``inventory``, it has what other ranks hold as well, padding, derived weights and buffers that are not
        persistent. Every storage that the engine keeps for a part is there, but not the buffers through which it swaps
        one part after the other. Where one tensor belongs to two parts, the part ``master`` comes first.

        Changes nothing, and is not collective.
        """

    def state(self) -> dict[str, Any]:
        """The non-tensor state, equal on every rank: counters, scheduler, param groups and scalars by parameter name.
        That of rank 0 is written. The tree ``optimizer`` is compared first: a write fails if it differs between ranks.
        The result has all ``trees``. It may have more trees, which no restore reads, such as the settings that the
        framework's own files depend on.

        Trees hold None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, Counter, dense tensors and NumPy
        arrays: of exactly these types, with strings and 64-bit integers for keys. They are read back as the same types,
        with tensors in host memory.

        May share memory with the engine: use it before training goes on.
        """

    def rank_state(self) -> dict[str, Any]:
        """The state of this rank alone: random number generators, and optimizer state that no other rank can use. It
        holds the same types as the trees of ``state``.

        May share memory with the engine, as ``state`` may.
        """

    def after_write(self) -> None:
        """Does to the engine what the framework's own save does to it as a side effect; ZeRO-3's gathers parameters.
        Called when zckpt reads the engine no more, or when an action given to ``before_change`` holds the next step
        back until then. Collective; changes nothing that ``inventory`` has returned."""

    def before_change(self, action: Callable[[], None]) -> None:
        """Has ``action`` called once, by the training's thread, before the engine next changes or moves the memory of
        its fragments: at its next optimizer step. Buffers may change before."""

    def uses(self) -> Iterable[Use]:
        """The calls that read or change what ``memory`` returns: all by which a training loop, an evaluation and the
        framework's own checkpoints do so. What is returned refers to no adapter."""

    def needs_rank_state(self, state: Mapping[str, Any]) -> bool:
        """Whether restoring these trees, which are as in ``Selection``, also needs the writer's ``rank_state``. Raises
        FormatError."""

    def wanted(self, stored: Mapping[str, Mapping[str, torch.dtype]]) -> tuple[Fragment, ...]:
        """The fragments that this rank would fill from a checkpoint with these dtypes by part and name, ``data`` left
        out. What the engine does not have yet (moments) takes the dtype that is stored.

        Holds every tensor that the engine needs, stored or not, so that what is missing shows: of what it trains the
        masters and all of the moments, of all else the weights in the compute dtype, and the buffers. A tensor of which
        this rank holds nothing is there as a fragment of no elements: the keys are the same on every rank.
        """

    def unexpected(self, stored: Mapping[str, Collection[str]]) -> list[str]:
        """The keys among these that the engine has no place for, on any rank."""

    def restoring(self, selection: Selection) -> Restoring:
        """One restore into the engine. Changes nothing."""


class Use(NamedTuple):
    """A method that uses tensors of the state. ``__call__`` is the call of a module, whoever makes it."""

    owner: Any
    method: str
    parts: Collection[str] | None = None
    """The parts that it uses; None: any of them."""
    called: str = ""
    """What errors call it, if that is not the name of the method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What one restore puts into an engine, on one rank."""

    stored: Mapping[str, Collection[str]]
    """The names of the checkpoint's tensors by part: of all parts that may be read, whether they fit or not."""
    wanted: tuple[Fragment, ...]
    """Those of ``EngineAdapter.wanted`` that are filled: from the checkpoint or, for moments that it has not, with
    zeros."""
    restored: Collection[str]
    """The keys of ``wanted`` that the checkpoint fills."""
    kept: Collection[str]
    """The names of the parameters whose weights and moments stay as they are. The step that counts for them stays too,
    unless it also counts for a parameter that is restored."""
    state: Mapping[str, Any]
    """Those of ``EngineAdapter.trees`` that are to be restored. One that the checkpoint does not have is None: a
    problem, unless the engine can keep its own."""
    rank_state: Mapping[str, Any] | None
    """This rank's; None if the writer had another number of ranks or nothing needs it. For each tensor and array it has
    a function without arguments that reads and returns it."""
    rng: bool
    """Whether random generators are restored too. Otherwise they are left alone."""


class Restoring(Protocol):
    """One restore of a ``Selection`` into one engine, made by its adapter. The order of calls is that of the methods,
    each once. From ``fill`` on they change what the engine holds."""

    def problems(self) -> list[str]:
        """What keeps the state from being restored along with the tensors, one line each; changes nothing. Nothing else
        may be called where there is any. Raises FormatError for a tree that ``EngineAdapter.state`` did not make.
        """

    def fill(self) -> Generator[tuple[Fragment, ...], None, None]:
        """Yields all that is wanted in batches, with ``data``: memory to be filled before the next batch is asked for.

        What lives in memory is one batch, made where it does not exist yet (moments); what lives on a disk is brought
        in and written back batch by batch. Each rank has its own number of batches: nothing in here is collective.
        Ended early (``close``), it gives up the memory of its last batch and leaves the disk as it was.
        """

    def set_state(self) -> None:
        """Sets counters, groups, scheduler and hidden state, and derives all that this rank can derive alone. To be
        called once the memory is filled. Not collective. Raises FormatError for trees that ``EngineAdapter.state`` and
        ``rank_state`` did not make.
        """

    def finish(self) -> None:
        """Makes whole what every rank has a replica of, and derives low-precision weights from masters of other ranks.
        To be called once ``set_state`` has returned on every rank. Collective: what could fail on one rank alone is in
        ``set_state``, or comes after the last exchange.
        """
