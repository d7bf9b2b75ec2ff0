"""Writes a DCP folder from a checkpoint, as ``torch.distributed.checkpoint.save`` does (see ``dcp_folder.py``).

A checkpoint of a state dict becomes a folder with the names of that state dict. The checkpoint of an engine becomes a
folder with what ``get_state_dict`` returns, in ``model`` and ``optim``, with the state of the scheduler in
``scheduler``, and with the entries of its ``client_state``.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from zckpt.adapters import optimizer
from zckpt.adapters.trees import counters_of, subtree
from zckpt.checkpoint.listing.tensors import TensorInfo
from zckpt.checkpoint.reading.state_dict import PlainValues, paths_of, tensors_by_name
from zckpt.checkpoint.restoring.plan import engine_state
from zckpt.engines.contract import without_left_out
from zckpt.engines.state_dict import leaves_of
from zckpt.errors import UnsupportedError, first_few
from zckpt.format import names
from zckpt.geometry import span_of
from zckpt.plan.inventory import RESERVED_PARTS
from zckpt.storage.location import Location
from zckpt.tools.converting.dcp_folder import METADATA
from zckpt.tools.converting.write_folder import write_folder
from zckpt.tools.exporting.place import Place
from zckpt.tools.exporting.plan import Extent, OutputFile, OutputTensor
from zckpt.tools.exporting.torch_file import Storage, View, torch_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.engines.state_dict import Path
    from zckpt.progress import Progress
    from zckpt.ranks.collectives import Ranks
    from zckpt.transfer.budget import Budget

CHUNK_BYTES_MIN = 1 << 20
"""The smallest chunk that is cut from a tensor, in bytes. A smaller tensor is one chunk."""
ALIGNMENT = 64
"""The multiple of bytes at which each chunk begins in its file. So its values lie as ``torch.save`` aligns them."""
_FILES = ("*.distcp", METADATA)


def to_dcp(
    checkpoint: Loader,
    destination: str,
    ranks: Ranks,
    *,
    world_size: int | None = None,
    overwrite: bool = False,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Writes the folder ``destination``, which ``torch.distributed.checkpoint.load`` reads.

    ``world_size``: the number of files, into which tensors are divided by rows, as FSDP2 divides them. None means the
    number of ranks that wrote the checkpoint. The other arguments, the result and the errors are those of
    ``to_deepspeed``.
    """
    path = str(Location.of(destination).absolute())
    plan = ranks.together(lambda: DcpPlan(checkpoint, world_size), "plan the folder")

    def finish(place: Place) -> None:
        place.put_small({METADATA: pickle.dumps(plan.metadata(path))})
        place.finish()

    missing = write_folder(
        checkpoint, plan, lambda: Place.choose(path, "DCP folder", overwrite=overwrite, patterns=_FILES), finish, ranks,
        budget=budget, progress=progress,
    )  # fmt: skip
    return path, missing


@dataclass(frozen=True)
class _Item:
    """What is written as one file of ``torch.save``, within a data file."""

    index: MetadataIndex
    content: View | torch.Tensor | bytes
    sizes: tuple[int, ...] = ()
    """The shape of a chunk of a tensor."""

    def planned(self) -> OutputFile:
        """Returns the plan of its bytes."""
        if isinstance(self.content, bytes):
            return OutputFile("", len(self.content), {0: self.content}, {})
        return torch_file("", self.content)


