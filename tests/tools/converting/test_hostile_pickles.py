"""A small pickle that was made to take much memory or time is refused early, and what torch writes is not."""

from __future__ import annotations

import io
import pickle
import random
import struct
import tracemalloc
import zipfile
from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import zckpt
from tests.support.deepspeed_folders import make_folder, refused
from zckpt.tools.converting import restricted_pickle, torch_archive, write
from zckpt.tools.converting.restricted_pickle import MEMORY_GROWTH_MAX, load
from zckpt.transfer.stored import stored_range, with_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PRIME = (1 << 61) - 1
"""Python's hash of an integer is its remainder when it is divided by this number."""
START = b"\x80\x04"
CUT_OFF = "bytes of memory, or as much time"


def file_of(path: Path, raw: bytes, **records: bytes) -> str:
    with zipfile.ZipFile(path, "w") as made:
        for name, content in {"data.pkl": raw, **records}.items():
            made.writestr(f"archive/{name}", content)
    return str(path)


def integer(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def text(length: int, character: bytes = b"a") -> bytes:
    return b"X" + struct.pack("<I", length) + character * length


def pairs_of_one_hash() -> Iterator[bytes]:
    """Yields pairs that have the same hash. The hash of a tuple is that of XXH64, which can be computed backwards."""
    first, second, fifth, bits = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1
    hashes = set()

    def rotated(value: int, by: int) -> int:
        return (value << by | value >> (64 - by)) & bits

    for number in range(1, 1 << 20):
        after_number = rotated(fifth + number * second & bits, 31) * first
        other = (rotated(12345 * pow(first, -1, 1 << 64) & bits, 33) - after_number) * pow(second, -1, 1 << 64) & bits
        if other < PRIME:
            hashes.add(hash((number, other)))
            assert len(hashes) == 1
            yield integer(number) + integer(other) + b"\x86"


def collected(parts: Iterator[bytes], count: int) -> list[bytes]:
    return [part for part, _ in zip(parts, range(count), strict=False)]


def many_entries(count: int) -> bytes:
    return b"}(" + b"".join(text(4, b"%04x" % number)[:9] + b"N" for number in range(count)) + b"u"


COSTLY: dict[str, Callable[[], bytes]] = {
    "empty sets": lambda: b"(" + b"\x8f" * 20_000 + b"t",
    "empty dicts": lambda: b"(" + b"}" * 60_000 + b"l",
    "empty lists": lambda: b"(" + b"]" * 80_000 + b"l",
    "frozensets": lambda: b"(" + b"(N\x91" * 10_000 + b"l",
    "dicts of a number": lambda: b"(" + b"}K\x01Ns" * 60_000 + b"l",
    "memo": lambda: b"N" + b"\x94" * 40_000,
    "ordered dicts": lambda: b"ccollections\nOrderedDict\nq\x00(" + b"h\x00)R" * 20_000 + b"l",
    "inert objects": lambda: b"ctorch\nTensor\nq\x00(" + b"h\x00)\x81" * 20_000 + b"l",
    "attributes": lambda: b"ctorch\nTensor\nq\x00" + many_entries(900) + b"q\x01(" + b"h\x00)\x81h\x01b" * 200 + b"l",
    "copies of a list": lambda: b"cbuiltins\nset\nq\x00](" + b"".join(map(integer, range(900))) + b"e\x85q\x01("
        + b"h\x00h\x01R" * 200 + b"l",
    "paths": lambda: b"cpathlib\nPosixPath\nq\x00" + text(2000) + b"\x85q\x01(" + b"h\x00h\x01R" * 500 + b"l",
    "arguments": lambda: b"ctorch\nTensor\nq\x00(" + b"N" * 9000 + b"tq\x01(" + b"h\x00h\x01R" * 200 + b"l",
    "nested tuples": lambda: b"}K\x00\x85" + b"2\x86" * 60 + b"Ns",
    "numbers of one hash": lambda: b"}("
        + b"".join(integer(number * PRIME) + b"N" for number in range(1, 900)) + b"u",
    "tuples of one hash": lambda: b"}(" + b"N".join(collected(pairs_of_one_hash(), 900)) + b"Nu",
    "members of one hash": lambda: b"\x8f(" + b"".join(collected(pairs_of_one_hash(), 900)) + b"\x90",
    "frozen members of one hash": lambda: b"(" + b"".join(collected(pairs_of_one_hash(), 900)) + b"\x91",
    "called members of one hash": lambda: b"cbuiltins\nset\n](" + b"".join(collected(pairs_of_one_hash(), 900))
        + b"e\x85R",
    "long equal keys": lambda: text(1 << 16) + b"\x94" + text(1 << 16) + b"\x94}h\x00Ns(" + b"h\x01N" * 9000 + b"u",
    "long number as a key": lambda: b"\x8b" + struct.pack("<i", 1 << 20) + b"\x01" * (1 << 20) + b"\x94}("
        + b"h\x00N" * 2000 + b"u",
    "long tuple as a key": lambda: b"(" + b"N" * 9000 + b"t\x94}(" + b"h\x00N" * 300 + b"u",
}  # fmt: skip
"""The opcodes of pickles, without ``START`` and the last opcode."""


@pytest.mark.parametrize("kind", COSTLY)
def test_a_pickle_that_would_take_much_memory_or_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(restricted_pickle, "MEMORY_BYTES_MIN", 1 << 20)
    raw = START + COSTLY[kind]() + b"."
    path = file_of(tmp_path / "file.pt", raw)
    tracemalloc.start()
    try:
        with pytest.raises(zckpt.FormatError, match=CUT_OFF) as raised:
            load(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert raised.value.file == path
    assert peak_bytes < (2 << 20) + (MEMORY_GROWTH_MAX + 2) * len(raw)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"(" * 9000, "nested more than"),
        (b"N" + b"\x85" * 500_000 + b")R", "a call of a tuple"),
        (b"}N" + b"\x85" * 500_000 + b"Ns", "recursion"),
        (b"]" * 500_000 + b"a" * 499_999, "recursion"),
        (b"(N\x91\x94(h\x00(h\x00\x91\x91\x940(h\x01(h\x01\x91\x91", "a frozenset inside of a key"),
        (b"\x96" + struct.pack("<Q", 1 << 40), "cannot be read"),
        (b"cbuiltins\nbytes\n" + integer(1 << 40) + b"\x85R", "cannot be read"),
        (b"ccollections\nOrderedDict\n](N\x86N\x86ee\x85R", "cannot be read"),
        (
            b"cbuiltins\ngetattr\ncbuiltins\nint\n" + text(1) + b"\x86R",
            "asks for getattr",
        ),
        (
            b"cbuiltins\ngetattr\n" + text(1) + text(1) + b"\x86R",
            "asks for getattr",
        ),
        (b"cbuiltins\ngetattr\nctorch\nTensor\n]\x86R", "asks for getattr"),
    ],
)
def test_a_pickle_that_would_end_the_process(tmp_path: Path, raw: bytes, match: str) -> None:
    with pytest.raises(zckpt.FormatError, match=match):
        load(file_of(tmp_path / "file.pt", START + raw + b"."))


