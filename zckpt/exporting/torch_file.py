"""Plans a file as ``torch.save`` writes it, without having its tensors in memory."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import torch

from zckpt.exporting.plan import ExportPlan, OutputFile, OutputTensor, Run
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zckpt.exporting.plan import Source


def plan_torch_file(sources: Mapping[str, Source], aliases: Mapping[str, str], name: str) -> ExportPlan:
    """Plans one file of this name. ``torch.load`` with ``weights_only=True`` returns from it a dict of all tensors. A
    tied weight has all of its names in the dict, which share its memory. ``aliases``: the other names of tied weights.

    torch itself writes the file with gaps in the place of the tensors, and says where they are. The checksums that a
    zip file has are therefore not those of the tensors, as with ``torch.serialization.set_crc32_options(False)``; torch
    does not read them.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    with FakeTensorMode(), tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, name)
        own = {key: torch.empty(source.shape, dtype=TORCH_DTYPES[source.dtype]) for key, source in sources.items()}
        names = {key: key for key in sources} | {alias: key for alias, key in aliases.items() if key in sources}
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save({alias: own[key] for alias, key in names.items()}, path)
        loaded = torch.load(path, weights_only=True)
        tensors = {
            loaded[key].untyped_storage()._checkpoint_offset: OutputTensor(
                key, source.dtype, source.shape, (Run(key, 0, own[key].numel()),)
            )
            for key, source in sources.items()
            if own[key].numel()
        }
        known: dict[int, bytes] = {}
        with open(path, "rb") as file:
            stop = 0
            for start in (*sorted(tensors), os.path.getsize(path)):
                file.seek(stop)
                known[stop] = file.read(start - stop)
                if start in tensors:
                    stop = start + tensors[start].nbytes
            nbytes = file.tell()
    return ExportPlan((OutputFile(name, nbytes, {at: data for at, data in known.items() if data}, tensors),))
