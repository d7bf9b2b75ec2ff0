"""The contract of engines: what writes and restores ask of a training engine.

``docs/architecture.md`` says what a new framework needs, and ``zckpt.testing.adapter`` is the shortest example. An
engine is one object, whose class the table ``zckpt.engines.FRAMEWORKS`` names. If a framework has a model and an
optimizer but no object that holds both, the adapter's folder also has a class that holds them, as ``zckpt.TrainState``
does.

The state is divided into *parts*, such as ``master`` and ``exp_avg``. ``zckpt.plan.inventory`` describes each part,
and what a ``Fragment`` is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from zckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence

    import torch
    from torch.distributed import ProcessGroup

    from zckpt.plan.inventory import Fragment, Holding, Inventory


_LEFT_OUT = "left out by zckpt"


def left_out(reason: str) -> dict[str, str]:
    """Returns what trees of an engine have in the place of a value that could not be saved. ``reason``: why."""
    return {_LEFT_OUT: reason}


def is_left_out(value: object) -> bool:
    """Returns whether a value of a tree is one that ``left_out`` has returned."""
    return isinstance(value, dict) and value.keys() == {_LEFT_OUT}


def without_left_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a map of a tree without the values that could not be saved."""
    return {key: value for key, value in values.items() if not is_left_out(value)}