def test_a_set_item_of_a_tensor(tmp_path: Path) -> None:
    """The bytes are those of a pickle that would fill a tensor with a number, over and over."""
    raw = io.BytesIO()
    torch.save(torch.zeros(4), raw)
    with zipfile.ZipFile(raw) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    records["data.pkl"] = records["data.pkl"].removesuffix(b".") + b"K\x00K\x01s."
    with pytest.raises(zckpt.FormatError, match=r"a Tensor .*a dict"):
        load(file_of(tmp_path / "file.pt", records.pop("data.pkl"), **records))


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_torch_writes_is_far_from_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    monkeypatch.setattr(restricted_pickle, "MEMORY_BYTES_MIN", 0)
    monkeypatch.setattr(restricted_pickle, "MEMORY_GROWTH_MAX", MEMORY_GROWTH_MAX * 2 // 3)
    chance = random.Random(protocol)
    numbers = range(2000)
    saved = {
        "module": OrderedDict((f"layers.{number}.weight", torch.ones(2)) for number in numbers),
        "state": {number: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)} for number in numbers},
        "params": list(numbers),
        "history": [{"loss": chance.random(), "step": number, "tags": ["a", "b"], "more": {}} for number in numbers],
        "counts": Counter({f"token {number}": number for number in numbers}),
        "sets": [set(numbers), frozenset(numbers), {(number, number + 1) for number in numbers}],
        "defaults": defaultdict(list, {number: [number] for number in numbers}),
    }
    path = tmp_path / "file.pt"
    torch.save(saved, path, pickle_protocol=protocol)
    loaded = load(str(path))
    assert all(torch.equal(with_values(tensor), torch.ones(2)) for tensor in loaded.pop("module").values())
    assert loaded.pop("state")[7]["step"].item() == 3
    assert loaded == {key: saved[key] for key in loaded}


