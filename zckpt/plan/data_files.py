"""Plans the data files of a rank: their names, headers, offsets and block numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zckpt.errors import UnsupportedError
from zckpt.format.data_file import DataFileId, encode_header
from zckpt.format.digest import DIGEST_BYTES, block_count
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.limits import DATA_ALIGNMENT_BYTES, DIGEST_TABLE_BYTES_MAX
from zckpt.format.names import FILLER_PREFIX, Tier, piece_name
from zckpt.geometry import runs_of_equal
from zckpt.plan.inventory import ANY_TIME, FileRange, Fragment

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from zckpt.format.data_file import EntryFields
    from zckpt.geometry import Ints

HEADER, FILLER = -1, -2
"""The sources of the regions that are not pieces."""
SHARED_BYTES_MIN = 64 << 10
"""The length in bytes from which adjacent fragments in a swap file are a long run."""
HOST_BYTES_MIN = 1 << 20
"""The length in bytes from which adjacent fragments in host memory are a long run."""


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The regions of a data file as int64 columns, in the order of their bytes: the header, then the pieces, with
    fillers between them.

    ``source`` is a position in ``DataFilePlan.fragments``, or HEADER or FILLER. ``start`` and ``nbytes`` are counted in
    bytes of the file. ``block`` is the number of the first digest of the region, counted from the first digest of the
    file.
    """

    source: Ints
    start: Ints
    nbytes: Ints
    block: Ints


@dataclass(frozen=True, slots=True)
class DataFilePlan:
    """A data file that is to be written. It begins with ``header``. The bytes of ``fragments`` follow in their order,
    at the offsets that ``regions`` gives. ``places`` says where these bytes are now. The digests of the file begin at
    number ``first_block`` of the digest table of the rank.

    If ``is_copy``, the file has the same bytes as the file of the same path in the checkpoint that is copied. Then
    ``header`` and ``fragments`` are empty, and the sources of all regions but the header are numbered from 0.
    """

    id: DataFileId
    header: bytes
    fragments: tuple[Fragment, ...]
    places: FragmentPlaces
    regions: Regions
    nbytes: int
    first_block: int
    blocks: int
    is_copy: bool = False
    is_range: bool = False
    """Whether other ranks write other ranges of the file (``plan.together``). Then this has the fragments and regions
    of one range, ``nbytes`` is the size of the range, and the regions have their places in the whole file."""

    def place_of(self, source: int) -> tuple[str, int]:
        """Returns where the bytes of a source begin in the checkpoint that is copied: the path of the file, and the
        byte of that file."""
        if self.is_copy:
            return self.id.path, int(self.regions.start[source + 1])
        data = self.fragments[source].data
        assert isinstance(data, FileRange), "what is copied lies in a file"
        return data.path, data.offset

    def reading(self, fragments: Sequence[Fragment]) -> DataFilePlan:
        """Returns the plan of the same file whose bytes are read from elsewhere: from the ``data`` of ``fragments``."""
        return replace(self, fragments=tuple(fragments), places=FragmentPlaces.of(fragments))

    @property
    def on_devices(self) -> Iterator[Fragment]:
        """The fragments whose bytes are neither in host memory nor in a file."""
        return (self.fragments[number] for number in np.flatnonzero(self.places.path < 0).tolist())

    @property
    def pieces(self) -> Regions:
        """The regions of ``fragments``, one for each fragment. Here, ``start`` is counted from the first byte of the
        file's data."""
        is_piece = self.regions.source >= 0
        source, start, nbytes, block = (
            getattr(self.regions, column)[is_piece] for column in ("source", "start", "nbytes", "block")
        )
        return Regions(source, start - len(self.header), nbytes, block)

    @property
    def reserves(self) -> bool:
        """Whether the space of the file is reserved before the first write. That of the states of a swap file is not,
        because the data file may share their pages and then needs no space."""
        return self.id.tier is not Tier.NVME