class StateAdapter(ABC):
    """Reads one live state on one rank, for a write. Ranks are numbered within the state's own group of ranks
    (``group_of``).

    ``refuse_unsupported`` is called first. A write then calls ``inventory``, ``state``, ``rank_state``, in some cases
    ``before_change``, and last ``after_write``. Only ``after_write`` is collective. Before it, the ranks agree that
    every rank has done all that comes before it, so a rank that fails earlier leaves no other rank waiting.

    A state that is only written, such as a state dict, has no more than this half of an ``EngineAdapter``.
    """

    if_replicas_differ = (
        "training keeps them equal: look for a rank that has loaded other weights, or does not take part in the "
        "exchange of gradients"
    )
    """The hint of the error if several ranks hold a tensor that should be the same on them, and is not."""

    def __init__(self, engine: Any) -> None:
        """Changes nothing, and must not fail."""
        self.engine = engine

    @staticmethod
    def process_group(engine: Any) -> ProcessGroup | None:
        """Returns the process group of the engine's ranks, or None if these are all ranks of the job. This never raises
        an error."""
        return None

    @property
    @abstractmethod
    def trains(self) -> bool:
        """Whether the engine has an optimizer."""

    @property
    @abstractmethod
    def step(self) -> int:
        """The number of optimizer steps that the engine has taken (DeepSpeed's ``global_steps``)."""

    def set_step(self, step: int) -> None:
        """Sets the number of steps, if the framework lets its user count them. Raises TypeError otherwise."""
        raise TypeError(f"step is for a zckpt.TrainState: a {type(self.engine).__name__} counts its steps itself")

    @property
    @abstractmethod
    def description(self) -> dict[str, str]:
        """The framework, its versions and its mode, as text for people. No program reads this back."""

    @property
    def module(self) -> torch.nn.Module | None:
        """The model without the wrappers that the framework has put around it, or None if the engine has no such
        object. ``inventory`` returns its parameters and buffers under the names that they have there."""
        return None

    @property
    def peft_configs(self) -> dict[str, str]:
        """The configuration of each adapter of a PEFT model, by the adapter's name, as the text of its file
        ``adapter_config.json``. It is empty if the model has none. Raises StateError for a configuration that JSON
        cannot represent."""
        return {}

    @property
    @abstractmethod
    def devices(self) -> Collection[torch.device]:
        """The devices that the engine uses. The CPU may be one of them.

        A write and a restore first wait for all work that is queued on these devices. So a device from which state is
        still being copied to host memory is one of them too.
        """

    @abstractmethod
    def refuse_unsupported(self, *, drop_gradients: bool = False, leave_out: bool = False) -> None:
        """Raises UnsupportedError if zckpt could not save and restore everything in the engine. The error names each
        thing that would be lost.

        ``drop_gradients``: gradients that no optimizer step has used yet are not refused. They are not saved, and the
        engine keeps them. A restore drops such gradients of the engine that it restores into.

        ``leave_out``: what modules add to their ``state_dict`` by themselves, and what cannot be saved, is not refused.
        It is left out, and a restore leaves it as it is.
        """

    @property
    def names_differ(self) -> bool:
        """Whether some ranks hold tensors of which other ranks have no elements and do not know the names, such as the
        layers of other pipeline stages. It is the same on every rank. A write then joins the tree ``optimizer``, whose
        param groups must have the same settings on every rank, and the aliases and extra state of all ranks."""
        return False

    @staticmethod
    def joined_optimizer(trees: Sequence[dict[str, Any]], *, leave_out: bool) -> dict[str, Any]:
        """Returns the tree ``optimizer`` of the whole engine, made of those of all ranks. It is called only if
        ``names_differ``. If ranks have different values of the same thing, this raises StateError, or takes those of
        the first of these ranks if ``leave_out``."""
        raise NotImplementedError

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The names of the parts of the state that the engine has now."""

    def refuse_lazy(self) -> None:
        """Raises UnsupportedError unless the master weights and moments that ``inventory`` returns change only in a
        step of the optimizer, before which ``before_change`` calls its action. Forward and backward passes between two
        steps must not change them."""
        raise UnsupportedError("snapshot='lazy': zckpt does not know when this engine changes its state")

    @abstractmethod
    def inventory(self, parts: Collection[str] | None) -> Inventory:
        """Returns the fragments that this rank writes, with ``data``. With ``parts=None``, these are all that a
        bit-exact resume needs, so a weight that has a master weight is not among them. Otherwise they are everything in
        the named parts; then ``param`` has every weight.

        Together, the fragments of all ranks cover every tensor without a gap, and no element twice, except that several
        ranks may return the same fragment with a label in ``replicated``. Then a write compares the values of these
        ranks, and each of them writes a share (see ``plan.replicas``). A buffer may differ from rank to rank: each rank
        returns all of it with its own rank as ``copy``, and a write keeps the copies that differ from that of the first
        rank that has the buffer, which is rank 0 unless ``names_differ``.
        Tensors that modules add to their ``state_dict`` by themselves are buffers too. All fragments that are not of
        buffers have copy 0. One rank may return several fragments with the same key. No fragment is empty, except that
        one rank returns an empty fragment for a tensor without elements.

        Raises ValueError for a part that the engine does not have. The error names the parts that it has.
        """

    def sample(self) -> Mapping[str, bytes]:
        """Returns some bytes, each under the name of a weight or an empty name. All ranks of this engine that return
        the same name return the same bytes for it. Engines of one job differ in them, as far as that can be told at
        little cost, such as from some elements of a weight. Where replicas are not compared otherwise (see
        ``inventory``), the bytes are a digest of the whole weight. The result is empty if nothing can be told, such as
        while the weights are on disk. A write compares the bytes, because ranks that write different engines would
        commit a mixture of both. Changes nothing."""
        return {}

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns the non-tensor state as trees: counters, the scheduler, param groups, and scalars by parameter name.
        Those of rank 0 are written, and those of other ranks may be incomplete. Only the tree ``optimizer`` has to be
        equal on every rank: a write compares it, or joins the trees of all ranks if ``names_differ``. The result has
        all trees that ``trees`` names. It may have more, which no restore reads, such as the settings that the
        framework's own files depend on.

        Trees contain None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, Counter, dense tensors and
        NumPy arrays, of exactly these types. Keys are strings or 64-bit integers. The trees are read back with the same
        types, and with tensors in host memory.

        A save may leave out entries of maps that it cannot keep, instead of failing. Then the tree that is read back
        has what ``left_out`` returns in their place, and the engine has to keep its own values.

        The trees may share memory with the engine, so use them before training continues.
        """

    def rank_state(self) -> dict[str, Any]:
        """Returns the state of this rank alone: the random number generators, and optimizer state that no other rank
        can use. It contains the same types as the trees of ``state``, and may share memory with the engine as they do.
        """
        return {}

    def after_write(self) -> None:  # noqa: B027  most engines have nothing to do here
        """Does to the engine what the framework's own save does to it as a side effect. For example, a save of ZeRO-3
        gathers parameters. This is called when zckpt has read the engine. It is called earlier if an action that was
        passed to ``before_change`` will hold back the next step until zckpt has read the engine. Collective. Changes
        nothing that ``inventory`` has returned."""

    def before_change(self, action: Callable[[], None]) -> None:  # noqa: B027  an engine without lazy snapshots
        """Arranges that the thread of the training calls ``action`` once, before the engine next changes or moves the
        memory of its fragments. This is at its next optimizer step. Buffers may change earlier. Without a method of its
        own, the adapter never calls it."""