def test_keys_that_have_the_same_hash_by_chance(tmp_path: Path) -> None:
    """-1 and -2 have the same hash, and so have tuples of them."""
    import itertools

    keys = set(itertools.product((-1, -2), repeat=9))
    assert len({*map(hash, keys)}) == 1
    source = make_folder(tmp_path / "source", keys=keys)
    actual = zckpt.open(zckpt.convert(source, tmp_path / "converted").path).state["client_state"]
    assert actual == {"keys": sorted(keys)}


def test_tensors_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    grid = torch.arange(12.0).view(3, 4)
    torch.save({"grid": grid, "row": grid[1], "turned": grid.t(), "one": grid[2, 3]}, path)
    loaded = load(str(path))
    place, row = stored_range(loaded["grid"]), stored_range(loaded["row"])
    assert place is not None
    assert row == place.narrow(16, 16)
    assert place.path == str(path)
    assert path.read_bytes()[place.offset : place.offset + place.nbytes] == grid.numpy().tobytes()
    assert loaded["turned"].is_meta
    assert torch.equal(with_values(loaded["turned"]), grid.t())
    assert loaded["one"].item() == 11


@pytest.mark.parametrize("metadata", [False, True])
def test_tied_tensors_stay_tied(tmp_path: Path, metadata: bool) -> None:
    """Their values are in the checkpoint once, even if they have one element or are not in order."""
    one, turned = torch.ones(1), torch.arange(6.0).view(2, 3).t()
    module = {"weight": torch.ones(4, 2, dtype=torch.bfloat16), "mean": torch.zeros(2)}
    module |= {"a": one, "b": one.view(1), "c": turned, "d": turned.view(3, 2)}
    if metadata:
        module |= {"e": torch._neg_view(one), "f": torch._neg_view(one)}
    source = make_folder(tmp_path / "source", module=module)
    checkpoint = zckpt.open(zckpt.convert(source, tmp_path / "converted").path)
    assert checkpoint.aliases == {"b": "a", "d": "c", **({"f": "e"} if metadata else {})}
    assert torch.equal(checkpoint.load("param/c")["param/c"], turned)


def test_tensors_that_share_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "COPIED_BYTES_MAX", 0)
    long = torch.zeros(1 << 18)
    zckpt.convert(make_folder(tmp_path / "few", parts=[long[n:] for n in range(5)]), tmp_path / "of few")
    many = make_folder(tmp_path / "many", parts=[long[n:] for n in range(30)])
    refused(many, zckpt.FormatError, "the same bytes are in many tensors")


def test_the_directory_of_an_archive_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_archive, "DIRECTORY_BYTES_MAX", 5000)
    path = file_of(tmp_path / "file.pt", pickle.dumps(3, 2))
    assert load(path) == 3
    file_of(tmp_path / "file.pt", pickle.dumps(3, 2), **{f"data/{number}": b"" for number in range(200)})
    with pytest.raises(zckpt.FormatError, match="its directory has"):
        load(path)


def test_a_storage_that_is_described_in_two_ways(tmp_path: Path) -> None:
    storage = b"(X\x07\x00\x00\x00storagectorch\n%bStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
    raw = START + b"(" + storage % b"Float" + storage % b"Int" + b"l."
    with pytest.raises(zckpt.FormatError, match="storage 0"):
        load(file_of(tmp_path / "file.pt", raw, **{"data/0": bytes(4)}))


def test_elements_that_are_far_apart(tmp_path: Path) -> None:
    """Each tensor takes few bytes of the pickle, and reading it takes a read for each of its elements."""
    long = torch.zeros(1 << 24)
    path = tmp_path / "file.pt"
    torch.save([long[number :: 1 << 14] for number in range(3)], path)
    assert all(torch.equal(with_values(tensor), torch.zeros(1 << 10)) for tensor in load(str(path)))
    torch.save([long[number :: 1 << 14] for number in range(400)], path)
    with pytest.raises(zckpt.FormatError, match=CUT_OFF):
        load(str(path))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conj": lambda tensor: tensor.conj(),
    "conj of a part": lambda tensor: tensor[1:, :2].conj(),
    "conj turned": lambda tensor: tensor.conj().t(),
    "one element": lambda tensor: tensor[:1, 1].conj(),
    "neg": lambda tensor: torch._neg_view(tensor.real),
    "imaginary part of conj": lambda tensor: tensor.conj().imag,
}


