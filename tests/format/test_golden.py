"""Checkpoints that were written once and are never written again. Every version of the library reads all of them.

Beside each of them, ``PROVENANCE.md`` says what has written it, and ``expected.json`` says what it contains, which was
found out without zckpt.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xxhash
from safetensors import safe_open

import zckpt

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

GOLDEN = Path(__file__).parents[1] / "golden"
CORPUS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def facts(dtype: torch.dtype, shape: Any, data: bytes) -> dict[str, Any]:
    return {"dtype": str(dtype), "shape": list(shape), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


def read_with_safetensors(checkpoint: Path) -> dict[str, Any]:
    """Returns the facts of every tensor by key, from the data files alone. Of a tensor with a value for each rank, it
    takes the value of the first rank."""
    content: dict[str, dict[tuple[int, int], bytes]] = {}
    dtypes_and_shapes: dict[str, tuple[torch.dtype, list[int]]] = {}
    for path in sorted(checkpoint.glob("data-*/rank-*/*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            shapes = json.loads(metadata["zckpt.shapes"])
            for entry in file.keys():  # noqa: SIM118  safe_open is no mapping
                tensor = file.get_tensor(entry)
                piece = re.fullmatch(r"(.*)@(\d+):(\d+)", entry)
                name, start, stop = (piece[1], int(piece[2]), int(piece[3])) if piece else (entry, 0, tensor.numel())
                key = f"{metadata['zckpt.part']}/{name}"
                dtypes_and_shapes.setdefault(key, (tensor.dtype, shapes[name] if piece else list(tensor.shape)))
                content.setdefault(key, {}).setdefault((start, stop), raw(tensor))
    expected = {}
    for key, (dtype, shape) in dtypes_and_shapes.items():
        pieces = content[key]
        assert sum(stop - start for start, stop in pieces) == math.prod(shape)
        expected[key] = facts(dtype, shape, b"".join(pieces[bounds] for bounds in sorted(pieces)))
    return expected


def test_there_is_a_corpus() -> None:
    assert "v1" in CORPUS
    for name in CORPUS:
        assert {"PROVENANCE.md", "expected.json", "run"} <= {path.name for path in (GOLDEN / name).iterdir()}


@pytest.mark.parametrize("name", CORPUS)
def test_a_golden_checkpoint_is_still_read(name: str) -> None:
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    checkpoint = zckpt.open(GOLDEN / name / "run")
    report = zckpt.validate(GOLDEN / name / "run")
    assert report.ok, str(report)
    assert len(expected["tensors"]) > 20
    tensors = {key: value for key, value in expected["tensors"].items() if not key.startswith("state/")}
    loaded = checkpoint.load()
    assert {key: facts(value.dtype, value.shape, raw(value)) for key, value in loaded.items()} == tensors
    assert read_with_safetensors(Path(checkpoint.path)) == expected["tensors"]
    assert dict(checkpoint.aliases) == expected["aliases"]
    assert [checkpoint.step, checkpoint.world_size] == [expected["step"], expected["world_size"]]
    for rank, values in enumerate(expected["rank_values"]):
        pieces = {key: value for (key, _, _), value in checkpoint.load_pieces(rank, list(values)).items()}
        assert {key: xxhash.xxh3_128_hexdigest(raw(value)) for key, value in pieces.items()} == values


@pytest.mark.parametrize("name", CORPUS)
def test_the_state_of_a_golden_checkpoint_is_what_the_engine_had(name: str) -> None:
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    checkpoint = zckpt.open(GOLDEN / name / "run")
    engine, client = checkpoint.state["engine"], checkpoint.state["client_state"]
    assert {key: engine["counters"][key] for key in expected["counters"]} == expected["counters"]
    assert engine["scheduler"]["state"] == expected["scheduler"]
    groups = engine["optimizer"]["param_groups"]
    assert [{key: group[key] for key in ("lr", "weight_decay", "betas")} for group in groups] == expected["groups"]
    assert client.keys() == {"note", "epoch", "pair", "seen"}
    assert (client["note"], client["epoch"], client["pair"]) == ("never written again", 2, (1.5, None))
    assert client["seen"].equal(torch.arange(5))
    for rank, seed_state in enumerate(expected["torch_rng"]):
        generator_state = checkpoint.rank_state(rank)["rng"]["torch"]
        assert xxhash.xxh3_128_hexdigest(bytes(generator_state)) == seed_state


def restore_and_train(path: str) -> tuple[dict[Any, torch.Tensor], list[float]]:
    from tests.support.models import make_engine, train
    from tests.support.runs import tensors_of

    engine = make_engine(model="odd", dtype="bf16", groups=True, scheduler=True, seed=1)
    zckpt.restore(engine, path, rng=True)
    return tensors_of(engine), train(engine, 1, 3)


@pytest.mark.parametrize("name", CORPUS)
def test_an_engine_goes_on_from_a_golden_checkpoint(cluster: Cluster, name: str) -> None:
    loaded = zckpt.open(GOLDEN / name / "run").load()
    for tensors, losses in cluster.run(restore_and_train, 2, str(GOLDEN / name / "run")):
        assert all(map(math.isfinite, losses))
        pieces = {place: value for place, value in tensors.items() if place[0] in loaded}
        assert {key for key, _, _ in pieces} >= {key for key in loaded if key.startswith("master/first")}
        for (key, start, stop), value in pieces.items():
            if key != "buffer/running_mean":  # this buffer differs from rank to rank
                assert loaded[key].reshape(-1)[start:stop].equal(value), key