class EngineAdapter(StateAdapter):
    """Reads and restores one live engine on one rank.

    A restore calls ``refuse_unsupported`` first. It chooses from the fragments of ``wanted`` those that fit, and calls
    ``restoring`` with this selection. Only the methods of the ``Restoring`` change the state that the engine holds, and
    only ``Restoring.finish`` is collective. Before it, the ranks agree as before ``after_write``.

    An engine that has no optimizer, because it only evaluates, holds weights and buffers. Its ``wanted`` has the
    weights as the part ``param``. They are filled from the master weights if the checkpoint has those, and the state of
    an optimizer does not count as missing.

    An adapter derives from this class. It has to have the abstract methods. The others are for what not every engine
    has or needs: a process group of its own, state of each rank, lazy snapshots, ``zckpt.where`` and ``zckpt.offload``.
    """

    @property
    @abstractmethod
    def trees(self) -> tuple[str, ...]:
        """The keys of the dict that ``state()`` returns, except those that no restore reads."""

    def memory(self) -> Iterable[Holding]:
        """Returns all memory and all swap files in which this rank holds tensors of the state, or gradients. In
        contrast to ``inventory``, this includes values that other ranks hold as well, padding, weights that are derived
        from master weights, and buffers that are not persistent. It includes every storage that the engine keeps for a
        part, but not the buffers through which the engine swaps one part after the other. If one tensor belongs to two
        parts of which one is ``master``, the holding of the part ``master`` comes first. Changes nothing, and is not
        collective."""
        return ()

    def uses(self) -> Iterable[UsingMethod]:
        """Returns the calls that read or change the memory that ``memory`` returns: all calls by which a training loop,
        an evaluation or the framework's own checkpoints do so. The result holds no reference to the adapter."""
        return ()

    def needs_rank_state(self, state: Mapping[str, Any]) -> bool:
        """Returns whether a restore of these trees also needs the ``rank_state`` that the writer saved. ``state``: as
        in ``Selection``. Raises FormatError."""
        return False

    @abstractmethod
    def wanted(self, stored: Mapping[str, Mapping[str, Stored]]) -> tuple[Fragment, ...]:
        """Returns the fragments that this rank fills in a restore, without ``data``. ``stored``: for each part of the
        checkpoint its tensors by name. A moment that the engine does not have yet gets the dtype that is stored, and a
        tensor that a module adds to its ``state_dict`` by itself gets the dtype and shape that are stored.

        The result has every tensor that the engine needs, whether the checkpoint has it or not, so that missing tensors
        are noticed. For parameters that are trained these are the master weights and all of the moments; for all other
        parameters, the weights in the dtype that the model computes with; and the buffers. If this rank holds no
        elements of a tensor, the result has a fragment without elements for it, so the keys are the same on every rank,
        unless ``names_differ``.
        """

    @abstractmethod
    def unexpected(self, stored: Mapping[str, Collection[str]]) -> list[str]:
        """Returns the keys for which the engine has no place on any rank. ``stored``: the names of the checkpoint's
        tensors by part."""

    @abstractmethod
    def restoring(self, selection: Selection) -> Restoring:
        """Returns an object that carries out one restore into the engine. This call changes nothing."""