def plan_data_files(
    fragments: Sequence[Fragment],
    save_id: str,
    rank: int,
    world_size: int,
    *,
    block_bytes: int,
    copied: Collection[str] = ANY_TIME,
    places: FragmentPlaces | None = None,
) -> tuple[DataFilePlan, ...]:
    """Plans the data files of one rank, in the order of their digests in the rank's digest table.

    The pieces keep the order of ``fragments``, so bytes that are adjacent in memory are adjacent in the file. If a file
    has elements of several sizes, the larger elements come first. So each piece begins at a multiple of the size of its
    elements.

    ``copied`` names the parts that are always copied to a staging buffer before they are written. The layout of their
    files does not depend on their addresses in memory, so later saves can share these files. ``places`` are those of
    ``fragments``, if the caller has them.

    Raises UnsupportedError, or FormatError (S001), if there is more than the format can hold.
    """
    parts = {part: number for number, part in enumerate(dict.fromkeys(fragment.part for fragment in fragments))}
    file = np.array([parts[fragment.part] * len(Tier) + fragment.tier for fragment in fragments], np.int64)
    places = FragmentPlaces.of(fragments) if places is None else places
    order = _order(file, places.item_bytes)
    plans: list[DataFilePlan] = []
    first_block = 0
    for begin, end in runs_of_equal(file[order]):
        group = [fragments[number] for number in order[begin:end].tolist()]
        data_file = DataFileId(save_id, rank, world_size, group[0].part, group[0].tier)
        in_memory = group[0].part not in copied
        of_group = places.take(order[begin:end])
        plan = _plan_data_file(data_file, group, of_group, first_block, block_bytes, in_memory=in_memory)
        plans.append(plan)
        first_block += plan.blocks
    if first_block * DIGEST_BYTES > DIGEST_TABLE_BYTES_MAX:
        raise UnsupportedError(
            f"rank {rank} would have {first_block:,} blocks of {block_bytes:,} bytes; the format can hold "
            f"{DIGEST_TABLE_BYTES_MAX // DIGEST_BYTES:,} of each rank",
            hint="leave parts out with `exclude`, and write them as a checkpoint of their own with `parts`",
        )
    return tuple(plans)


def _order(file: Ints, item_bytes: NDArray[np.int8]) -> Ints:
    """Returns the order of fragments in the data files ``file``: the larger elements of a file come first."""
    return np.lexsort((-item_bytes, file))


def _plan_data_file(
    data_file: DataFileId,
    fragments: list[Fragment],
    places: FragmentPlaces,
    first_block: int,
    block_bytes: int,
    *,
    in_memory: bool,
) -> DataFilePlan:
    """Returns the plan of one data file. A filler goes before each long run in a swap file and, with ``in_memory``, in
    host memory, if the run needs one."""
    nbytes = places.nbytes
    first_of_run = places.long_runs(in_memory=in_memory)
    offset = np.cumsum(nbytes) - nbytes
    gap = np.zeros_like(nbytes)
    gap_bytes = 0
    for number in np.flatnonzero(first_of_run == np.arange(len(fragments))).tolist():
        # With this gap, the run begins as far behind the start of a page in the file as it does at its place.
        gap[number] = (int(places.start[number] - offset[number]) - gap_bytes) % DATA_ALIGNMENT_BYTES
        gap_bytes += int(gap[number])
    offset += np.cumsum(gap)
    _, tensors, dtypes, spans, *_ = zip(*fragments, strict=True)
    names = [*map(piece_name, tensors, spans)]
    named = [*map(str.__eq__, names, tensors)]
    shapes = {tensor: span.grid.shape for tensor, span, whole in zip(tensors, spans, named, strict=True) if not whole}
    sections = {tensor: span.grid.sections for tensor, span in zip(tensors, spans, strict=True) if span.grid.sections}
    shape_of = [span.grid.shape if whole else (span.numel,) for span, whole in zip(spans, named, strict=True)]
    # A memoryview yields one integer at a time. A list of them would have 40 bytes for each piece.
    columns = (names, dtypes, shape_of, memoryview(offset), memoryview(nbytes))
    header = encode_header(data_file, _with_fillers(zip(*columns, strict=True), gap), shapes, sections)
    after_gap = np.flatnonzero(gap)
    sources = np.insert(np.arange(len(fragments)), after_gap, FILLER)
    region_bytes = np.insert(nbytes, after_gap, gap[after_gap])
    regions, blocks = _regions(np.append(HEADER, sources), np.append(len(header), region_bytes), block_bytes)
    file_bytes = int(regions.nbytes.sum())
    return DataFilePlan(data_file, header, tuple(fragments), places, regions, file_bytes, first_block, blocks)