class DcpPlan:
    """The plan of a DCP folder. Raises UnsupportedError for a checkpoint that cannot become one, and FormatError."""

    copies: Mapping[str, int] = {}
    """The numbers of the copies that are written, by the keys of the tensors, as for the other plans. The map is empty,
    because a DCP folder has the first copy of each tensor."""

    def __init__(self, checkpoint: Loader, world_size: int | None) -> None:
        if world_size is not None and world_size < 1:
            raise ValueError(f"world_size must be 1 or more, got {world_size!r}")
        self._checkpoint = checkpoint
        self._ranks = world_size or checkpoint.manifest.world_size
        self._paths: dict[str, Path] = {}
        self._tensors: dict[str, TensorInfo | torch.Tensor] = {}
        self._values: dict[str, Any] = {}
        self._left_out: list[str] = []
        paths = paths_of(checkpoint)
        if paths:
            self._tensors.update(tensors_by_name(checkpoint))
            self._values.update(PlainValues(checkpoint))
            self._paths = {name: paths[name] for name in (*self._tensors, *self._values)}
        else:
            self._add_engine()

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        """The tensors of the checkpoint that are written, by key."""
        return {info.key: info for info in self._tensors.values() if isinstance(info, TensorInfo)}

    def files(self) -> Iterator[OutputFile]:
        """Yields the plan of each data file, when it is asked for."""
        for number, items in enumerate(self._items):
            nbytes = 0
            known: dict[int, bytes] = {}
            tensors: dict[int, OutputTensor] = {}
            for item in items:
                planned, gap = item.planned(), -nbytes % ALIGNMENT
                known.update({nbytes: bytes(gap)} if gap else {})
                nbytes += gap
                known.update({nbytes + offset: raw for offset, raw in planned.known.items()})
                tensors.update({nbytes + offset: tensor for offset, tensor in planned.tensors.items()})
                nbytes += planned.nbytes
            if items:
                yield OutputFile(_name(number), nbytes, known, tensors)

    def metadata(self, path: str) -> Metadata:
        """Returns the content of ``.metadata``."""
        places, chunks = {}, {name: list[ChunkStorageMetadata]() for name in self._tensors}
        for number, items in enumerate(self._items):
            offset = 0
            for item in items:
                nbytes = item.planned().nbytes
                offset += -offset % ALIGNMENT
                places[item.index] = _StorageInfo(_name(number), offset, nbytes)
                offset += nbytes
                if item.index.offset is not None:
                    chunks[item.index.fqn].append(ChunkStorageMetadata(item.index.offset, torch.Size(item.sizes)))
        entries: dict[str, Any] = {name: BytesStorageMetadata() for name in self._values}
        for name, tensor in self._tensors.items():
            entries[name] = TensorStorageMetadata(
                TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks[name]
            )
        return Metadata(entries, self._paths, places, StorageMeta(path), CURRENT_DCP_VERSION)

    def missing(self) -> tuple[str, ...]:
        """Returns a phrase for each thing that the folder lacks."""
        checkpoint, phrases = self._checkpoint, list(self._left_out)
        trees = [checkpoint.rank_state(rank, lazy=True) or {} for rank in range(checkpoint.manifest.world_size)]
        if any(tree.get("rng") is not None for tree in trees):
            phrases.append("the random number generators of the ranks")
        differing = [info.key for info in checkpoint.contents.values() if any(piece.copy for piece in info.pieces)]
        if differing:
            phrases.append(f"the values that ranks other than 0 have of {first_few(differing, 3)}")
        engine = engine_state(checkpoint) or {}
        counters = counters_of(engine) if "counters" in engine else {}
        # The reader takes the steps from the optimizer.
        counted = [name for name, value in counters.items() if value and name != "global_steps"]
        if counted:
            phrases.append(f"the counters {', '.join(counted)}")
        if engine.get("scaler"):
            phrases.append("the loss scale")
        own = (names.CLIENT_STATE, names.CLIENT_RANK_STATE)
        if not paths_of(checkpoint) and any(tree.get(key) for tree in trees for key in own):
            phrases.append("what each rank has of its own: rank_state, registered objects and its client_state")
        return tuple(phrases)

    @cached_property
    def _items(self) -> list[list[_Item]]:
        """What each data file has. Each chunk goes to the file that has the fewest bytes so far."""
        files: list[list[_Item]] = [[] for _ in range(self._ranks)]
        nbytes = [0] * self._ranks
        for name, value in self._values.items():
            saved = io.BytesIO()
            torch.save(value, saved)
            files[0].append(_Item(MetadataIndex(name), saved.getvalue()))
        for name, tensor in self._tensors.items():
            for item in _chunks(name, tensor, self._ranks):
                number = nbytes.index(min(nbytes))
                files[number].append(item)
                nbytes[number] += math.prod(item.sizes) * tensor.dtype.itemsize
        return files

    def _add_engine(self) -> None:
        """Adds the leaves of the checkpoint of an engine."""
        checkpoint = self._checkpoint
        root = checkpoint.root
        engine = root.get("engine") if isinstance(root.get("engine"), dict) else {}
        assert isinstance(engine, dict)
        for name, info in tensors_by_name(checkpoint).items():
            self._add(("model", name), info)
        if engine.get("optimizer") is not None:
            self._add_optimizer(subtree(engine, "optimizer"))
        if engine.get("scheduler") is not None:
            state = without_left_out(subtree(subtree(engine, "scheduler"), "state"))
            self._add_all({"scheduler": state})
        client_state = root.get(names.CLIENT_STATE)
        taken = {path[0] for path in self._paths.values()}
        for key, value in (client_state if isinstance(client_state, dict) else {}).items():
            if str(key) in taken:
                self._left_out.append(f"the entry {key} of client_state: the folder has this name already")
            else:
                self._add_all({key: value})

    def _add_optimizer(self, tree: Mapping[str, Any]) -> None:
        """Adds the state of an optimizer, as ``get_optimizer_state_dict`` returns it."""
        saved = optimizer.Saved(tree)
        together = tree["class"] in optimizer.COUNTING_TOGETHER
        for number, group in enumerate(saved.groups):
            for key, value in group.items():
                self._add(("optim", "param_groups", number, str(key)), value)
            members = set(group["params"])
            entries = [entry for entry in tree["states"] if members.intersection(entry["params"])]
            steps = [entry["values"]["step"] for entry in entries if "step" in entry["values"]]
            for entry in entries:
                if entry.get("bound"):
                    raise UnsupportedError(
                        f"{', '.join(entry['bound'])} of {first_few(entry['params'], 1)} fits only the ranks that "
                        "wrote it, and no DCP folder can hold it",
                        file=self._checkpoint.path,
                    )
                values = without_left_out(entry["values"])
                if type(values.get("step")) is int:  # torch counts in tensors.
                    values = {
                        **values,
                        "step": torch.tensor(float(max(steps) if together else values["step"]), device="cpu"),
                    }
                for name in entry["params"]:
                    if name in members:
                        for key, value in values.items():
                            self._add(("optim", "state", name, str(key)), value)
        for info in self._checkpoint.contents.values():
            if info.part not in RESERVED_PARTS:
                self._add(("optim", "state", info.name, info.part), info)

    def _add_all(self, state_dict: Mapping[Any, Any]) -> None:
        for leaf in leaves_of(state_dict).values():
            self._add(leaf.path, leaf.value)

    def _add(self, path: Path, value: Any) -> None:
        name = ".".join(map(str, path))
        if name in self._paths:
            raise UnsupportedError(f"two leaves would be called {name}", key=name)
        self._paths[name] = path
        if isinstance(value, (TensorInfo, torch.Tensor)):
            self._tensors[name] = value
        else:
            self._values[name] = value