@pytest.mark.parametrize("view", VIEWS)
def test_lazy_views(tmp_path: Path, view: str) -> None:
    """torch keeps as a bit that a tensor is conjugated or negated, and not in its values."""
    tensor = VIEWS[view](torch.randn(4, 3, dtype=torch.complex64))
    assert tensor.is_conj() or tensor.is_neg()
    source = make_folder(tmp_path / "source", value=tensor, module={"weight": torch.ones(4, 2), "mean": tensor})
    checkpoint = zckpt.open(zckpt.convert(source, tmp_path / "converted").path)
    assert torch.equal(checkpoint.state["client_state"]["value"], tensor.resolve_conj().resolve_neg())
    assert torch.equal(checkpoint.load("buffer/mean")["buffer/mean"], tensor.resolve_conj().resolve_neg())


@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_without_a_class_of_storages(tmp_path: Path, name: str) -> None:
    tensor = torch.arange(24).view(4, 6).float().to(getattr(torch, name))
    source = make_folder(tmp_path / "source", whole=tensor, part=tensor[1:3], turned=tensor.t(), one=tensor[1, 2])
    actual = zckpt.open(zckpt.convert(source, tmp_path / "converted").path).state["client_state"]
    expected = {"whole": tensor, "part": tensor[1:3], "turned": tensor.t(), "one": tensor[1, 2]}
    for key, value in expected.items():
        assert actual[key].dtype == tensor.dtype
        assert torch.equal(actual[key].float(), value.float())


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch.ones(3, dtype=torch.complex128), "torch.complex128"),
        (torch.ones(3).to(torch.float8_e8m0fnu), "torch.float8_e8m0fnu"),
        (torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "torch.bits8"),
        (torch.eye(3).to_sparse(), "a sparse tensor"),
        (torch.ones(3, device="meta"), "a tensor without values"),
        (np.array([object()]), "NumPy values of dtype O8"),
        (np.zeros(2, "M8[s]"), "NumPy values of dtype M8"),
        (np.longdouble(1), "a NumPy number of dtype"),
    ],
)
def test_what_a_checkpoint_cannot_keep_is_named(tmp_path: Path, value: object, match: str) -> None:
    """These kinds of values do not run any code, and the error does not say so."""
    source = make_folder(tmp_path / "source", value=value)
    with pytest.raises(zckpt.UnsupportedError, match=match) as raised:
        zckpt.convert(source, tmp_path / "converted")
    assert "code" not in raised.value.message
    assert raised.value.file == str(source / "mp_rank_00_model_states.pt")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["quantized", "nested", "jagged", "compressed"])
def test_kinds_of_tensors_that_torch_warns_of(tmp_path: Path, kind: str) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    value = {
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor(parts),
        "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
        "compressed": lambda: torch.eye(3).to_sparse_csr(),
    }[kind]()
    name = {"jagged": "nested", "compressed": "sparse"}.get(kind, kind)
    refused(make_folder(tmp_path / "source", value=value), zckpt.UnsupportedError, f"has a {name} tensor")


def test_a_parameter_with_attributes(tmp_path: Path) -> None:
    value = torch.nn.Parameter(torch.arange(3.0))
    value.tag = "text"  # type: ignore[attr-defined]
    source = make_folder(tmp_path / "source", value=value)
    actual = zckpt.open(zckpt.convert(source, tmp_path / "converted").path).state["client_state"]
    assert torch.equal(actual["value"], torch.arange(3.0))


def test_numbers_of_numpy_become_numbers_of_python(tmp_path: Path) -> None:
    """A schedule that a script has computed by NumPy leaves them in param groups and in the scheduler."""
    schedule: dict[str, Any] = {"base_lrs": [np.float64(0.1)], "last": np.int64(3), "warm": np.bool_(True)}
    source = make_folder(tmp_path / "source", lr_scheduler=schedule, empty=b"", array=np.zeros((0, 2)))
    file = source / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(file, weights_only=True)
    lr = 0.1 * np.sqrt(np.float32(3))
    state["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = lr
    torch.save(state, file)
    state = zckpt.open(zckpt.convert(source, tmp_path / "converted").path).state
    (group,) = state["engine"]["optimizer"]["param_groups"]
    assert (type(group["lr"]), group["lr"]) == (float, float(lr))
    assert repr(state["engine"]["scheduler"]["state"]) == "{'base_lrs': [0.1], 'last': 3, 'warm': True}"
    assert state["client_state"]["empty"] == b""
    assert state["client_state"]["array"].shape == (0, 2)