def _with_fillers(pieces: Iterable[EntryFields], gap: Ints) -> Iterator[EntryFields]:
    """Yields the entries of a data file: the pieces, and a filler before each piece that ``gap`` has bytes for."""
    for number, (piece, size) in enumerate(zip(pieces, gap.tolist(), strict=True)):
        if size:
            yield f"{FILLER_PREFIX}{number}", "U8", (size,), piece[3] - size, size
        yield piece


def _regions(sources: Ints, nbytes: Ints, block_bytes: int) -> tuple[Regions, int]:
    """Returns the regions of a file and the number of their blocks, given the source and the size in bytes of each
    region."""
    stops, counts = np.cumsum(nbytes), block_count(nbytes, block_bytes)
    block_stops = np.cumsum(counts)
    return Regions(sources, stops - nbytes, nbytes, block_stops - counts), int(block_stops[-1])


def plan_copied_file(data_file: DataFileId, region_bytes: Ints, first_block: int, *, block_bytes: int) -> DataFilePlan:
    """Returns the plan of a data file that is the same, byte for byte, as the file that it is a copy of.
    ``region_bytes`` has the size of each region in bytes, the header first."""
    regions, blocks = _regions(np.arange(len(region_bytes)) + HEADER, region_bytes, block_bytes)
    file_bytes, places = int(region_bytes.sum()), FragmentPlaces.of(())
    return DataFilePlan(data_file, b"", (), places, regions, file_bytes, first_block, blocks, is_copy=True)


def plan_range(
    alone: DataFilePlan,
    data_file: DataFileId,
    header: bytes,
    start: int,
    padding: int,
    first_block: int,
    *,
    block_bytes: int,
) -> DataFilePlan:
    """Returns the plan of a range of a file that several ranks write. The range begins at byte ``start``, with
    ``header`` if it is the first. It has the data of ``alone``, and then a filler of ``padding`` bytes."""
    sources, nbytes = alone.regions.source[1:], alone.regions.nbytes[1:]
    if padding:
        sources, nbytes = np.append(sources, FILLER), np.append(nbytes, padding)
    if header:
        sources, nbytes = np.append(HEADER, sources), np.append(len(header), nbytes)
    regions, blocks = _regions(sources, nbytes, block_bytes)
    regions = replace(regions, start=regions.start + start)
    return DataFilePlan(
        data_file, header, alone.fragments, alone.places, regions, int(nbytes.sum()), first_block, blocks, is_range=True
    )


