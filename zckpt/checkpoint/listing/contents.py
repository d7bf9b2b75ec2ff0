"""Finds out which tensors a checkpoint has and where they are stored. The manifest, the index, the digest tables and
the headers of the data files say it. All of these except the manifest are read when they are first needed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from zckpt.checkpoint.listing.files import digest_counts
from zckpt.checkpoint.listing.tensors import Holders, PieceInfo, TensorInfo, Tensors
from zckpt.errors import KeyNotFoundError
from zckpt.format import data_file as data_file_format
from zckpt.format import index as index_format
from zckpt.format import names, tree
from zckpt.format.digest import DIGEST_BYTES, ReadFile, blocks, check_block, digest
from zckpt.format.dtypes import DTYPES
from zckpt.format.limits import DIGEST_TABLE_BYTES_MAX, NAMES_MAX, TREE_BYTES_MAX, WORLD_SIZE_MAX
from zckpt.format.names import Tier
from zckpt.format.rules import broken
from zckpt.geometry import Grid, distinct, ragged
from zckpt.plan.catalog import run_id_of, tensor_counts
from zckpt.plan.inventory import STATE
from zckpt.plan.lineage import Lineage, judged, lineage_of
from zckpt.plan.machines import Machine, machines_in
from zckpt.plan.reshard import FilePieces, StoredPieces, choose_copies
from zckpt.plan.select import Keys, nearest, select, several

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zckpt.format.index import Rows
    from zckpt.format.manifest import File, Manifest
    from zckpt.geometry import Ints
    from zckpt.storage.contract import Reader, Store


KEPT_PIECES = 1 << 22
"""The most pieces of the index that ``Contents`` keeps in memory. They take up to 256 MiB."""
LISTED_PIECES = 1 << 18
"""About how many pieces ``Contents.stored_each`` lists at a time. They take 12 MiB."""
RANK_PIECES = 1 << 17
"""About how many pieces ``Contents.pieces_of_ranks`` lists at a time. They take 9 MiB, and three times as much while
they are put in order."""


class Contents(Mapping[str, TensorInfo]):
    """A mapping from each key (``<part>/<parameter name>``) to its TensorInfo. Several threads may share it."""

    def __init__(self, manifest: Manifest, reader: Reader, store: Store) -> None:
        """``reader`` reads the files of ``store``, the directory of the checkpoint."""
        self.manifest = manifest
        self.reader = reader
        self.store = store
        self._layouts: dict[int, Rows] = {}
        """The chunks that were asked for last, the oldest first."""
        self._kept_pieces = 0
        """How many pieces these chunks have."""
        self._keeping = threading.Lock()
        """Held while a chunk is added to them."""
        self._tables: dict[int, memoryview] = {}
        self._reading: dict[int, threading.Lock] = {}
        """The locks that let one thread at a time read the digest table of a rank."""
        self._sized: set[int] = set()
        """The numbers of the files that were found to be as long as the manifest says."""

    # The tensors of the model, by key

    def __getitem__(self, key: str) -> TensorInfo:
        """Returns the tensor with this key. A tied weight is found under each of its names. Raises KeyNotFoundError,
        which names the nearest keys."""
        return self._info(*self._place(key))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._by_key(key) is not None

    def named(self, keys: Iterable[str]) -> Tensors:
        """Returns the tensors with these keys. Raises what ``__getitem__`` raises."""
        return self._at(map(self._place, keys))

    def _place(self, key: str) -> tuple[int, int]:
        if not isinstance(key, str):
            raise TypeError(f"a key is a str, such as 'master/embed', got {key!r}")
        place = self._by_key(key)
        if place is None:
            raise KeyNotFoundError(f"there is no key {key!r}", key=key, hint=nearest(list(self), key))
        return place

    def _by_key(self, key: str) -> tuple[int, int] | None:
        part, _, name = key.partition("/")
        return None if part == STATE else self._find(part, self.manifest.aliases.get(name, name))

    def __iter__(self) -> Iterator[str]:
        for part in self.manifest.parts:
            if part.name != STATE:
                for name in part.name_ids.tolist():
                    yield f"{part.name}/{self.manifest.names[name]}"

    def of_part(self, part: str) -> Tensors:
        """Returns the tensors of a part, of which there are none if the checkpoint does not have it. It looks for no
        name, which takes most of the time that it takes to find a key."""
        part_id = self.manifest.part_ids.get(part, -1)
        rows = np.arange(0 if part_id < 0 else len(self.manifest.parts[part_id].name_ids))
        return Tensors(self, np.full(len(rows), part_id), rows)

    def __len__(self) -> int:
        return sum(len(part.name_ids) for part in self.manifest.parts if part.name != STATE)

    def select(self, keys: Keys) -> dict[str, TensorInfo]:
        """Returns the tensors that ``keys`` asks for, by key. Raises KeyNotFoundError if a key, a glob or the predicate
        matches nothing."""
        return dict(zip(*self.chosen(keys), strict=True))

    def chosen(self, keys: Keys) -> tuple[list[str], Tensors]:
        """Returns the keys that ``keys`` asks for, and their tensors. Raises what ``select`` raises."""
        # A checkpoint may have very many keys, so they are not all listed to find one.
        if isinstance(keys, str) and keys in self:
            return [keys], self.named([keys])
        rows = [
            np.empty(0, np.int64) if part.name == STATE else np.arange(len(part.name_ids))
            for part in self.manifest.parts
        ]
        listed = Tensors(self, np.repeat(np.arange(len(rows)), [*map(len, rows)]), np.concatenate(rows))
        known = listed.keys
        if keys is None:
            return known, listed
        if not (callable(keys) or isinstance(keys, str)):
            keys = list(dict.fromkeys(several(keys) or ()))
        chosen = select(known, keys, self.manifest.aliases)
        places = dict(zip(known, range(len(known)), strict=True))
        numbers = [places[key] if key in places else places[self[key].key] for key in chosen]
        return chosen, listed.take(np.array(numbers, np.int64))

    def tensors(self, infos: Iterable[TensorInfo]) -> Tensors:
        """Returns some tensors as columns."""
        return infos if isinstance(infos, Tensors) else self._at(info._place for info in infos)

    def _at(self, places: Iterable[tuple[int, int]]) -> Tensors:
        return Tensors(self, *np.fromiter(chain.from_iterable(places), np.int64).reshape(-1, 2).T)

    # The trees of non-tensor state

    def state_info(self, name: str) -> TensorInfo:
        """Returns the tensor of this name, which a tree refers to. Raises FormatError (T003) if there is none."""
        info = self.find(STATE, name)
        if info is None:
            raise broken("T003", f"there is no tensor {STATE}/{name}", file=names.MANIFEST)
        return info

    def packed_state(self, rank: int | None = None) -> tuple[bytes, str] | None:
        """Returns the packed tree that all ranks share, or the one that ``rank`` alone had, together with the file or
        key that error messages name it by. Returns None if there is no such tree. Raises FormatError and
        StorageError."""
        if rank is None:
            return self.manifest.state, names.MANIFEST
        info = self.find(STATE, f"rank/{rank}")
        if info is None:
            return None
        if info.dtype_name != "U8" or len(info.shape) != 1:
            raise broken(
                "T001", f"a packed tree has to be U8 of one dimension, not {info.dtype_name} {list(info.shape)}",
                key=info.key,
            )  # fmt: skip
        if info.nbytes > TREE_BYTES_MAX:
            raise broken("T004", f"the packed tree takes {info.nbytes} bytes", key=info.key)
        self.check_sizes([info])
        pieces = self.stored([info], [0], None)
        columns = (pieces.file, pieces.offset, pieces.numel, pieces.block)  # An element is one byte.
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return b"".join(self._bytes_of(info, *row) for row in rows), info.key

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """The names of the optimizer's parts that a write, or a copy, has left out. If there are any, the checkpoint
        has weights that can be used, but not a state from which training could go on. Raises FormatError."""
        parts = self.plain_state.get(names.LEFT_OUT)
        return tuple(name for name in parts if isinstance(name, str)) if isinstance(parts, list) else ()

    @cached_property
    def lineage(self) -> Lineage:
        """Which run the checkpoint belongs to, and what it can be used for. An older version of zckpt did not record
        this, so it is judged by what the checkpoint holds. Raises FormatError."""
        tensors, root = tensor_counts(self.manifest), self.plain_state
        recorded = lineage_of(root.get(names.LINEAGE), tensors)
        if recorded is not None:
            return recorded
        partial = "copied_from" in self.manifest.writer  # so does the writer of every copy of some tensors
        use = judged(tensors, root.get("engine"), left_out=self.left_out, partial=partial)
        return Lineage(run_id_of(self.manifest), use)

    @cached_property
    def machines(self) -> tuple[Machine, ...]:
        """The machines of which each has written the files of its own ranks to a disk of its own. Empty if all ranks
        wrote to one place."""
        return machines_in(self.plain_state)

    @property
    def plain_state(self) -> dict[Any, Any]:
        """The tree that all ranks share, with None in the place of each tensor and array. Each access decodes it anew,
        because the tree names every parameter of the optimizer, and to keep these names takes memory."""
        return plain_root(self.manifest)

    # Where the tensors are stored

    def find(self, part: str, name: str) -> TensorInfo | None:
        """Returns the tensor of this part and name, or None. The name must not be an alias of a tied weight."""
        place = self._find(part, name)
        return None if place is None else self._info(*place)

    def _find(self, part: str, name: str) -> tuple[int, int] | None:
        """Returns the position of the part, and the row of the tensor of this name in it, or None."""
        part_id, name_id = self.manifest.part_ids.get(part), self.manifest.name_id(name)
        if part_id is None or name_id is None:
            return None
        ids = self.manifest.parts[part_id].name_ids
        if name_id < len(ids) and ids.item(name_id) == name_id:  # The part has all names up to this one.
            return part_id, name_id
        row = int(ids.searchsorted(name_id))
        return (part_id, row) if row < len(ids) and ids.item(row) == name_id else None

    def _info(self, part_id: int, row: int) -> TensorInfo:
        part = self.manifest.parts[part_id]
        ids = part.name_ids.item(row), part.shape_ids.item(row), part.dtype_ids.item(row)
        return self._info_of(part_id, row, *ids)

    def _info_of(self, part_id: int, row: int, name_id: int, shape_id: int, dtype_id: int) -> TensorInfo:
        part, name = self.manifest.parts[part_id].name, self.manifest.names[name_id]
        return TensorInfo(part, name, DTYPES[dtype_id], self.manifest.shapes[shape_id], part_id, row, self)

    def pieces(self, info: TensorInfo) -> tuple[StoredPieces, Ints, Ints]:
        """Returns the pieces of one tensor, copy by copy, in the order of their elements, in the form in which
        ``pieces_of_rows`` returns them."""
        part_id, row = info._place
        number = int(self._chunks_of(np.array([part_id]), np.array([row]))[0])
        return self.pieces_of_rows(part_id, number, np.array([row]))

    def _chunks_of(self, parts: Ints, rows: Ints) -> Ints:
        """Returns for each row of a part the number of the chunk that has it."""
        layout = np.array([part.layout_id for part in self.manifest.parts], np.int64)
        first_rows, numbers = self._chunks_in_order
        return numbers[np.searchsorted(first_rows, layout[parts] * NAMES_MAX + rows, side="right") - 1]

    @cached_property
    def _chunks_in_order(self) -> tuple[Ints, Ints]:
        """The first rows of all chunks, in ascending order, and the numbers of these chunks. The rows of a layout count
        from ``NAMES_MAX`` times its id on, so that those of all layouts are in one order."""
        first_row = np.array([c.layout_id * NAMES_MAX + c.first_row for c in self.manifest.chunks], np.int64)
        numbers = np.argsort(first_row)
        return first_row[numbers], numbers

    def chunk(self, number: int) -> Rows:
        """Returns one chunk of the index. It is read and checked when it is first asked for, and read again if many
        others have been asked for since."""
        layout = self._layouts.get(number)
        if layout is None:
            chunk = self.manifest.chunks[number]
            raw = self.reader.read(names.index_path(self.manifest.save_id), chunk.offset, chunk.nbytes)
            layout = index_format.decode(raw, chunk, self.manifest)
            with self._keeping:
                if number in self._layouts:  # Another thread was quicker.
                    return layout
                while self._layouts and self._kept_pieces + chunk.pieces > KEPT_PIECES:
                    self._kept_pieces -= len(self._layouts.pop(next(iter(self._layouts))).length)
                self._layouts[number] = layout
                self._kept_pieces += chunk.pieces
        return layout

    def piece_infos(self, info: TensorInfo) -> tuple[PieceInfo, ...]:
        pieces, copies, ranks = self.pieces(info)
        files, save_id, item_bytes = self.manifest.files, self.manifest.save_id, info.item_bytes
        tiers = {tier.value: (tier, tier.label) for tier in Tier}
        infos = []
        columns = (ranks, copies, pieces.start, pieces.stop, pieces.file, pieces.offset)
        for rank, copy, start, stop, number, offset in zip(*(column.tolist() for column in columns), strict=True):
            tier, label = tiers[files.tier[number]]
            path, begins = names.data_file_path(save_id, rank, info.part, tier), files.data_start[number] + offset
            infos.append(PieceInfo(rank, label, copy, start, stop, path, begins, (stop - start) * item_bytes))
        return tuple(infos)

    def _bytes_of(self, info: TensorInfo, number: int, offset: int, nbytes: int, first_block: int) -> bytes:
        """Reads a small piece, which is in file ``number``, and checks its digests."""
        source, start = self.read_file(number, verify=True), self.manifest.files.data_start[number] + offset
        raw = self.reader.read(source.path, start, nbytes)
        for block, first, last in blocks(start, nbytes, first_block, self.manifest.block_bytes):
            check_block(memoryview(raw)[first - start : last - start], block, source, first, info.key)
        return raw

    def read_file(self, number: int, *, verify: bool) -> ReadFile:
        """Returns a data file in the form that the read pipeline takes. With ``verify``, it has the file's digests."""
        file = self.manifest.files[number]
        path, nbytes = self.manifest.path(file), file.nbytes
        return ReadFile(path, nbytes, partial(self._digests_of, file)) if verify else ReadFile(path, nbytes)

    def _digests_of(self, file: File) -> memoryview:
        return self.digest_table(file.rank)[file.first_block * DIGEST_BYTES :]

    def digest_table(self, rank: int) -> memoryview:
        """Returns the digest table of one rank. It is read when it is first asked for."""
        if rank not in self._tables:
            with self._reading.setdefault(rank, threading.Lock()):
                if rank not in self._tables:
                    self._tables[rank] = memoryview(self.read_digest_table(rank))
        return self._tables[rank]

    def read_digest_table(self, rank: int) -> bytes:
        """Reads the digest table of one rank and checks it. Raises FormatError (F001, F002, D001, D002)."""
        path = names.digests_path(self.manifest.save_id, rank)
        # A sound table is no longer than this, so one request reads it. Each piece, and the filler before it, may have
        # one more block than ``digest_counts`` assumes.
        most = min((self.digest_counts[rank] + 2 * self._piece_count) * DIGEST_BYTES, DIGEST_TABLE_BYTES_MAX)
        raw = self.reader.read(path, 0, most + 1)
        nbytes = len(raw) if len(raw) <= most else self.reader.size(path)
        if nbytes % DIGEST_BYTES or nbytes > DIGEST_TABLE_BYTES_MAX:
            raise broken("D001", f"the table is {nbytes} bytes long", file=path)
        raw += self.reader.read(path, len(raw), nbytes - len(raw)) if nbytes > len(raw) else b""
        if digest(raw) != self.manifest.digests[rank]:
            raise broken("D002", "the digest table is damaged", file=path, start=0, stop=nbytes)
        return raw

    @cached_property
    def digest_counts(self) -> list[int]:
        """For each rank, the fewest digests that its table may have."""
        return digest_counts(self.manifest)

    @cached_property
    def _piece_count(self) -> int:
        """The number of pieces of all tensors."""
        layouts = Counter(part.layout_id for part in self.manifest.parts)
        return sum(chunk.pieces * layouts[chunk.layout_id] for chunk in self.manifest.chunks)

    def holders(self, infos: Sequence[TensorInfo]) -> list[Holders]:
        """Returns for each tensor how it is spread over the ranks. This is far quicker than looking at the pieces of
        each tensor."""
        tensors = self.tensors(infos)
        chunks = self._chunks_of(tensors.part_id, tensors.row).tolist()
        spread = {number: self._spread(number) for number in set(chunks)}
        rows = zip(chunks, tensors.row.tolist(), strict=True)
        return [spread[number][row - self.manifest.chunks[number].first_row] for number, row in rows]

    def _spread(self, number: int) -> list[Holders]:
        """Returns for each row of a chunk how it is spread over the ranks."""
        layout = self.chunk(number)
        row, _ = ragged(layout.count)
        # The stable sort is quick here, because most of the pairs are in ascending order already.
        pairs = np.sort(row * self.manifest.world_size + layout.rank, kind="stable")
        columns = (
            layout.count,
            np.add.reduceat(np.diff(pairs, prepend=-1) != 0, layout.first, dtype=np.int64),
            np.minimum.reduceat(layout.rank, layout.first),
            np.maximum.reduceat(layout.rank, layout.first),
            np.bitwise_or.reduceat(1 << layout.tier, layout.first),
        )
        return [
            Holders(pieces, ranks, first, last, tuple(tier.label for tier in Tier if tiers >> tier & 1))
            for pieces, ranks, first, last, tiers in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def grid(self, info: TensorInfo) -> Grid:
        """Returns the grid of a tensor. Its pieces are in the order of this grid."""
        return self.manifest.grid(*info._place)

    def stored(self, infos: Sequence[TensorInfo], copies: Sequence[int] | Ints, rank: int | None) -> StoredPieces:
        """Returns the pieces of one copy of each tensor: that of ``copies``, or, where this is -1, the one that suits
        ``rank`` best."""
        tensors, asked = self.tensors(infos), np.asarray(copies, np.int64)
        chunks = self._chunks_of(tensors.part_id, tensors.row)
        of_chunks: list[StoredPieces] = []
        for part_id, chunk in sorted(set(zip(tensors.part_id.tolist(), chunks.tolist(), strict=True))):
            numbers = np.flatnonzero((tensors.part_id == part_id) & (chunks == chunk))
            pieces, copy, holder = self.pieces_of_rows(part_id, chunk, tensors.row[numbers])
            wanted = asked[numbers]
            chosen = np.where(wanted < 0, choose_copies(pieces.tensor, copy, holder, rank), wanted)
            read = pieces.take(copy == chosen[pieces.tensor])
            of_chunks.append(replace(read, tensor=numbers[read.tensor]))
        if len(of_chunks) == 1:  # They are in order.
            return of_chunks[0]
        stored = StoredPieces.concatenated(of_chunks)
        return stored.take(np.argsort(stored.tensor, kind="stable"))

    def stored_each(self, infos: Sequence[TensorInfo], copies: Sequence[int] | Ints) -> Iterator[StoredPieces]:
        """Yields for each tensor what ``stored`` returns for it alone. It looks at tensors of about ``LISTED_PIECES``
        pieces at a time, which is far quicker than one by one and takes little memory."""
        for group, stored in self._stored_together(self.tensors(infos), np.asarray(copies, np.int64)):
            yield from stored.split(len(infos[group]))

    def _stored_together(self, tensors: Tensors, copies: Ints) -> Iterator[tuple[slice, StoredPieces]]:
        """Yields groups of tensors, and what ``stored`` returns for each group."""
        together = max(LISTED_PIECES // self.manifest.world_size, 1)
        for first in range(0, len(tensors), together):
            group = slice(first, first + together)
            yield group, self.stored(tensors[group], copies[group], None)

    def pieces_of_rows(self, part_id: int, number: int, rows: Ints) -> tuple[StoredPieces, Ints, Ints]:
        """Returns the pieces of some rows of a part, all of which are in chunk ``number``. In the first value,
        ``tensor`` is a position in ``rows``. The second value is the copy that each piece belongs to, and the third the
        rank that holds it."""
        manifest = self.manifest
        layout = index_format.take(self.chunk(number), rows - manifest.chunks[number].first_row)
        numel = manifest.numel[manifest.parts[part_id].shape_ids[rows]]
        start, copy = index_format.starts_and_copies(layout, numel)
        row, _ = ragged(layout.count)
        file = manifest.file_numbers(layout.rank, part_id, layout.tier)
        pieces = StoredPieces(row, start, start + layout.length, file, layout.offset, layout.block)
        return pieces, copy, layout.rank

    @property
    def all_rows(self) -> list[Ints]:
        """For each part of the manifest, the row numbers of all of its tensors."""
        return [np.arange(len(part.name_ids)) for part in self.manifest.parts]

    def pieces_of_parts(self, rows: Sequence[Ints]) -> Iterator[FilePieces]:
        """Yields the pieces of some rows of each part, chunk by chunk of the index. ``rows``: those of each part,
        ascending."""
        for part_id, (part, part_rows) in enumerate(zip(self.manifest.parts, rows, strict=True)):
            chunks = self._chunks_of(np.full(len(part_rows), part_id), part_rows)
            for number in distinct(chunks)[0].tolist():
                in_chunk = part_rows[chunks == number]
                pieces, copy, _ = self.pieces_of_rows(part_id, number, in_chunk)
                row = in_chunk[pieces.tensor]
                places = (np.full_like(row, part_id), pieces.file, pieces.offset, pieces.block, copy)
                yield FilePieces(row, pieces.start, pieces.stop, *places, pieces.numel * part.item_bytes[row])

    def pieces_of_ranks(self, rows: Sequence[Ints], ranks: Sequence[int]) -> Iterator[tuple[int, FilePieces]]:
        """Yields each of ``ranks``, which are ascending, with the pieces of some rows that are in its files, in the
        order of files and offsets. ``rows`` is as for ``pieces_of_parts``. The ranks are taken in groups, each of which
        has about ``RANK_PIECES`` pieces. Each group is one pass over the index, and only its pieces are in memory."""
        rank_of = np.array(self.manifest.files.rank, np.int64)
        together = max(RANK_PIECES * self.manifest.world_size // max(self._piece_count, 1), 1)
        for first in range(0, len(ranks), together):
            group = ranks[first : first + together]
            asked = np.isin(rank_of, group)
            pieces = FilePieces.in_order(
                [of_chunk.take(asked[of_chunk.file]) for of_chunk in self.pieces_of_parts(rows)]
            )
            bounds = np.searchsorted(rank_of[pieces.file], group)
            for rank, start, stop in zip(group, bounds, [*bounds[1:], len(pieces)], strict=True):
                yield rank, pieces.take(slice(start, stop))

    def check_sizes(
        self,
        infos: Iterable[TensorInfo],
        unmeasured_bytes: int = 0,
        bounds: NDArray[np.int64] | None = None,
        copies: Sequence[int] | Ints | None = None,
    ) -> Ints:
        """Checks the data files that have pieces of one copy of each of ``infos``. Raises FormatError (F001 to F003)
        unless they exist and are as long as the manifest says, and (I007) if these pieces together have more bytes than
        the data of a file. Returns for each tensor the byte of its first file at which it begins.

        A caller that reads these tensors may have ``unmeasured_bytes`` in memory before the lengths of the files are
        known. If the tensors have no more bytes, and a request to the store takes long, then the lengths are left to
        ``checks_beside``, which the caller calls while it reads. If the caller reads only parts of the tensors,
        ``bounds`` has a row for each of ``infos``, with the first element that is read and the one after the last. Then
        only the lengths of the files with these elements, and with those between them, are checked. ``copies``: as for
        ``stored``. None means that any copies will do."""
        given = self.tensors(infos)
        asked = np.full(len(given), -1) if copies is None else np.asarray(copies, np.int64)
        # A tensor may be given under several keys.
        place = (given.part_id * NAMES_MAX + given.row) * (WORLD_SIZE_MAX + 1) + asked
        _, first_of, number = distinct(place)
        tensors, asked = given.take(first_of), asked[first_of]
        read_bounds = None if bounds is None else bounds[first_of]
        if bounds is not None and read_bounds is not None:
            np.minimum.at(read_bounds[:, 0], number, bounds[:, 0])
            np.maximum.at(read_bounds[:, 1], number, bounds[:, 1])
        begins = np.zeros(len(tensors), np.int64)
        first: dict[int, str] = {}
        """For each data file, the key of the first tensor in it. An error about the file names this key."""
        data_start = np.array(self.manifest.files.data_start, np.int64)
        item_bytes = tensors.item_bytes

        def claims() -> Iterator[tuple[Ints, Ints]]:
            for group, stored in self._stored_together(tensors, asked):
                item = item_bytes[group]
                at = np.searchsorted(stored.tensor, np.arange(len(item)))
                begins[group] = data_start[stored.file[at]] + stored.offset[at]
                read = stored
                if read_bounds is not None:
                    start, stop = read_bounds[group][stored.tensor].T
                    read = stored.take((stored.start < stop) & (stored.stop > start))
                numbers, at, _ = distinct(read.file)
                for number, request in zip(numbers.tolist(), read.tensor[at].tolist(), strict=True):
                    first.setdefault(number, tensors[group.start + request].key)
                yield stored.file, stored.numel * item[stored.tensor]

        index_format.check_claims(self.manifest, claims())
        if not self.is_remote or sum(tensors.nbytes.tolist()) > unmeasured_bytes:
            self.check_lengths(first)
        return begins[number]

    @property
    def is_remote(self) -> bool:
        """Whether a request to the store takes so long that several are made at a time, even for a few bytes."""
        return self.store.requests_in_flight > 0

    def check_lengths(self, keys: Mapping[int, str | None]) -> None:
        """Checks the lengths of several data files, as ``check_length`` does. ``keys`` has the number of each file, and
        the key of the tensor that its error names. If several files are wrong, raises the error of the first one."""
        checks = self._length_checks(keys)
        if not self.is_remote or len(checks) < 2:
            for check in checks:
                check()
            return
        from zckpt.transfer.tasks import run_tasks  # imported late, because a listing needs no torch

        run_tasks(checks, self.store.requests_in_flight)

    def _length_checks(self, keys: Mapping[int, str | None]) -> list[Callable[[], object]]:
        return [
            partial(self.check_length, number, keys[number]) for number in sorted(keys) if number not in self._sized
        ]

    def checks_beside(self, keys: Mapping[int, str | None], *, verify: bool) -> list[Callable[[], object]]:
        """Returns functions that have to be called before bytes of some files are used, and may be called while the
        bytes are read. They check the lengths and, with ``verify``, read the digest tables. ``keys`` is as for
        ``check_lengths``. If a request to the store takes no time, there are none: the lengths are checked before the
        read, and each table is read when it is needed."""
        if not self.is_remote:
            return []
        ranks = sorted({self.manifest.files.rank[number] for number in keys}) if verify else []
        return [*self._length_checks(keys), *(partial(self.digest_table, rank) for rank in ranks)]

    def check_index_length(self) -> None:
        """Raises FormatError (F001, F002 or I001) unless the index is there and as long as recorded."""
        path, expected = names.index_path(self.manifest.save_id), self.manifest.index_bytes
        nbytes = self.reader.size(path)
        if nbytes != expected:
            raise broken("I001", f"the index is {nbytes} bytes long, expected {expected}", file=path)

    def check_length(self, number: int, key: str | None = None) -> None:
        """Raises FormatError (F001 to F003) unless the data file is there and as long as recorded. The error names
        ``key``."""
        if number in self._sized:
            return
        file = self.manifest.files[number]
        path = self.manifest.path(file)
        nbytes = self.reader.size(path)
        if nbytes != file.nbytes:
            raise broken("F003", f"the file is {nbytes} bytes long, expected {file.nbytes}", file=path, key=key)
        self._sized.add(number)

    def header_bytes(self, number: int) -> bytes:
        """Returns all bytes before the data of a data file. Of what they say, only their number has been checked.
        Raises FormatError (F001 to F003, S001, S003)."""
        file = self.manifest.files[number]
        self.check_length(number)
        return read_header(self.reader, self.manifest.path(file), file.data_start)


def read_header(reader: Reader, path: str, expected_bytes: int | None = None) -> bytes:
    """Returns all bytes before the data of a data file. Raises FormatError (F001, F002 or S001) if they cannot be read,
    FormatError (S003) if their number breaks the rule or is not ``expected_bytes``, and StorageError."""
    nbytes = data_file_format.header_bytes(reader.read(path, 0, data_file_format.LENGTH_BYTES), path)
    if expected_bytes is not None and nbytes != expected_bytes:
        raise broken("S003", f"the data begins at {nbytes}, expected {expected_bytes}", file=path)
    return reader.read(path, 0, nbytes)


def plain_root(manifest: Manifest) -> dict[Any, Any]:
    """Returns the tree that all ranks share, with None in the place of each tensor and array. It is empty if the tree
    is not a map. Raises FormatError."""
    root = tree.unpack(manifest.state, lambda extension, name: None, names.MANIFEST)
    return root if isinstance(root, dict) else {}
