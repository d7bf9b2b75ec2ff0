"""Reads the tensors of a checkpoint for an export, or for other files that are made of them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt.checkpoint.reading.loader import Loader, ReadRequest
from zckpt.errors import FormatError, KeyNotFoundError
from zckpt.format import names
from zckpt.plan.inventory import BUFFER, unconverted
from zckpt.tools.blocks import block_end
from zckpt.tools.exporting.plan import SourceTensor
from zckpt.transfer.memory import check_cast
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from zckpt.checkpoint.listing.tensors import TensorInfo
    from zckpt.geometry import Ints
    from zckpt.tools.exporting.plan import Extent, OutputFile
    from zckpt.transfer.budget import Budget

READ_BYTES_MIN = 2 << 20
"""The smallest number of bytes of memory with which a thread reads."""


class CheckpointFiller:
    """Reads tensors of a checkpoint. Several threads may call it at the same time, and each reads on its own."""

    def __init__(
        self,
        checkpoint: Loader,
        infos: Mapping[str, TensorInfo],
        budget: Budget,
        copies: Mapping[str, int] | None = None,
    ) -> None:
        """``infos``: the tensors as they are stored, by name. ``copies``: for some of the tensors, the number of the
        copy that is read. Reading takes half of ``budget``. Raises FormatError (F001 to F003) if a file is missing or
        cut short."""
        checkpoint.contents.check_sizes(infos.values())
        self.infos, self._copies = infos, copies or {}
        threads = max(min(budget.threads, budget.nbytes // (2 * READ_BYTES_MIN)), 1)
        self.budget = replace(budget, threads=threads)
        """The budget for ``write_files``. It has fewer threads than the given one if its memory is too small for them
        to read and to write."""
        read_bytes = max(budget.nbytes // threads // 2, READ_BYTES_MIN)
        budget_of_thread = replace(budget, nbytes=read_bytes, threads=1)
        self._checkpoint = Loader(checkpoint.path, checkpoint.contents, budget_of_thread)
        self._starts: dict[str, Ints] = {}
        """The first elements of the pieces of tensors, in ascending order, by the name of the tensor."""
        self.advance: Callable[[int], None] = lambda nbytes: None
        """A function that is called with the number of bytes that have been read since its last call."""

    def nbytes(self, files: Iterable[OutputFile]) -> int:
        """Returns the number of bytes that are read to write ``files``."""
        tensors = [tensor for file in files for tensor in file.tensors.values()]
        extents = [extent for tensor in tensors for extent in tensor.extents or ()]
        converted = {extent for tensor in tensors if tensor.conversion for extent in tensor.conversion.sources}
        return sum(extent.span.numel * self.infos[extent.source].item_bytes for extent in (*extents, *converted))

    def fill(self, targets: Sequence[tuple[Extent, torch.Tensor]]) -> None:
        """Fills 1-D tensors in host memory, each with the elements of an extent, which are converted to its dtype.
        Raises FormatError and StorageError."""
        requests = [
            ReadRequest(self.infos[name], span, target, self._copies.get(name)) for (name, span), target in targets
        ]
        if requests:
            self._checkpoint.read(requests, advance=self.advance)

    def cut(self, extent: Extent) -> int:
        """Returns the element at which the last block ends that ends in the extent, or the end of the extent. A part
        that ends with a block needs no block that the next part needs too."""
        source, span = extent
        info = self.infos[source]
        if self._checkpoint.contents.grid(info) != span.grid:  # Its blocks have other elements in between.
            return span.stop
        if source not in self._starts:
            self._starts[source] = self._checkpoint.contents.stored([info], [self._copies.get(source, -1)], None).start
        block_items = self._checkpoint.manifest.block_bytes // info.item_bytes
        return block_end(span.start, span.stop, self._starts[source], block_items)


class CheckpointSource(CheckpointFiller):
    """The weights and buffers of a checkpoint as the source of an export."""

    def __init__(self, checkpoint: Loader, dtype: torch.dtype | None, budget: Budget) -> None:
        """``dtype``: the dtype to which all floating point tensors are converted, including buffers, as
        ``model.to(dtype)`` does. None means that they keep the stored dtypes. Raises KeyNotFoundError if there are no
        weights, CastError, and the errors of ``CheckpointFiller``."""
        self.save_id, self.path = checkpoint.manifest.save_id, checkpoint.path
        infos = checkpoint.weights()
        refuse_no_weights(checkpoint, infos.values())
        self.aliases = {alias: name for alias, name in checkpoint.manifest.aliases.items() if name in infos}
        self.adapters = _adapters(checkpoint)
        self.sources: dict[str, SourceTensor] = {}
        """The tensors by name, with the dtypes to which they are converted."""
        kept = unconverted(checkpoint.extra_state)
        for name, info in infos.items():
            target_dtype = dtype if dtype and info.dtype.is_floating_point and name not in kept else info.dtype
            check_cast(info.dtype, target_dtype, info.key)
            self.sources[name] = SourceTensor(DTYPE_NAMES[target_dtype], info.shape)
        super().__init__(checkpoint, infos, budget)

    @contextmanager
    def own_config(self, prefix: str) -> Iterator[str | None]:
        """Yields None, because a checkpoint does not contain the configuration of its model."""
        yield None


def refuse_no_weights(checkpoint: Loader, infos: Iterable[TensorInfo]) -> None:
    """Raises KeyNotFoundError if none of these tensors of a checkpoint is a weight."""
    if all(info.part == BUFFER for info in infos):
        raise KeyNotFoundError(
            f"the checkpoint has no weights: its parts are {', '.join(checkpoint.parts) or 'none'}",
            file=checkpoint.path,
            hint="take a checkpoint that was written with the part master or param",
        )


def _adapters(checkpoint: Loader) -> dict[str, str]:
    """Returns the texts of the configurations of the model's adapters, by the names of the adapters. Raises
    FormatError."""
    root = checkpoint.state
    adapters = root.get(names.ADAPTERS, {}) if isinstance(root, dict) else {}
    if not isinstance(adapters, dict) or not all(isinstance(text, str) for item in adapters.items() for text in item):
        raise FormatError("state: adapters is not a map from names to texts", file=checkpoint.path)
    return adapters