class FragmentPlaces(NamedTuple):
    """Where the bytes of fragments are, as columns. ``path`` is 0 for host memory, the number of a swap file in
    ``paths``, or -1 for memory of a device and for fragments without ``data``. ``start`` is the first byte in the file,
    or the address in host memory. A write has these columns from the check of its fragments on, because to look at very
    many tensors again for each of its steps would take longer than the steps."""

    paths: tuple[str, ...]
    path: NDArray[np.int32]
    start: Ints
    nbytes: Ints
    item_bytes: NDArray[np.int8]

    @classmethod
    def of(cls, fragments: Iterable[Fragment]) -> FragmentPlaces:
        numbers = {"": 0}
        path: list[int] = []
        start: list[int] = []
        numel: list[int] = []
        item_bytes: list[int] = []
        for _, _, dtype, (_, first, stop), _, _, data, _ in fragments:
            numel.append(stop - first)
            item_bytes.append(ITEM_BYTES[dtype])
            if isinstance(data, FileRange):
                path.append(numbers.setdefault(data.path, len(numbers)))
                start.append(data.offset)
                continue
            if data is not None:
                assert data.nbytes == (stop - first) * ITEM_BYTES[dtype], "a fragment's data are its elements"
                assert data.is_contiguous(), "a fragment's data lie in order"
            if data is not None and data.is_cpu:
                path.append(0)
                start.append(data.data_ptr())
            else:
                path.append(-1)
                start.append(0)
        size = np.array(item_bytes, np.int8)
        nbytes = np.array(numel, np.int64) * size
        return cls(tuple(numbers), np.array(path, np.int32), np.array(start, np.int64), nbytes, size)

    def take(self, which: Ints) -> FragmentPlaces:
        """Returns the places of some of the fragments."""
        columns: Iterable[Any] = (column[which] for column in self[1:])
        return FragmentPlaces(self.paths, *columns)

    def narrowed(self, which: Ints, first: Ints, numel: Ints) -> FragmentPlaces:
        """Returns the places of parts of some of the fragments: of ``numel`` elements from element ``first`` on."""
        taken = self.take(which)
        return taken._replace(start=taken.start + first * taken.item_bytes, nbytes=numel * taken.item_bytes)

    def joined(self, other: FragmentPlaces) -> FragmentPlaces:
        """Returns these places, and those of ``other`` after them."""
        paths = [*dict.fromkeys(self.paths + other.paths)]
        number = np.array([*map(paths.index, other.paths), -1], np.int32)
        columns: Any = zip(self[1:], other._replace(path=number[other.path])[1:], strict=True)
        return FragmentPlaces(tuple(paths), *map(np.concatenate, columns))

    def begin(self, number: int, byte: int) -> tuple[str, int]:
        """Returns where a byte of a fragment is: the path of a swap file and an offset in it, or the empty path and an
        address in host memory."""
        return self.paths[self.path[number]], int(self.start[number] + byte)

    @property
    def address(self) -> Ints:
        """The address of each fragment in host memory, or -1."""
        return np.where(self.path == 0, self.start, -1)

    def long_runs(self, *, in_memory: bool) -> Ints:
        """Finds the fragments that belong to long runs. Returns for each fragment the first fragment of its run, or -1.

        A run is a sequence of fragments whose bytes are adjacent in a swap file or, with ``in_memory``, in the memory
        of the host. If a run begins as far behind the start of a page in the data file as in the swap file, the data
        file can share pages with the swap file. The same holds for memory: then the run is written from it without a
        copy."""
        some = np.flatnonzero(self.nbytes)
        path, start, nbytes, item_bytes = (column[some] for column in self[1:])
        # In the data file, each piece begins at a multiple of the size of its elements.
        can_be_long = (path >= (0 if in_memory else 1)) & (start % item_bytes == 0)
        begins = np.ones(len(some), bool)
        begins[1:] = ~(can_be_long[1:] & can_be_long[:-1]) | (np.diff(path) != 0) | (np.diff(start) != nbytes[:-1])
        first = np.flatnonzero(begins)
        bytes_min = np.where(path[first] > 0, SHARED_BYTES_MIN, HOST_BYTES_MIN)
        is_long = can_be_long[first] & (np.add.reduceat(nbytes, first) >= bytes_min)
        first_of_run = np.full(len(self.nbytes), -1)
        first_of_run[some] = np.repeat(np.where(is_long, some[first], -1), np.diff(first, append=len(some)))
        return first_of_run
