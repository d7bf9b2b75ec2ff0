"""A checkpoint as the source of an export, or of other files that are made of its tensors."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt.errors import FormatError, KeyNotFoundError
from zckpt.exporting.plan import SourceTensor
from zckpt.format import names
from zckpt.plan.reshard import Span
from zckpt.reading.checkpoint import Checkpoint, Want
from zckpt.transfer.memory import check_cast
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from zckpt.exporting.plan import Conversion, OutputFile
    from zckpt.listing.contents import TensorInfo
    from zckpt.transfer.budget import Budget

READ_BYTES_MIN = 2 << 20
"""The smallest budget, in bytes, of one thread that reads."""


class CheckpointFiller:
    """Tensors of a checkpoint, of which files are made. This is a ``Filler``: each thread that calls it reads on its
    own."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        infos: Mapping[str, TensorInfo],
        sources: Mapping[str, SourceTensor],
        budget: Budget,
        copies: Mapping[str, int] | None = None,
    ) -> None:
        """``infos`` and ``sources``: each tensor by its name, as it is stored and as it is wanted. ``copies``: for some
        of the tensors, the number of the copy that is read. Reading takes half of ``budget``. Raises FormatError (F001
        to F003) for files that are cut short or missing."""
        checkpoint.contents.check_sizes(infos.values())
        self.infos, self.sources, self._copies = infos, sources, copies or {}
        threads = max(min(budget.threads, budget.nbytes // (2 * READ_BYTES_MIN)), 1)
        self.budget = replace(budget, threads=threads)
        """What ``write_files`` may use. It has no more threads than there is memory for, to read and to write in."""
        own_bytes = max(budget.nbytes // threads // 2, READ_BYTES_MIN)
        own = replace(budget, nbytes=own_bytes, threads=1)
        self._checkpoint = Checkpoint(checkpoint.path, checkpoint.contents, own)
        self._starts: dict[str, list[int]] = {}
        self.advance: Callable[[int], None] = lambda nbytes: None
        """It is called with the number of bytes that have been read."""

    def nbytes(self, files: Iterable[OutputFile], conversions: Iterable[Conversion] = ()) -> int:
        """Returns how many bytes are read to write ``files``."""
        tensors = [tensor for file in files for tensor in file.tensors.values()]
        made = {tensor.name for tensor in tensors if tensor.runs is None}
        runs = [run for tensor in tensors for run in tensor.runs or ()]
        whole = {name for one in conversions if made.intersection(one.outputs) for name in one.sources}
        return sum((run.stop - run.start) * self.infos[run.source].item_bytes for run in runs) + sum(
            self.infos[name].nbytes for name in whole
        )

    def fill(self, targets: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """Does what ``Filler.fill`` says. Raises FormatError and StorageError."""
        wants = [
            Want(self.infos[name], [Span(start, start + target.numel(), 0)], target, self._copies.get(name))
            for name, start, target in targets
        ]
        if wants:
            self._checkpoint.read(wants, advance=self.advance)

    def cut(self, source: str, start: int, stop: int) -> int:
        """Returns the end of the last block before ``stop``, so that no block is read twice to be verified."""
        info = self.infos[source]
        if source not in self._starts:
            self._starts[source] = sorted({piece.start for piece in info.pieces})
        starts = self._starts[source]
        begin = starts[bisect_right(starts, stop) - 1]
        block = self._checkpoint.manifest.block_bytes // info.item_bytes
        end = begin + (stop - begin) // block * block
        return end if end > start else stop


class CheckpointSource(CheckpointFiller):
    """The weights and buffers of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None, budget: Budget) -> None:
        """``dtype``: the dtype that floating point tensors, buffers too, are converted to, as ``model.to(dtype)``
        converts them. None means that they stay as they are stored. Raises KeyNotFoundError if there are no weights,
        CastError, and what ``CheckpointFiller`` raises."""
        self.save_id = checkpoint.manifest.save_id
        infos = checkpoint.weights()
        if not infos:
            raise KeyNotFoundError(
                f"the checkpoint has no weights: its parts are {', '.join(checkpoint.parts) or 'none'}",
                hint="export a checkpoint that was written with the part master or param",
            )
        self.aliases = {alias: name for alias, name in checkpoint.aliases.items() if name in infos}
        self.adapters = _adapters(checkpoint)
        sources: dict[str, SourceTensor] = {}
        for name, info in infos.items():
            wanted = dtype if dtype is not None and info.dtype.is_floating_point else info.dtype
            check_cast(info.dtype, wanted, info.key)
            sources[name] = SourceTensor(DTYPE_NAMES[wanted], info.shape)
        super().__init__(checkpoint, infos, sources, budget)

    @contextmanager
    def own_config(self) -> Iterator[str | None]:
        """Yields None, because a checkpoint does not hold the configuration of its model."""
        yield None


def _adapters(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the configurations of the model's adapters, by the adapters' names. Raises FormatError."""
    root = checkpoint.state
    adapters = root.get(names.ADAPTERS, {}) if isinstance(root, dict) else {}
    if not isinstance(adapters, dict) or not all(isinstance(text, str) for text in adapters.values()):
        raise FormatError("state: adapters is not a map from names to texts", file=checkpoint.path)
    return adapters
