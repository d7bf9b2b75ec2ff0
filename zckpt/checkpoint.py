"""An opened checkpoint: what it holds, and any part of it as tensors."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from zckpt.errors import KeyNotFoundError, MismatchError
from zckpt.format import index as index_format
from zckpt.format import names, tree
from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.limits import DIGEST_TABLE_BYTES_MAX, TREE_BYTES_MAX
from zckpt.format.manifest import TIERS, Manifest
from zckpt.format.rules import broken
from zckpt.io.budget import Budget, flag
from zckpt.io.memory import Sinks, check_cast, cuda_device, fresh_tensor, staging_for
from zckpt.io.read import ReadFile, run_reads
from zckpt.plan.coalesce import plan_reads
from zckpt.plan.reshard import Span, StoredPieces, choose_copies, extents, slice_spans
from zckpt.plan.select import Keys, nearest, select
from zckpt.progress import Progress, reported
from zckpt.state.inventory import BUFFER, MASTER, PARAM, STATE
from zckpt.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from zckpt.format.index import Ints, Layout, Piece
    from zckpt.io.local import IOCount
    from zckpt.io.store import Reader

Device = torch.device | str


@dataclass(frozen=True, slots=True)
class PieceInfo:
    """Elements ``[start, stop)`` of a tensor, in row-major order, and where they are stored.

    ``copy`` is 0 but for rank-local values such as buffers that differ from rank to rank. ``offset`` is the byte of
    ``file`` (relative to the checkpoint) at which ``nbytes`` bytes begin.
    """

    rank: int
    tier: str
    copy: int
    start: int
    stop: int
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint. ``pieces`` is read from the index when it is first asked for."""

    key: str
    part: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    """Of one whole copy."""
    _place: tuple[int, int] = field(repr=False)
    """Its part in the manifest, and its row there."""
    _checkpoint: Checkpoint = field(repr=False, compare=False)

    @cached_property
    def pieces(self) -> tuple[PieceInfo, ...]:
        return self._checkpoint._piece_infos(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote it, ascending."""
        return tuple(sorted({piece.rank for piece in self.pieces}))

    @property
    def files(self) -> tuple[str, ...]:
        """The files that hold it, relative to the checkpoint."""
        return tuple(dict.fromkeys(piece.file for piece in self.pieces))


class Want(NamedTuple):
    """Elements of one tensor, and the contiguous memory that they go to. ``copy`` is the copy of the tensor to be read;
    None: whichever suits."""

    info: TensorInfo
    spans: Sequence[Span]
    target: torch.Tensor
    copy: int | None = None


@lru_cache
def _all_of(numel: int) -> tuple[Span]:
    """The span of a whole tensor: few objects where there are many tensors."""
    return (Span(0, numel, 0),)


def _leaf(ext: int, tensor: torch.Tensor) -> object:
    return tensor if ext == tree.TENSOR else tensor.numpy()


class Checkpoint(Mapping[str, TensorInfo]):
    """A mapping from key (``<part>/<parameter name>``) to TensorInfo. Made by ``zckpt.open``; safe to share by threads.

    Nothing but the manifest is read until it is asked for.
    """

    def __init__(self, path: str, manifest: Manifest, reader: Reader, budget: Budget | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self.reader = reader
        self.budget = budget or Budget.from_environment()
        self._layouts: dict[int, Layout] = {}
        self._tables: dict[int, memoryview] = {}
        self._sized: set[int] = set()
        """The files whose length was found to be the manifest's."""

    # What it holds

    def __getitem__(self, key: str) -> TensorInfo:
        """A tied weight is found under every name. Raises KeyNotFoundError, which names the nearest keys."""
        place = self._find(key)
        if place is None:
            raise KeyNotFoundError(f"there is no key {key!r}", key=key, hint=nearest(list(self), key))
        return self._info(*place)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._find(key) is not None

    def _find(self, key: str) -> tuple[int, int] | None:
        part, _, name = key.partition("/")
        return None if part == STATE else self._place(part, self.aliases.get(name, name))

    def __iter__(self) -> Iterator[str]:
        for part in self.manifest.parts:
            if part.name != STATE:
                for name in part.names:
                    yield f"{part.name}/{self.manifest.names[name]}"

    def __len__(self) -> int:
        return sum(len(part.names) for part in self.manifest.parts if part.name != STATE)

    def __repr__(self) -> str:
        return f"<zckpt.Checkpoint {self.path!r}: step {self.step}, {len(self)} tensors of {', '.join(self.parts)}>"

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def world_size(self) -> int:
        return self.manifest.world_size

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.manifest.parts if part.name != STATE)

    @property
    def aliases(self) -> Mapping[str, str]:
        """From each further name of a tied weight to the one it is stored under."""
        return self.manifest.aliases

    @property
    def nbytes(self) -> int:
        """Of all files, as the manifest records them."""
        return sum(self.manifest.files.nbytes)

    @property
    def io(self) -> IOCount:
        """What reading this checkpoint has cost so far."""
        return self.reader.count

    @cached_property
    def state(self) -> Any:
        """The tree of non-tensor state that all ranks share; tensors inside it are on the CPU."""
        return self._tree(self.manifest.state, names.MANIFEST)

    def rank_state(self, rank: int, *, lazy: bool = False) -> Any:
        """The tree of state that ``rank`` alone had, such as its random number generators; None if there is none.

        ``lazy``: for each tensor and array, a function without arguments that reads it.
        """
        place = self._place(STATE, f"rank/{rank}")
        if place is None:
            return None
        info = self._info(*place)
        if info.dtype != torch.uint8 or len(info.shape) != 1:
            raise broken("T001", f"a packed tree that is {info.dtype} {list(info.shape)}", key=info.key)
        if info.nbytes > TREE_BYTES_MAX:
            raise broken("T004", f"a packed tree of {info.nbytes} bytes", key=info.key)
        packed = self._one(info).numpy().tobytes()
        return tree.unpack(packed, self._lazy_leaf, info.key) if lazy else self._tree(packed, info.key)

    def _tree(self, packed: bytes, file: str) -> Any:
        """With all tensors that it refers to, which are read at once: so they cannot take more than their files."""
        infos: dict[str, TensorInfo] = {}
        found = tree.unpack(packed, lambda ext, name: infos.setdefault(name, self._state_info(name)), file)
        if not infos:
            return found
        self.check_sizes(infos.values())
        tensors = {name: self._empty(info, info.shape, "cpu", None) for name, info in infos.items()}
        self.read([self._whole(info, tensors[name]) for name, info in infos.items()])
        return tree.unpack(packed, lambda ext, name: _leaf(ext, tensors[name]), file)

    def _lazy_leaf(self, ext: int, name: str) -> Callable[[], object]:
        info = self._state_info(name)
        return lambda: _leaf(ext, self._one(info))

    def _state_info(self, name: str) -> TensorInfo:
        place = self._place(STATE, name)
        if place is None:
            raise broken("T003", f"there is no tensor {STATE}/{name}", file=names.MANIFEST)
        return self._info(*place)

    # Any part of it

    def load(
        self,
        keys: Keys = None,
        *,
        device: Device = "cpu",
        dtype: torch.dtype | None = None,
        verify: bool | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        progress: Progress | None = None,
    ) -> dict[str, torch.Tensor]:
        """Whole tensors by key, assembled from the pieces of all ranks, in memory of their own on ``device``.

        ``keys``: one key, a glob (``"master/*"``), several of either, a predicate over keys, or None for all. ``dtype``
        converts between floating point types, or between integer types, on the way. ``verify`` checks every block's
        digest; None: unless the environment has ZCKPT_VERIFY=0. ``out``: contiguous tensors by key, of the stored
        shapes, on any device; keys that it has are read into them and converted to their dtype; after an error they
        hold undefined values. ``progress``: such as ``zckpt.ProgressBar()``. Reads nothing but these tensors, the index
        chunks that list them and the digests that cover them.

        Raises KeyNotFoundError, CastError, MismatchError (``out`` does not fit), FormatError (damaged or missing data)
        and StorageError; then nothing is returned.
        """
        infos = {key: self[key] for key in self._select(keys)}
        self.check_sizes(infos.values())
        targets = {
            key: self._empty(info, info.shape, device, dtype)
            if out is None or key not in out
            else self._given(info, out[key])
            for key, info in infos.items()
        }
        with reported(progress, "load", sum(info.nbytes for info in infos.values())) as advance:
            self.read([self._whole(info, targets[key]) for key, info in infos.items()], verify=verify, advance=advance)
        return targets

    def iter(
        self,
        keys: Keys = None,
        *,
        device: Device = "cpu",
        dtype: torch.dtype | None = None,
        verify: bool | None = None,
        progress: Progress | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Like ``load``, one ``(key, tensor)`` at a time: only one is in memory, unless the caller keeps more."""
        infos = {key: self[key] for key in self._select(keys)}
        with reported(progress, "load", sum(info.nbytes for info in infos.values())) as advance:
            for key, info in infos.items():
                yield key, self._one(info, device, dtype, verify, advance)

    def load_slice(
        self,
        key: str,
        index: slice | tuple[slice, ...],
        *,
        device: Device = "cpu",
        dtype: torch.dtype | None = None,
        verify: bool | None = None,
    ) -> torch.Tensor:
        """``tensor[index]`` without reading the rest; ``index`` is a slice, or one per leading dimension, of step 1.

        With ``verify`` the blocks (1 MiB) at the edges are read whole.
        """
        info = self[key]
        shape, spans = slice_spans(info.shape, index if isinstance(index, tuple) else (index,))
        self.check_sizes([info])
        target = self._empty(info, shape, device, dtype)
        self.read([Want(info, spans, target)], verify=verify)
        return target

    def load_pieces(
        self, rank: int, keys: Keys = None, *, device: Device = "cpu", verify: bool | None = None
    ) -> dict[tuple[str, int, int], torch.Tensor]:
        """What one rank wrote, as it is: 1-D tensors of the elements ``[start, stop)`` by ``(key, start, stop)``."""
        wants: dict[tuple[str, int, int], Want] = {}
        infos = {key: self[key] for key in self._select(keys)}
        own = {key: [piece for piece in self.pieces(info) if piece.rank == rank] for key, info in infos.items()}
        copies = {(info.key, piece.copy): info for key, info in infos.items() for piece in own[key]}
        self._check_sizes(list(copies.values()), [copy for _, copy in copies])
        for key, info in infos.items():
            for piece in own[key]:
                target = self._empty(info, (piece.stop - piece.start,), device, None)
                wants[key, piece.start, piece.stop] = Want(info, [Span(piece.start, piece.stop, 0)], target, piece.copy)
        self.read(list(wants.values()), verify=verify)
        return {place: want.target for place, want in wants.items()}

    def state_dict(
        self,
        *,
        dtype: torch.dtype | None = None,
        device: Device = "cpu",
        verify: bool | None = None,
        progress: Progress | None = None,
    ) -> dict[str, torch.Tensor]:
        """What ``model.load_state_dict`` takes: weights (from ``master``, else ``param``), buffers, and tied weights by
        every name. ``dtype`` applies to floating point weights; buffers keep theirs."""
        sources: dict[str, TensorInfo] = {}
        for part in (BUFFER, PARAM, MASTER):
            sources |= {info.name: info for info in self.values() if info.part == part}
        casts = {
            name: dtype if info.part != BUFFER and info.dtype.is_floating_point else None
            for name, info in sources.items()
        }
        self.check_sizes(sources.values())
        targets = {name: self._empty(info, info.shape, device, casts[name]) for name, info in sources.items()}
        with reported(progress, "load", sum(info.nbytes for info in sources.values())) as advance:
            self.read([self._whole(i, targets[name]) for name, i in sources.items()], verify=verify, advance=advance)
        return targets | {alias: targets[name] for alias, name in self.aliases.items() if name in targets}

    def read(
        self,
        wants: Sequence[Want],
        *,
        rank: int | None = None,
        verify: bool | None = None,
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Fills the target of every want. The one way in which tensor data is read.

        Where a tensor has several copies, that which ``rank`` alone holds is read if there is one, else the first.
        ``advance`` is told the bytes that have been read.
        """
        verify = flag("ZCKPT_VERIFY", True) if verify is None else verify
        manifest = self.manifest
        infos, spans, targets, copies = zip(*wants, strict=True) if wants else ((),) * 4
        found = extents(self._stored(infos, copies, rank), spans, [info.dtype.itemsize for info in infos])
        files = {number: self.read_file(number, verify=verify) for number in np.unique(found.file).tolist()}
        ops = plan_reads(
            found,
            data_starts=manifest.files.data_start,
            block_bytes=manifest.block_bytes,
            verify=verify,
            batch_bytes=self.batch_bytes,
        )
        sinks = Sinks([info.key for info in infos], targets, [info.dtype for info in infos])
        staging = staging_for(self.batch_bytes, cuda_device(targets))
        run_reads(self.reader, ops, files, sinks, self.budget, staging, advance)

    @property
    def batch_bytes(self) -> int:
        """Of one read, at most."""
        return self.budget.batch_bytes(self.manifest.block_bytes)

    def _stored(self, infos: Sequence[TensorInfo], copies: Sequence[int | None], rank: int | None) -> StoredPieces:
        """The pieces of one copy of each tensor: that of ``copies``, or whichever suits ``rank``."""
        places = np.array([info._place for info in infos], np.int64).reshape(-1, 2)
        chunks = self._chunks_of(places[:, 0], places[:, 1])
        found = []
        for part_id, chunk in sorted(set(zip(places[:, 0].tolist(), chunks.tolist(), strict=True))):
            numbers = np.flatnonzero((places[:, 0] == part_id) & (chunks == chunk))
            rows = places[numbers, 1] - self.manifest.chunks[chunk].first_row
            layout = index_format.take(self.chunk(chunk), rows)
            numel = np.array([math.prod(infos[number].shape) for number in numbers.tolist()], np.int64)
            start, copy = index_format.spans(layout, numel)
            row_of, _ = index_format.ragged(layout.count)
            given = (copies[number] for number in numbers.tolist())
            asked = np.array([-1 if one is None else one for one in given], np.int64)
            chosen = np.where(asked < 0, choose_copies(row_of, copy, layout.rank, rank), asked)
            file = self.manifest.file_numbers(layout.rank, part_id, layout.tier)
            columns = (numbers[row_of], file, start, start + layout.length, layout.offset, layout.block)
            found.append(np.stack(columns)[:, copy == chosen[row_of]])
        stored = np.concatenate([np.empty((6, 0), np.int64), *found], axis=1)
        return StoredPieces(*stored[:, np.argsort(stored[0], kind="stable")])

    def _select(self, keys: Keys) -> list[str]:
        """The keys asked for. A tied weight's further names are matched as they are, not by patterns."""
        if keys is None or callable(keys):
            return select(list(self), keys)
        if isinstance(keys, str) and keys in self:  # one of very many: need not list them
            return [keys]
        keys = [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))
        return select(list(self), keys, [key for key in keys if self._is_alias(key)])

    def _is_alias(self, key: str) -> bool:
        return key.partition("/")[2] in self.aliases and key in self

    def _one(
        self,
        info: TensorInfo,
        device: Device = "cpu",
        dtype: torch.dtype | None = None,
        verify: bool | None = None,
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> torch.Tensor:
        self.check_sizes([info])
        target = self._empty(info, info.shape, device, dtype)
        self.read([self._whole(info, target)], verify=verify, advance=advance)
        return target

    def _whole(self, info: TensorInfo, target: torch.Tensor) -> Want:
        return Want(info, _all_of(math.prod(info.shape)), target)

    def _empty(
        self, info: TensorInfo, shape: tuple[int, ...], device: Device, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """Memory for elements of ``info``. Its sizes are checked before, so that there is never more asked for than the
        files really hold, whatever the manifest says."""
        check_cast(info.dtype, dtype or info.dtype, info.key)
        return fresh_tensor(shape, dtype or info.dtype, device)

    def _given(self, info: TensorInfo, target: torch.Tensor) -> torch.Tensor:
        """Memory of the caller's, if it can hold ``info``. Raises MismatchError, CastError."""
        check_cast(info.dtype, target.dtype, info.key)
        if tuple(target.shape) != info.shape or not target.is_contiguous():
            what = f"{list(target.shape)}{'' if target.is_contiguous() else ', not contiguous'}"
            raise MismatchError(f"out has {what}, the checkpoint {list(info.shape)}", key=info.key)
        return target

    def check_sizes(self, infos: Iterable[TensorInfo]) -> None:
        """Raises FormatError (F001 to F003, I007) unless the files that hold ``infos`` are there, as long as recorded,
        and hold no less than that."""
        infos = list({info.key: info for info in infos}.values())
        self._check_sizes(infos, [None] * len(infos))

    def _check_sizes(self, infos: Sequence[TensorInfo], copies: Sequence[int | None]) -> None:
        """Of one copy each, none of them given twice."""
        stored = self._stored(infos, copies, None)
        item = np.array([info.dtype.itemsize for info in infos], np.int64)
        index_format.check_claims(self.manifest, stored.file, (stored.stop - stored.start) * item[stored.want])
        numbers, first = np.unique(stored.file, return_index=True)
        for number, one in zip(numbers.tolist(), stored.want[first].tolist(), strict=True):
            if number in self._sized:
                continue
            file = self.manifest.files[number]
            path = self.manifest.path(file)
            nbytes = self.reader.size(path)
            if nbytes != file.nbytes:
                raise broken(
                    "F003",
                    f"the file is {nbytes} bytes long, expected {file.nbytes}",
                    file=path,
                    key=infos[one].key,
                )
            self._sized.add(number)

    # Manifest and index

    def _place(self, part: str, name: str) -> tuple[int, int] | None:
        """Part id and row of a tensor."""
        part_id, name_id = self.manifest.part_ids.get(part), self.manifest.name_ids.get(name)
        if part_id is None or name_id is None:
            return None
        ids = self.manifest.parts[part_id].names
        row = bisect_left(ids, name_id)
        return (part_id, row) if row < len(ids) and ids[row] == name_id else None

    def _info(self, part_id: int, row: int) -> TensorInfo:
        part = self.manifest.parts[part_id]
        name, shape = self.manifest.names[part.names[row]], self.manifest.shapes[part.shapes[row]]
        dtype = part.dtypes[row]
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        return TensorInfo(
            f"{part.name}/{name}", part.name, name, TORCH_DTYPES[dtype], shape, nbytes, (part_id, row), self
        )

    def pieces(self, info: TensorInfo) -> tuple[Piece, ...]:
        """The index's records of one tensor, copy by copy, in the order of their elements."""
        part_id, row = info._place
        number = int(self._chunks_of(np.array([part_id]), np.array([row]))[0])
        first_row = self.manifest.chunks[number].first_row
        return index_format.pieces(self.chunk(number), row - first_row, math.prod(info.shape))

    def _chunks_of(self, parts: Ints, rows: Ints) -> Ints:
        """The numbers of the chunks that have these rows of these parts."""
        layout = np.array([part.layout for part in self.manifest.parts], np.int64)[parts]
        found = np.zeros(len(rows), np.int64)
        for one in np.unique(layout).tolist():
            own = layout == one
            first_rows, numbers = self._chunks_by_layout[one]
            found[own] = numbers[np.searchsorted(first_rows, rows[own], side="right") - 1]
        return found

    @cached_property
    def _chunks_by_layout(self) -> dict[int, tuple[Ints, Ints]]:
        """For each layout the first rows of its chunks, ascending, and their numbers."""
        layout, first_row = np.array([(c.layout, c.first_row) for c in self.manifest.chunks], np.int64).reshape(-1, 2).T
        return {one: (first_row[layout == one], np.flatnonzero(layout == one)) for one in np.unique(layout).tolist()}

    def chunk(self, number: int) -> Layout:
        """One chunk of the index, read and checked when it is first asked for."""
        if number not in self._layouts:
            chunk = self.manifest.chunks[number]
            raw = self.reader.read(names.index_path(self.manifest.save_id), chunk.offset, chunk.nbytes)
            self._layouts[number] = index_format.decode(raw, chunk, self.manifest)
        return self._layouts[number]

    def read_index(self) -> int:
        """Reads and checks the whole index; returns the number of pieces of all parts."""
        for number in range(len(self.manifest.chunks)):
            self.chunk(number)
        by_layout: dict[int, int] = {}
        for chunk in self.manifest.chunks:
            by_layout[chunk.layout] = by_layout.get(chunk.layout, 0) + chunk.pieces
        return sum(by_layout[part.layout] for part in self.manifest.parts if part.names)

    def _piece_infos(self, info: TensorInfo) -> tuple[PieceInfo, ...]:
        found = []
        for piece in self.pieces(info):
            file = self.manifest.files[self.file_number(info, piece)]
            nbytes = (piece.stop - piece.start) * info.dtype.itemsize
            place = (self.manifest.path(file), file.data_start + piece.offset, nbytes)
            found.append(PieceInfo(piece.rank, TIERS[piece.tier], piece.copy, piece.start, piece.stop, *place))
        return tuple(found)

    def file_number(self, info: TensorInfo, piece: Piece) -> int:
        """Position of the piece's file in the manifest."""
        return self.manifest.file_number(piece.rank, self.manifest.part_ids[info.part], piece.tier)

    def read_file(self, number: int, *, verify: bool) -> ReadFile:
        """A data file as the read pipeline wants it."""
        file = self.manifest.files[number]
        table = self.digest_table(file.rank)[file.first_block * DIGEST_BYTES :] if verify else memoryview(b"")
        return ReadFile(self.manifest.path(file), file.nbytes, table)

    def digest_table(self, rank: int) -> memoryview:
        """The digest table of one rank, checked."""
        if rank not in self._tables:
            path = names.digests_path(self.manifest.save_id, rank)
            nbytes = self.reader.size(path)
            if nbytes % DIGEST_BYTES or nbytes > DIGEST_TABLE_BYTES_MAX:
                raise broken("D001", f"the table is {nbytes} bytes long", file=path)
            raw = self.reader.read(path, 0, nbytes)
            if digest(raw) != self.manifest.digests[rank]:
                raise broken("D002", "the digest table is damaged", file=path, start=0, stop=nbytes)
            self._tables[rank] = memoryview(raw)
        return self._tables[rank]
