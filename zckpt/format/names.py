"""Names of tensors, parts, pieces, files and directories."""

from __future__ import annotations

import re

from zckpt.format.limits import LATEST_BYTES_MAX, NAME_BYTES_MAX
from zckpt.format.rules import broken

MANIFEST = "manifest.msgpack"
LATEST = "latest"
LOCK = "write.lock"
FILLER_PREFIX = "@"
METADATA = "__metadata__"
CLIENT_STATE = "client_state"
CLIENT_RANK_STATE = "client_rank_state"
"""The key of the caller's own values in the tree of state and in the tree of a rank."""
ADAPTERS = "adapters"
"""The key of the adapters' configurations in the tree of state of a PEFT model. Its value is a map from the name of
each adapter to the text of its configuration."""
TIER_PREFIX = {"device": "", "host": "host.", "nvme": "swap."}

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", re.ASCII)
_SAVE_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp", re.ASCII)
_OLD = re.compile(r"manifest\.msgpack\.[0-9a-f]{8}\.old", re.ASCII)
_RANK = re.compile(r"rank-([0-9]{5,7})", re.ASCII)
_PIECE = re.compile(r"(?s)(.*)@([0-9]{1,19}):([0-9]{1,19})", re.ASCII)
_SPAN_SUFFIX = re.compile(r"@[0-9]+:[0-9]+\Z", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def check_tensor_name(name: object, *, file: str | None = None) -> None:
    """Raises FormatError (N001, N002)."""
    if not isinstance(name, str):
        raise broken("N001", f"tensor name of type {type(name).__name__}", file=file)
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise broken("N001", f"tensor name {name!r} is not valid Unicode", file=file) from None
    if not 1 <= size <= NAME_BYTES_MAX:
        raise broken("N001", f"tensor name of {size} bytes: {name[:80]!r}", file=file)
    if _CONTROL.search(name):
        raise broken("N001", f"tensor name {name!r} has a control character", file=file)
    if name.startswith(FILLER_PREFIX) or name == METADATA or _SPAN_SUFFIX.search(name):
        raise broken("N002", f"tensor name {name!r} has a form that is reserved", file=file)


def check_part_name(part: object, *, file: str | None = None) -> None:
    """Raises FormatError (N003)."""
    if not (isinstance(part, str) and _PART.fullmatch(part)):
        raise broken("N003", f"part name {part!r}", file=file)


def check_save_id(save_id: object, *, file: str | None = None) -> None:
    """Raises FormatError (N004)."""
    if not (isinstance(save_id, str) and _SAVE_ID.fullmatch(save_id)):
        raise broken("N004", f"save id {save_id!r}", file=file)


def piece_name(name: str, start: int, stop: int, numel: int) -> str:
    """The name of a piece in a data file: the tensor's own if it is all of it, else ``name@start:stop``."""
    return name if (start, stop) == (0, numel) else f"{name}@{start}:{stop}"


def split_piece_name(entry: str) -> tuple[str, int, int] | None:
    """``(name, start, stop)`` of a partial piece; None if ``entry`` is a whole tensor's name."""
    match = _PIECE.fullmatch(entry)
    return (match[1], int(match[2]), int(match[3])) if match else None


def data_dir(save_id: str) -> str:
    return f"data-{save_id}"


def is_data_dir(name: str) -> bool:
    return name.startswith("data-") and _SAVE_ID.fullmatch(name[5:]) is not None


def temporary(of: str, digits: str) -> str:
    """The name of a temporary file that is to replace ``of``; eight hexadecimal ``digits`` make it unique."""
    return f"{of}.{digits}.tmp"


def prepared_digits(save_id: str) -> str:
    """The digits in the names of a write's temporary manifest and ``latest``. They come from the save id, so another
    process can compute these names without listing a directory."""
    return save_id[:8]


def is_temporary(name: str, of: str) -> bool:
    """Whether this is the name of a temporary file that was to replace ``of``."""
    return name.startswith(of) and _TEMPORARY.fullmatch(name[len(of) :]) is not None


def is_old(name: str) -> bool:
    """Whether a repair has put a damaged manifest aside under this name."""
    return _OLD.fullmatch(name) is not None


def index_path(save_id: str) -> str:
    """Relative to the checkpoint, as are all paths here; ``/`` separates."""
    return f"{data_dir(save_id)}/index.bin"


def rank_dir(save_id: str, rank: int) -> str:
    return f"{data_dir(save_id)}/rank-{rank:05d}"


def split_rank_dir(name: str) -> int | None:
    """The rank whose directory this is."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match else None


def digests_path(save_id: str, rank: int) -> str:
    return f"{rank_dir(save_id, rank)}/digests.bin"


def shard_path(save_id: str, rank: int, part: str, tier: str) -> str:
    return f"{rank_dir(save_id, rank)}/{TIER_PREFIX[tier]}{part}.safetensors"


def split_shard_name(name: str) -> tuple[str, str] | None:
    """``(part, tier)`` of a data file's name in its directory."""
    *prefix, part = name.removesuffix(".safetensors").split(".")
    tiers = {before: tier for tier, before in TIER_PREFIX.items()}
    tier = tiers.get(f"{prefix[0]}." if prefix else "")
    known = name.endswith(".safetensors") and len(prefix) < 2 and tier is not None and _PART.fullmatch(part)
    return (part, tier) if known and tier is not None else None


def encode_latest(name: str) -> bytes:
    """The bytes of a ``latest`` file that names the checkpoint ``name``, a path relative to the run. Raises FormatError
    (L001) for a path that cannot stand there."""
    raw = f"{name}\n".encode(errors="surrogateescape")
    decode_latest(raw, LATEST)
    return raw


def decode_latest(raw: bytes, file: str) -> str:
    """The path, relative to the run, in a ``latest`` file. Raises FormatError (L001)."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        name = ""
    name = name.removesuffix("\n")
    if len(raw) > LATEST_BYTES_MAX or _CONTROL.search(name) or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise broken("L001", f"`latest` holds {raw[:80]!r}", file=file)
    return name