class Stored(Protocol):
    """A tensor of a checkpoint, as far as an engine has to know it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class UsingMethod(NamedTuple):
    """A method that uses tensors of the state."""

    owner: Any
    method: str
    """The name of the method. ``__call__`` stands for every call of a module, whoever makes it."""
    parts: Collection[str] | None = None
    """The parts that the method uses. None means that it may use any part."""
    called: str = ""
    """The name of the method in error messages. An empty text means that it is the same as ``method``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What one restore puts into an engine, on one rank."""

    stored: Mapping[str, Collection[str]]
    """The names of the checkpoint's tensors by part, for all parts that may be read, whether they fit the engine or
    not."""
    wanted: tuple[Fragment, ...]
    """Those fragments of ``EngineAdapter.wanted`` that are filled. A moment that the checkpoint does not have is filled
    with zeros, all other fragments are filled from the checkpoint."""
    restored: Mapping[str, Collection[str]]
    """The names of those tensors in ``wanted`` that are filled from the checkpoint, by part."""
    kept: Collection[str]
    """The names of the parameters whose weights and moments stay as they are. The step that counts for such a parameter
    stays too, unless it also counts for a parameter that is restored."""
    state: Mapping[str, Any]
    """Those trees of ``EngineAdapter.trees`` that are restored. A tree that the checkpoint does not have is None; this
    is a problem, unless the engine can keep its own values."""
    rank_state: Mapping[str, Any] | None
    """The tree that this rank saved. It is None if another number of ranks wrote the checkpoint, or if nothing needs
    the tree. In the place of each tensor and array, the tree has a function without arguments that reads and returns
    it."""
    rng: bool
    """Whether the random number generators are restored too. If not, they are not changed."""
    strict: bool = True
    """Whether it is a problem if only a part of a tree fits the engine. If not, the engine keeps the rest of its own
    values."""
    keeps_settings: bool = False
    """Whether the engine keeps its own settings: those of its optimizer, such as the learning rate and the weight
    decay, and those of its scheduler. Values that are counted while the engine trains are no settings. The scheduler
    goes to the step of the checkpoint in its own schedule."""


class Batch(NamedTuple):
    """Fragments whose memory the caller of ``Restoring.fill`` fills. The caller first reads those in ``urgent``, but
    what is in the page cache is read before what is on the disk."""

    urgent: tuple[Fragment, ...]
    others: tuple[Fragment, ...] = ()
    after_urgent: Callable[[], None] = lambda: None
    """Derives everything that depends only on the fragments in ``urgent``. The caller calls it once, in another thread,
    as soon as these fragments are filled, and never if that fails. Meanwhile the caller fills the fragments in
    ``others``. The caller waits until this function has ended before it asks for the next batch. Not collective."""


class Restoring(Protocol):
    """Carries out one restore of a ``Selection`` into one engine. Its adapter makes it. Each method is called once, in
    the order in which they stand here. The methods from ``fill`` on change what the engine holds."""

    def problems(self) -> list[str]:
        """Returns the reasons why the state cannot be restored together with the tensors, one line each. Changes
        nothing. If there is any, no other method may be called. Raises FormatError for a tree that does not have
        the form that adapters write."""

    def fill(self) -> Generator[Batch, None, None]:
        """Yields all fragments of ``Selection.wanted`` in batches. The ``data`` of each fragment is memory that the
        caller fills before it asks for the next batch.

        The first batch has all fragments that the caller can fill in the memory of the engine itself, because the disk
        would be idle between two batches. Memory that does not exist yet, as for moments, is made here. Fragments that
        the engine keeps on a disk are brought into memory and written back batch by batch. A buffer that is not
        contiguous is a batch of its own, whose memory is a copy. The number of batches differs between ranks, so
        nothing in this method is collective. If the generator is closed early, it gives up the memory of its last
        batch, and what that batch has on the disk stays unchanged.
        """

    def set_state(self) -> None:
        """Sets the counters, the param groups, the scheduler and hidden state, and derives all that this rank can
        derive alone. It is called once all memory of this rank is filled. Not collective. Raises FormatError for trees
        that ``EngineAdapter.state`` and ``rank_state`` did not make."""

    def finish(self) -> None:
        """Makes the replicas that every rank holds complete, and derives low-precision weights from the master weights
        of other ranks. It is called once ``set_state`` has returned on every rank. Collective. A step that could fail
        on one rank alone belongs into ``set_state``, or after the last exchange between the ranks."""