def _name(number: int) -> str:
    return f"__{number}_0.distcp"


def _chunks(name: str, tensor: TensorInfo | torch.Tensor, ranks: int) -> Iterator[_Item]:
    """Yields the chunks of a tensor: rows that follow one another, at most as many chunks as ranks."""
    shape = tuple(tensor.shape)
    if isinstance(tensor, torch.Tensor) or not shape or not math.prod(shape):
        content = tensor if isinstance(tensor, torch.Tensor) else _view(tensor, [(0, size) for size in shape])
        yield _Item(MetadataIndex(name, [0] * len(shape)), content, shape)
        return
    row_bytes = math.prod(shape[1:]) * tensor.dtype.itemsize
    rows = max(-(-shape[0] // ranks), -(-CHUNK_BYTES_MIN // row_bytes))
    for first in range(0, shape[0], rows):
        bounds = [(first, min(rows, shape[0] - first)), *((0, size) for size in shape[1:])]
        index = MetadataIndex(name, [begin for begin, _ in bounds], first // rows)
        yield _Item(index, _view(tensor, bounds), tuple(size for _, size in bounds))


def _view(info: TensorInfo, bounds: list[tuple[int, int]]) -> View:
    span = span_of(info.shape, bounds)
    extents = {0: Extent(info.key, span)} if span.numel else {}
    return View(Storage(info.dtype, span.numel, extents), tuple(size for _, size in bounds))
