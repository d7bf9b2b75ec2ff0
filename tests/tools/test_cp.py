"""zckpt.cp copies all of a checkpoint with the same bytes, or some of its tensors. A copy that fails leaves nothing,
and harms no other checkpoint."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch

import zckpt
from tests.support.apart import Apart
from tests.support.faults import BROKEN, NO_SPACE, Fault, faulty, kill
from tests.support.forks import fork, result_of
from tests.support.litter import tree
from tests.support.memory import peak_growth
from tests.support.memory_store import in_memory
from tests.support.progress import RecordedProgress
from tests.support.spoil import SOUND
from tests.support.states import Written, same_all, write_state
from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.cli import main
from zckpt.format import data_file, names
from zckpt.ranks import heartbeat
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

SOME = ["master/*", "buffer/*"]
GOLDEN = [manifest.parent for manifest in sorted(Path(__file__).parents[1].glob("golden/v1/**/manifest.msgpack"))]


def written(path: Path, world_size: int = 3, **options: Any) -> Written:
    buffers = {"mean": [torch.randn(7) for _ in range(world_size)]}
    aliases = {"tied": "one", "other": "big"}
    return write_state(
        path, world_size, layout="random", buffers=buffers, aliases=aliases, client_state={"x": torch.arange(5)},
        **options,
    )  # fmt: skip


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def damage(path: Path, file: str, at: int = -1) -> Path:
    damaged = sorted(path.glob(file))[0]
    raw = bytearray(damaged.read_bytes())
    raw[at] ^= 1
    damaged.write_bytes(raw)
    return damaged


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_whole_copy_has_the_same_bytes(tmp_path: Path, world_size: int) -> None:
    written(tmp_path / "a", world_size)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    latest = (tmp_path / "latest").read_bytes()
    assert zckpt.cp(tmp_path, tmp_path / "far" / "b") == str(tmp_path / "far" / "b"), "the one that latest names"
    (tmp_path / "a" / "notes.txt").unlink()
    assert files(tmp_path / "far" / "b") == files(tmp_path / "a")
    assert zckpt.validate(tmp_path / "far" / "b").ok
    assert (tmp_path / "latest").read_bytes() == latest
    assert names_in(tmp_path / "far") == ["b"], "a run has no `latest` by a copy"
    assert zckpt.diff(tmp_path / "a", tmp_path / "far" / "b").equal


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_checkpoints_of_other_writers_are_copied_too(tmp_path: Path, golden: Path) -> None:
    """Their headers and manifests may look different from those that zckpt writes."""
    zckpt.cp(golden, tmp_path / "b")
    assert files(tmp_path / "b") == files(golden)


def test_fillers_are_copied_wherever_they_are(tmp_path: Path) -> None:
    """In the files of other writers, several fillers may stand in a row, and the index does not tell how many."""
    apart = Apart.of(SOUND)
    for file in apart.files:
        stop = 32 + len(file.data)
        for name, entry in file.header.items():
            if name != "__metadata__":
                entry["data_offsets"] = [32 + at for at in entry["data_offsets"]]
        for name, *span in (("@a", 0, 12), ("@b", 12, 32), ("@c", stop, stop + 8), ("@d", stop + 8, stop + 18)):
            file.header[name] = {"dtype": "U8", "shape": [span[1] - span[0]], "data_offsets": span}
        file.data = bytearray(32) + file.data + bytearray(18)
    for chunk in apart.index:
        chunk["offset"] = [32 + offset for offset in chunk["offset"]]
        chunk["block"] = [2 + block for block in chunk["block"]]
    apart.write(tmp_path / "a")
    assert zckpt.validate(tmp_path / "a").ok
    zckpt.cp(tmp_path / "a", tmp_path / "b", share=False)
    assert files(tmp_path / "b") == files(tmp_path / "a")
    damage(tmp_path / "a", "data-*/rank-00001/master.safetensors")
    with pytest.raises(zckpt.FormatError, match="D003"):
        zckpt.cp(tmp_path / "a", tmp_path / "c", share=False)


def test_a_whole_copy_parses_no_header(tmp_path: Path) -> None:
    written(tmp_path / "a", 2, tensors={"small": (5,), "large": (1000, 1000)})
    headers = [path.read_bytes()[:4096] for path in tmp_path.rglob("*master.safetensors")]
    assert any(b'"@' in header for header in headers), "there are fillers"
    with mock.patch.object(data_file, "decode_header", side_effect=AssertionError("a header is parsed")):
        zckpt.cp(tmp_path / "a", tmp_path / "b", share=False)
    assert files(tmp_path / "b") == files(tmp_path / "a")


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("keys", [SOME, "exp_avg/big", "*/one", lambda key: key.endswith("weight"), "master/tied"])
def test_a_copy_of_some_tensors_is_a_checkpoint_of_them(tmp_path: Path, world_size: int, keys: Any) -> None:
    written(tmp_path / "a", world_size)
    zckpt.cp(tmp_path / "a", tmp_path / "b", keys)
    assert zckpt.validate(tmp_path / "b").ok
    a, b = zckpt.open(tmp_path / "a"), zckpt.open(tmp_path / "b")
    chosen = [a[key].key for key in loader_of(a).contents.select(keys)]
    assert set(b) == set(chosen)
    assert same_all(b.load(), a.load(chosen))
    for rank in range(world_size):
        assert same_all(b.load_pieces(rank), a.load_pieces(rank, chosen))
        assert b.rank_state(rank) == a.rank_state(rank) == {"rank": rank}
    names = {key.partition("/")[2] for key in chosen}
    assert b.aliases == {alias: name for alias, name in a.aliases.items() if name in names}
    assert torch.equal(b.state["client_state"]["x"], torch.arange(5))
    assert (b.step, b.world_size) == (a.step, world_size)
    assert loader_of(b).manifest.save_id != loader_of(a).manifest.save_id
    assert loader_of(b).manifest.writer["copied_from"] == loader_of(a).manifest.save_id
    assert b.nbytes < a.nbytes


def test_large_tensors_are_read_and_written_by_direct_io(tmp_path: Path) -> None:
    """The tensors have several blocks, which may begin anywhere in a page."""
    tensors = {"small": torch.randn(3), "large": torch.randn(1_300_001), "odd": torch.randn(700_003).bfloat16()}
    write_state(tmp_path / "a", 2, tensors, block_bytes=1 << 20)
    zckpt.cp(tmp_path / "a", tmp_path / "whole")
    assert files(tmp_path / "whole") == files(tmp_path / "a")
    zckpt.cp(tmp_path / "a", tmp_path / "some", ["*/odd", "master/*"], budget=zckpt.Budget(4 << 20, 2))
    assert zckpt.validate(tmp_path / "some").ok
    a, b = zckpt.open(tmp_path / "a"), zckpt.open(tmp_path / "some")
    assert same_all(b.load(), a.load(list(b)))


def test_weights_alone_are_restored(tmp_path: Path) -> None:
    engine = ReferenceEngine()
    engine.train(2)
    zckpt.write(engine, tmp_path / "a")
    zckpt.cp(tmp_path / "a", tmp_path / "b", ["master/*", "param/*"])
    other = ReferenceEngine(seed=1)
    message = "2 of the engine are kept .* 12 moments of restored weights are not in the checkpoint and begin at zero"
    with pytest.warns(UserWarning, match=message):
        result = zckpt.restore(other, tmp_path / "b", strict=False)
    assert set(result.restored["master"]) == set(engine.tensors["master"])
    for part in ("master", "param"):
        assert same_all(other.tensors[part], engine.tensors[part])


def test_weights_without_their_moments_do_not_resume_a_run(tmp_path: Path) -> None:
    """This also holds for an engine whose optimizer has no moments yet, and therefore does not miss any."""
    engine = ReferenceEngine()
    engine.train(2)
    client_state = {"tensor": torch.arange(3), "array": np.arange(4), "pair": (1, 2**70)}
    zckpt.write(engine, tmp_path / "a", client_state=client_state)
    source = zckpt.open(tmp_path / "a")
    moment = next(key for key in source if key.startswith("exp_avg/"))
    moments = [key for key in source if key.startswith("exp_avg") and key != moment]
    differing = (names.LEFT_OUT, names.LINEAGE)
    everything: dict[str, tuple[list[str], list[str]]] = {
        "weights": (["master/*", "param/*"], ["exp_avg", "exp_avg_sq"]),
        "all but one": (["master/*", "param/*", *moments], ["exp_avg"]),
        "of one": ([f"*/{moment.partition('/')[2]}"], []),
        "moments": (["exp_avg*"], []),
    }
    for name, (keys, left_out) in everything.items():
        zckpt.cp(tmp_path / "a", tmp_path / name, keys)
        copy = zckpt.open(tmp_path / name)
        assert list(loader_of(copy).contents.left_out) == left_out
        assert {key: repr(value) for key, value in copy.state.items() if key not in differing} == {
            key: repr(value) for key, value in source.state.items() if key not in differing
        }
    zckpt.cp(tmp_path / "all but one", tmp_path / "again", "master/*")
    assert open_loader(tmp_path / "again").contents.left_out == ("exp_avg", "exp_avg_sq")
    with pytest.raises(zckpt.MismatchError, match="exp_avg, exp_avg_sq"):
        zckpt.restore(ReferenceEngine(seed=1), tmp_path / "weights")


# Refusals


def test_an_existing_checkpoint_is_replaced_only_if_asked(tmp_path: Path) -> None:
    written(tmp_path / "a")
    written(tmp_path / "b", seed=1)
    before = files(tmp_path / "b")
    for keys in (None, SOME):
        with pytest.raises(zckpt.CheckpointExistsError, match="already a checkpoint"):
            zckpt.cp(tmp_path / "a", tmp_path / "b", keys)
    assert files(tmp_path / "b") == before
    zckpt.cp(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert files(tmp_path / "b") == files(tmp_path / "a")
    for destination in ("a", "b"):
        with pytest.raises(zckpt.CheckpointExistsError, match="data of the same save"):
            zckpt.cp(tmp_path / "a", tmp_path / destination, overwrite=True)
    assert files(tmp_path / "b") == files(tmp_path / "a")
    zckpt.cp(tmp_path / "a", tmp_path / "a", SOME, overwrite=True)  # it replaces its source
    assert zckpt.validate(tmp_path / "a").ok
    assert set(zckpt.open(tmp_path / "a")) == set(open_loader(tmp_path / "b").contents.select(SOME))


def test_a_checkpoint_that_could_be_repaired_is_not_replaced(tmp_path: Path) -> None:
    """Not even a copy of the same save replaces it."""
    written(tmp_path / "a")
    zckpt.cp(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "manifest.msgpack").unlink()
    before = files(tmp_path / "b")
    for overwrite in (False, True):
        with pytest.raises(zckpt.CheckpointExistsError, match=r"manifest was lost|data of the same save"):
            zckpt.cp(tmp_path / "a", tmp_path / "b", overwrite=overwrite)
        assert files(tmp_path / "b") == before


def test_destinations_and_keys_that_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "run" / "a")
    before = tree(tmp_path)
    for destination, message in (("run", "directory of a run"), ("run/a/inside", "is a checkpoint, which would hide")):
        with pytest.raises(zckpt.CheckpointExistsError, match=message):
            zckpt.cp(tmp_path / "run", tmp_path / destination)
    with pytest.raises(zckpt.CheckpointNotFoundError):
        zckpt.cp(tmp_path / "nothing", tmp_path / "b")
    with pytest.raises(zckpt.KeyNotFoundError, match="nearest are: master/big"):
        zckpt.cp(tmp_path / "run", tmp_path / "b", "master/bigg")
    with pytest.raises(zckpt.KeyNotFoundError, match="no tensor"):
        zckpt.cp(tmp_path / "run", tmp_path / "b", [])
    with pytest.raises(zckpt.UnsupportedError, match="scheme"):
        zckpt.cp(tmp_path / "run", "ftp://bucket/b")
    assert tree(tmp_path) == before


# Damaged sources


@pytest.mark.parametrize("keys", [None, SOME], ids=["whole", "some"])
@pytest.mark.parametrize(
    ("file", "at", "error"),
    [
        ("data-*/rank-00001/*master.safetensors", -1, "D003.*master/"),
        ("data-*/rank-00001/digests.bin", 0, "D002"),
        ("data-*/index.bin", 3, "I002"),
        ("manifest.msgpack", -1, "M003"),
    ],
)
def test_damage_ends_the_copy(tmp_path: Path, keys: Any, file: str, at: int, error: str) -> None:
    written(tmp_path / "a", seed=2)
    damage(tmp_path / "a", file, at)
    before = tree(tmp_path)
    with pytest.raises(zckpt.FormatError, match=error) as caught:
        zckpt.cp(tmp_path / "a", tmp_path / "b", keys)
    assert "nothing was changed" in str(caught.value.hint)
    assert tree(tmp_path) == before


def test_a_damaged_header_ends_a_copy_of_all_and_gets_a_new_one_in_a_copy_of_some(tmp_path: Path) -> None:
    source = written(tmp_path / "a", seed=2)
    damage(tmp_path / "a", "data-*/rank-00001/*master.safetensors", 9)
    before = tree(tmp_path)
    with pytest.raises(zckpt.FormatError, match=r"S00|D003"):
        zckpt.cp(tmp_path / "a", tmp_path / "b")
    assert tree(tmp_path) == before
    zckpt.cp(tmp_path / "a", tmp_path / "b", SOME)
    assert zckpt.validate(tmp_path / "b").ok
    copied = zckpt.open(tmp_path / "b").load("master/*")
    assert same_all(copied, {key: source.full[key] for key in copied})


@pytest.mark.parametrize("keys", [None, SOME], ids=["whole", "some"])
def test_a_file_that_is_cut_off_or_gone_ends_the_copy(tmp_path: Path, keys: Any) -> None:
    written(tmp_path / "a")
    file = sorted((tmp_path / "a").glob("data-*/rank-00002/*master.safetensors"))[0]
    before = tree(tmp_path)
    os.truncate(file, file.stat().st_size - 5)
    with pytest.raises(zckpt.FormatError, match="F003"):
        zckpt.cp(tmp_path / "a", tmp_path / "b", keys)
    assert tree(tmp_path) == before
    file.unlink()
    with pytest.raises(zckpt.MissingFileError, match="F001"):
        zckpt.cp(tmp_path / "a", tmp_path / "b", keys)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("keys", [None, SOME], ids=["whole", "some"])
def test_damaged_data_that_are_copied_unverified_are_still_found_in_the_copy(tmp_path: Path, keys: Any) -> None:
    written(tmp_path / "a")
    file = damage(tmp_path / "a", "data-*/rank-00001/*master.safetensors")
    zckpt.cp(tmp_path / "a", tmp_path / "b", keys, verify=False)
    if keys is None:
        assert files(tmp_path / "b") == files(tmp_path / "a")
    (finding,) = zckpt.validate(tmp_path / "b").findings
    assert (finding.rule, os.path.basename(finding.file or "")) == ("D003", file.name)


# Failures


@pytest.mark.parametrize("keys", [None, SOME], ids=["whole", "some"])
@pytest.mark.parametrize("names", [("create",), ("write",), ("sync",), ("put_new",), ("prepare",)])
@pytest.mark.parametrize("at", [0, 2])
def test_a_full_disk_leaves_nothing(tmp_path: Path, keys: Any, names: tuple[str, ...], at: int) -> None:
    written(tmp_path / "a")
    before = tree(tmp_path)
    fault = Fault(NO_SPACE, at=0 if names == ("prepare",) else at, names=names, path="/b")
    with faulty(fault), pytest.raises(zckpt.NoSpaceError):
        zckpt.cp(tmp_path / "a", tmp_path / "b", keys, share=False)
    assert tree(tmp_path) == before


@pytest.mark.linux
@pytest.mark.parametrize("keys", [None, "master/*"], ids=["whole", "some"])
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_killed_copy_is_whole_or_no_checkpoint_and_the_next_one_works(tmp_path: Path, keys: Any, every: int) -> None:
    """Each copy is killed before another one of its operations on the store."""
    write_state(tmp_path / "a", 2, {"w": (40, 50)}, parts=("master", "exp_avg"))
    with faulty() as operations:
        zckpt.cp(tmp_path / "a", tmp_path / "once", keys)
    count = len(operations.done)
    assert count > 20
    before = tree(tmp_path / "once")
    for at in sorted({*range(0, count, every), *range(count - 10, count)}):  # the last ten include the commit

        def copy(at: int = at) -> None:
            with faulty(Fault(kill, at)):
                zckpt.cp(tmp_path / "a", tmp_path / "b", keys, budget=zckpt.Budget(threads=1))

        result_of(fork(copy))
        try:
            zckpt.open(tmp_path / "b")
        except zckpt.CheckpointNotFoundError:
            zckpt.cp(tmp_path / "a", tmp_path / "b", keys)
            if keys is None:
                assert tree(tmp_path / "b") == before
            assert len(names_in(tmp_path / "b")) == 2, "its data and its manifest"
        assert zckpt.validate(tmp_path / "b").ok
        shutil.rmtree(tmp_path / "b")


# Other stores, and several ranks


def test_between_stores(tmp_path: Path) -> None:
    written(tmp_path / "a")
    with in_memory():
        zckpt.cp(tmp_path / "a", "memory://run/b")
        zckpt.cp("memory://run/b", tmp_path / "c")
        assert files(tmp_path / "c") == files(tmp_path / "a")
        zckpt.cp("memory://run/b", "memory://run/d", SOME)
        assert zckpt.validate("memory://run/d").ok
        assert same_all(zckpt.open("memory://run/d").load(), zckpt.open(tmp_path / "a").load(SOME))


def copy_together(path: str, dies: bool = False) -> list[str]:
    heartbeat.PERIOD_SECONDS = 0.2
    if dies and os.environ["RANK"] == "1":
        fault = Fault(lambda operation, file: os.kill(os.getpid(), signal.SIGKILL), at=0, names=("sync",))
        with faulty(fault):
            zckpt.cp(f"{path}/a", f"{path}/b", share=False)
    if dies:
        with pytest.raises(zckpt.RankError, match="rank 1") as caught:
            zckpt.cp(f"{path}/a", f"{path}/b", share=False)
        return [str(caught.value.rank)]
    with faulty() as operations:
        paths = [zckpt.cp(f"{path}/a", f"{path}/b", share=False), zckpt.cp(f"{path}/a", f"{path}/c", SOME)]
    created = [file for name, file in operations.done if name == "create"]
    return [*paths, *created]


def test_ranks_share_the_work(cluster: Cluster, tmp_path: Path) -> None:
    written(tmp_path / "a")
    first, second = cluster.run(copy_together, 2, str(tmp_path), init=True)
    assert first[:2] == second[:2] == [str(tmp_path / "b"), str(tmp_path / "c")]
    assert files(tmp_path / "b") == files(tmp_path / "a")
    assert zckpt.validate(tmp_path / "c").ok
    assert same_all(zckpt.open(tmp_path / "c").load(), zckpt.open(tmp_path / "a").load(SOME))
    created = {*first[2:]}, {*second[2:]}
    assert not created[0] & created[1], "a file has one writer"
    sizes = [sum(os.path.getsize(file) for file in of_rank) for of_rank in created]
    assert min(sizes) > 0.4 * sum(sizes)


def test_if_a_rank_dies_the_others_raise_an_error(cluster: Cluster, tmp_path: Path) -> None:
    written(tmp_path / "a")
    before = tree(tmp_path)
    first, second = cluster.outcomes(copy_together, 2, str(tmp_path), dies=True, init=True)
    assert (first.value, second.signal) == (["1"], signal.SIGKILL), first
    assert tree(tmp_path) == before


def copy_on_the_command_line(path: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return main(["cp", path, f"{path}-copy", "master/*"]), out.getvalue()


def test_the_command_line(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "a")
    first, second = cluster.run(copy_on_the_command_line, 2, str(tmp_path / "a"), init=False)
    assert (first, second) == ((0, f"{tmp_path / 'a'}-copy\n"), (0, "")), "rank 0 prints"
    assert zckpt.open(tmp_path / "a-copy").parts == ("master",)
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'b'}\n"
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "already a checkpoint" in capsys.readouterr().err
    damage(tmp_path / "a", "data-*/rank-00001/*master.safetensors")
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "c"), "--no-verify"]) == 0


def test_progress(tmp_path: Path) -> None:
    write_state(tmp_path / "a", 3)
    for destination, keys in (("b", None), ("c", "master/*")):
        progress = RecordedProgress()
        zckpt.cp(tmp_path / "a", tmp_path / destination, keys, progress=progress)
        assert progress.assert_complete("copy") > 0


def test_a_disk_error_leaves_nothing(tmp_path: Path) -> None:
    written(tmp_path / "a")
    before = tree(tmp_path)
    with faulty(Fault(BROKEN, names=("commit",), path="/b")), pytest.raises(zckpt.StorageError):
        zckpt.cp(tmp_path / "a", tmp_path / "b")
    assert tree(tmp_path) == before


def growth(path: str, small: str, keys: str | None) -> int:
    budget = zckpt.Budget(nbytes=16 << 20, threads=2)
    zckpt.cp(small, f"{small}-copy", keys, budget=budget)
    return peak_growth(lambda: zckpt.cp(path, f"{path}-copy", keys, budget=budget))


@pytest.mark.linux
@pytest.mark.parametrize("keys", [None, "master/*"], ids=["whole", "some"])
def test_bounded_memory(cluster: Cluster, tmp_path: Path, keys: str | None) -> None:
    numel = 40 << 20
    write_state(tmp_path / "a", 1, {"a": torch.from_numpy(np.zeros(numel, np.float32))}, parts=("master",))
    write_state(tmp_path / "small", 1, {"a": (5,)})
    (grown,) = cluster.run(growth, 1, str(tmp_path / "a"), str(tmp_path / "small"), keys, init=False)
    assert grown < 16 + 16 << 20 < 4 * numel
