"""Finds out by the names of its files which format a folder is in."""

from __future__ import annotations

import os
from typing import NamedTuple

from zckpt.checkpoint.listing import other_formats
from zckpt.checkpoint.listing.runs import nothing_at, read_latest
from zckpt.errors import CheckpointNotFoundError, FormatError, UnsupportedError, first_few, from_os_error, printable
from zckpt.format import names
from zckpt.storage.schemes import open_store

DEEPSPEED, HUGGINGFACE, ZCKPT = "deepspeed", "huggingface", "zckpt"
DCP, ACCELERATE_FSDP, TORCH_FILE = "dcp", "accelerate_fsdp", "torch_file"
_READ = {
    other_formats.DEEPSPEED: DEEPSPEED, other_formats.HUGGING_FACE: HUGGINGFACE, other_formats.DCP: DCP,
    other_formats.ACCELERATE_FSDP: ACCELERATE_FSDP,
}  # fmt: skip
_GIVE = (
    "give the folder of a checkpoint of DeepSpeed, of a Universal Checkpoint, of DCP or of a Hugging Face model, or a "
    "file of torch.save"
)


class FoundCheckpoint(NamedTuple):
    """A checkpoint that was found, and its format."""

    format: str
    """The format: one of the names above."""
    path: str
    """The directory of the checkpoint itself, even if the caller named the directory of a run."""


def find_format(path: str, tag: str | None) -> FoundCheckpoint:
    """Finds the checkpoint at ``path``. If ``path`` is the directory of a run, this is the checkpoint that ``tag``
    names, or without ``tag`` the one that ``latest`` names. Raises CheckpointNotFoundError, UnsupportedError for the
    format of another program, FormatError for a ``latest`` that cannot be the name of a checkpoint, and
    StorageError."""
    run = os.path.dirname(path) if tag is None else path
    if tag is not None:
        path = os.path.join(path, tag)
    if os.path.isfile(path):
        return FoundCheckpoint(TORCH_FILE, path)
    entries = _entries(path, run)
    latest = next((name for name in (names.LATEST, other_formats.LATEST_UNIVERSAL) if name in entries), None)
    if tag is None and latest is not None and _format(entries) not in (DEEPSPEED, DCP, ZCKPT):
        run, path = path, os.path.join(path, _named(path, latest))
        entries = _entries(path, run)
    format_name = _format(entries)
    if format_name is None:
        raise _unknown(path, entries)
    return FoundCheckpoint(format_name, path)


def _format(entries: list[str]) -> str | None:
    """Returns the format of a folder with these files, or None if zckpt cannot convert it."""
    other = other_formats.other_format(entries)
    if names.MANIFEST in entries:
        return ZCKPT
    return None if other is None else _READ.get(other)


def _unknown(path: str, entries: list[str]) -> Exception:
    """Returns the error for a folder that is in no format that zckpt can convert."""
    other = other_formats.other_format(entries)
    if other is not None:
        return UnsupportedError(f"{printable(path)} is {other.what}", hint=other.hint)
    if any(map(names.is_data_dir, entries)):
        what = "holds the data of a write of zckpt that never committed"
        return UnsupportedError(f"{printable(path)} {what}", hint=_GIVE)
    return CheckpointNotFoundError(
        f"there is no checkpoint of a known format: it has {first_few(entries, 5) or 'no entries'}",
        file=path,
        hint=those_in(path) or _GIVE,
    )


def those_in(path: str) -> str:
    """Returns a hint that names the checkpoints in a folder that can be converted. It is empty if there are none."""
    try:
        formats = {name: _format(_listed(os.path.join(path, name))) for name in sorted(os.listdir(path))}
    except OSError:
        return ""
    found = first_few([name for name, kind in formats.items() if kind not in (None, ZCKPT)], 5)
    return f"give one of the checkpoints in {printable(path)}, by its path or as tag (--tag): {found}" if found else ""


def _listed(path: str) -> list[str]:
    return os.listdir(path) if os.path.isdir(path) else []


def _entries(path: str, run: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        raise nothing_at(open_store(path), those_in(run), _GIVE) from None
    except OSError as error:
        raise from_os_error(error, "list", path) from error


def _named(run: str, latest: str) -> str:
    """Returns the tag that a file ``latest`` contains. ``read_latest`` refuses a tag that leads out of the run."""
    try:
        return read_latest(open_store(run), latest)
    except FormatError as error:
        error.hint = those_in(run) or _GIVE
        raise
