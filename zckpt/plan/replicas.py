"""Tensors of which several ranks hold the same elements, such as the weights of data parallelism.

The fragments of a rank that other ranks may hold too are divided into *sets*, each with a label. Another rank either
holds all fragments of a set, as a set with any label, or none of them. So the ranks find out who holds a set by
comparing one digest of its layout, and whether all of them hold the same values by comparing a second digest. Each of
the ranks that hold a set writes one share of the elements of each fragment, so that each byte is written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgpack
import numpy as np

from zckpt.format.digest import digest
from zckpt.plan.inventory import FileRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.geometry import Span
    from zckpt.plan.data_files import FragmentPlaces
    from zckpt.plan.inventory import Fragment


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a set of replicas that one rank writes: one of ``count`` equal shares of each fragment, numbered
    from 0."""

    number: int
    count: int

    def of(self, span: Span) -> Span:
        """Returns the elements of ``span`` that belong to the share. All shares have the same length, which is rounded
        up, so the last ones may be shorter or empty."""
        length = -(-span.numel // self.count)
        start = min(self.number * length, span.numel)
        return span.narrow(start, min(length, span.numel - start))


WHOLE = Share(0, 1)


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """A set of replicas, as one rank holds it."""

    layout: bytes
    """A digest that is the same for two sets only if they have the same ranges of the same tensors."""
    values: bytes
    """A digest of all values. It is empty if some of the values are in files, because these are not read for it."""
    digests: Mapping[str, bytes]
    """The digest of each fragment by its key. It is empty for values in files."""

    @classmethod
    def of(cls, fragments: Sequence[Fragment], digests: Sequence[bytes]) -> ReplicaSet:
        """Returns the set of these fragments. ``digests``: those of their values."""
        layout = digest(
            msgpack.packb([(f.key, f.shape, f.span.grid.sections, f.dtype, *f.span[1:]) for f in fragments])
        )
        values = digest(b"".join(digests)) if all(digests) else b""
        return cls(layout, values, dict(zip((f.key for f in fragments), digests, strict=True)))


def own_shares(
    fragments: Sequence[Fragment], places: FragmentPlaces, shares: Mapping[str, Share]
) -> tuple[Sequence[Fragment], FragmentPlaces]:
    """Returns the fragments that this rank writes, and their places. ``fragments``, ``places``: those that it holds.
    ``shares``: its share of each set of replicas, by the label of the set."""
    if all(share == WHOLE for share in shares.values()):
        return fragments, places
    written: list[Fragment] = []
    parts: list[tuple[int, int, int]] = []
    for number, fragment in enumerate(fragments):
        held = fragment.span
        span = shares.get(fragment.replicated, WHOLE).of(held)
        if span.numel or not held.numel:  # Only one rank has the fragment of an empty tensor.
            written.append(narrowed(fragment, span))
            parts.append((number, span.start - held.start, span.numel))
    which, first, numel = np.array(parts, np.int64).reshape(-1, 3).T
    return written, places.narrowed(which, first, numel)


def narrowed(fragment: Fragment, span: Span) -> Fragment:
    """Returns the part of a fragment that has the elements of ``span``."""
    if span == fragment.span:
        return fragment
    data, start = fragment.data, span.start - fragment.span.start
    if isinstance(data, FileRange):
        item_bytes = data.nbytes // fragment.span.numel
        data = data.narrow(start * item_bytes, span.numel * item_bytes)
    elif data is not None:
        data = data.detach().view(-1)[start : start + span.numel]
    return fragment._replace(span=span, data=data)
