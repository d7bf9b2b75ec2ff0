"""Writes and restores that fail: the right error on every rank, nothing left behind, and what was there stays whole."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import itertools
import os
import re
import resource
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import zckpt
from tests.support.memory_store import MemoryStore, in_memory
from tests.support.plain_engine import Engine, engines_are_adapters, everything, is_whole
from tests.support.states import fragment, same_all
from zckpt.api.write import write_engine
from zckpt.errors import (
    CheckpointExistsError,
    DigestError,
    FormatError,
    NoSpaceError,
    RankError,
    StateError,
    StorageError,
)
from zckpt.storage.local_store import LocalStore
from zckpt.storage.lock import WriteLock
from zckpt.writing.options import WriteOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cluster import Cluster

pytestmark = pytest.mark.usefixtures("engines_are_adapters")

MIB = 1 << 20


# One rank, and what the operating system may refuse


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@contextmanager
def limited(path: Path, nbytes: int) -> Iterator[Path]:
    path.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


SMALL_DISKS = {
    "full file system": lambda path: mounted(path, "size=1m"),
    "no inodes": lambda path: mounted(path, "size=64m,nr_inodes=14"),
    "file size limit": lambda path: limited(path, MIB),
}


@pytest.mark.parametrize("how", SMALL_DISKS)
def test_no_space(tmp_path: Path, how: str) -> None:
    small, large = Engine(4096), Engine(4 * MIB, seed=1, step=6)
    with SMALL_DISKS[how](tmp_path / "disk") as disk:
        if how != "no inodes":
            with pytest.raises(NoSpaceError, match="free space") as caught:
                zckpt.write(large, disk / "run" / "new")
            assert isinstance(caught.value.__cause__, OSError) is (how == "file size limit")
            assert str(disk) in str(caught.value)
            assert [one for one in everything(disk) if one != "run"] == []
        zckpt.write(small, disk / "run" / "old")
        before = everything(disk)
        with pytest.raises(NoSpaceError):
            zckpt.write(large, disk / "run" / "old", overwrite=True)
        assert everything(disk) == before
        assert is_whole(disk / "run" / "old", small)


def numbers(error: NoSpaceError) -> list[int]:
    """The bytes that are needed and those that are free, by the message of a refusal."""
    return [int(one.replace(",", "")) for one in re.findall(r"([\d,]+) (?:bytes are needed|are free)", str(error))]


@contextmanager
def not_a_byte_is_written() -> Iterator[None]:
    with (
        mock.patch.object(LocalStore, "create", side_effect=AssertionError("a file was made")),
        mock.patch.object(LocalStore, "prepare", side_effect=AssertionError("a manifest was written")),
    ):
        yield


def test_what_does_not_fit_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    """The checkpoint of 8 MiB fits into 12 MiB once, and not a second time: a write that replaces it, one in the
    background, a copy and an export are refused, with the bytes that they need and those that are free."""
    engine = Engine(4 * MIB)
    zckpt.write(engine, tmp_path / "source")
    with mounted(tmp_path / "disk", "size=12m") as disk:
        zckpt.write(engine, disk / "old")
        before = everything(disk)
        calls: dict[str, Callable[[], object]] = {
            "write": lambda: zckpt.write(engine, disk / "new", reuse=None),
            "overwrite": lambda: zckpt.write(engine, disk / "old", overwrite=True, reuse=None),
            "background": lambda: zckpt.write(engine, disk / "new", background=True, reuse=None),
            "cp": lambda: zckpt.cp(tmp_path / "source", disk / "new", share=False),
            "cp of a part": lambda: zckpt.cp(tmp_path / "source", disk / "new", ["master/*", "exp_avg/*"]),
            "export": lambda: zckpt.export(tmp_path / "source", disk / "out"),
            "export of one file": lambda: zckpt.export(tmp_path / "source", disk / "out.pt", format="pt"),
        }
        for what, call in calls.items():
            free = shutil.disk_usage(disk).free
            with not_a_byte_is_written(), pytest.raises(NoSpaceError) as caught:
                call()
            needed, said = numbers(caught.value)
            least = 4 * MIB if "export" in what else 8 * MIB
            assert least < needed < least + 64 * 1024, what
            assert 0 <= free - said <= 16 * 4096, f"{what}: a lock or a directory may take some pages"
            assert everything(disk) == before, what
        zckpt.wait()
        assert is_whole(disk / "old", engine)


def test_a_store_that_cannot_know_what_is_free_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_memory():
        zckpt.write(Engine(), "memory://run/a", latest=False)
        monkeypatch.setattr(MemoryStore, "free", 1)
        with pytest.raises(NoSpaceError, match="and 1 are free"):
            zckpt.write(Engine(), "memory://run/b", latest=False)


def write_into_little(directory: str, nbytes: int) -> list[int]:
    """``nbytes`` per rank and part."""
    engine = Engine(nbytes)
    own = [fragment(part, f"w{dist.get_rank()}", engine.weight, 0, len(engine.weight)) for part in engine.parts]
    with (
        engines_are_adapters(), mock.patch.object(engine, "fragments", return_value=own), not_a_byte_is_written(),
        pytest.raises(NoSpaceError) as caught,
    ):  # fmt: skip
        zckpt.write(engine, os.path.join(directory, "new"))
    return numbers(caught.value)


def test_all_ranks_are_told_what_they_need_together(cluster: Cluster, tmp_path: Path) -> None:
    """Each of the two ranks needs less than what is free."""
    with mounted(tmp_path / "disk", "size=3m") as disk:
        one, other = cluster.run(write_into_little, 2, str(disk), MIB)
        assert one == other
        assert one[0] > 4 * MIB
        assert one[0] // 2 < one[1] <= 3 * MIB
        assert everything(disk) == {}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_may_not_be_written(tmp_path: Path, overwrite: bool) -> None:
    old, new = Engine(), Engine(seed=1)
    with mounted(tmp_path / "disk", "size=1m") as disk:
        zckpt.write(old, disk / "old")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(StorageError) as caught:
            zckpt.write(new, disk / ("old" if overwrite else "new"), overwrite=overwrite)
        assert type(caught.value) is StorageError
        assert caught.value.__cause__.errno == errno.EROFS
        assert is_whole(disk / "old", old)
        assert sorted(os.listdir(disk)) == ["latest", "old"]


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError):
            zckpt.write(Engine(), path)
    assert everything(tmp_path) == {"file": b"mine"}


def test_an_existing_checkpoint_is_not_replaced_unasked(tmp_path: Path) -> None:
    old, new = Engine(), Engine(seed=1, step=6)
    zckpt.write(old, tmp_path / "c")
    before = everything(tmp_path)
    with pytest.raises(CheckpointExistsError, match="overwrite=True") as caught:
        zckpt.write(new, tmp_path / "c")
    assert isinstance(caught.value, FileExistsError)
    assert everything(tmp_path) == before
    zckpt.write(new, tmp_path / "c", overwrite=True)
    assert is_whole(tmp_path / "c", new)
    assert not before.keys() & everything(tmp_path).keys() - {"c", "c/manifest.msgpack", "latest"}
    (tmp_path / "c" / "manifest.msgpack").write_bytes(b"damaged")
    with pytest.raises(CheckpointExistsError):
        zckpt.write(old, tmp_path / "c")
    zckpt.write(old, tmp_path / "c", overwrite=True)
    assert is_whole(tmp_path / "c", old)


@pytest.mark.parametrize("call", ["lstat", "listdir", "open", "mkdir", "pwritev", "write", "fsync", "replace"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_any_system_call_may_fail(tmp_path: Path, call: str, overwrite: bool) -> None:
    """The first one fails, then the second, and so on: always the old checkpoint is there whole, or the new one."""
    real: Callable[..., Any] = getattr(os, call)
    old, new = Engine(seed=0, step=5), Engine(8 * MIB, seed=1, step=6)
    for number in itertools.count():
        run = tmp_path / str(number)
        run.mkdir()
        if overwrite:
            zckpt.write(old, run / "c")
        before = everything(run)
        calls = itertools.count()

        def fail(*args: Any, number: int = number, calls: Iterator[int] = calls, **kwargs: Any) -> Any:
            if next(calls) == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **kwargs)

        with mock.patch.object(os, call, fail):
            try:
                zckpt.write(new, run / "c", overwrite=overwrite)
                failed = False
            except StorageError as error:
                failed = error.__cause__.errno == errno.EIO
        if failed and everything(run) == before:
            assert not overwrite or is_whole(run / "c", old)
        else:
            assert is_whole(run / "c", new)  # or it failed after the commit
        shutil.rmtree(run)
        if next(calls) <= number:
            break
    assert number > 0


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    with (
        mock.patch("zckpt.storage.local_writer.LocalWriter.write", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        zckpt.write(Engine(), tmp_path / "c")
    assert everything(tmp_path) == {}


@pytest.mark.parametrize(("part", "name", "rule"), [("../up", "w", "N003"), ("master", "w@0:2", "N002")])
def test_a_name_that_the_format_cannot_hold_stops_the_write(tmp_path: Path, part: str, name: str, rule: str) -> None:
    engine = Engine()
    odd = fragment(part, name, engine.weight, 0, len(engine.weight))
    with (
        mock.patch.object(engine, "fragments", return_value=[odd]),
        mock.patch.object(WriteLock, "acquire", side_effect=AssertionError("a byte was written")),
        pytest.raises(FormatError) as caught,
    ):
        zckpt.write(engine, tmp_path / "run" / "c")
    assert caught.value.rule == rule
    assert everything(tmp_path) == {}


def test_what_does_not_add_up_is_not_written(tmp_path: Path) -> None:
    engine = Engine()
    half = fragment("master", "w", engine.weight, 0, 7)
    with (
        mock.patch.object(engine, "fragments", return_value=[half]),
        mock.patch.object(WriteLock, "acquire", side_effect=AssertionError("a byte was written")),
        pytest.raises(FormatError) as caught,
    ):
        zckpt.write(engine, tmp_path / "c")
    assert caught.value.rule == "I005"
    assert everything(tmp_path) == {}


def test_what_has_no_values_is_named(tmp_path: Path) -> None:
    nothing = torch.empty(3, device="meta")
    for attribute, value, where in (
        ("weight", nothing, "master/w"),
        ("state", lambda: {"optimizer": {"d": nothing}}, "optimizer.d"),
        ("rank_state", lambda: {"seen": nothing}, r"rank_state\[0\].seen"),
    ):
        engine = Engine()
        setattr(engine, attribute, value)
        with pytest.raises(StateError, match=f"{where} is on the device meta"):
            zckpt.write(engine, tmp_path / "c")
        assert everything(tmp_path) == {}


NESTED = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("client_state", "where"),
    [
        ({"sampler": [{"fn": len}]}, "client_state.sampler[0].fn"),
        ({"seen": {print}}, "client_state.seen[0]: builtin_function_or_method"),
        ({"root": 1j}, "client_state.root: complex"),
        ({"number": np.longdouble(1)}, "client_state.number: longdouble"),
        ({"sparse": torch.eye(2).to_sparse()}, "client_state.sparse is a tensor of layout torch.sparse_coo"),
        ({"nested": NESTED}, "client_state.nested is a tensor of layout nested"),
        ({"words": [torch.zeros(1), "a", object()]}, "client_state.words[2]: object"),
        ({True: 1}, "client_state has the key True"),
        ({"mask": np.ma.masked_array([1.0, 2.0], [0, 1])}, "client_state.mask: MaskedArray"),
        ({"long": np.zeros(2, np.longdouble)}, "client_state.long: ndarray"),
        ({"meta": torch.empty(2, device="meta")}, "client_state.meta is on the device meta"),
    ],
)
def test_client_state_that_cannot_be_kept_stops_the_write(
    tmp_path: Path, client_state: dict[Any, Any], where: str
) -> None:
    with pytest.raises(StateError) as caught:
        zckpt.write(Engine(), tmp_path / "run" / "c", client_state=client_state)
    assert str(caught.value).startswith(where)
    assert everything(tmp_path) == {}


TAGS = ["../x", "", ".", "/abs/x", "a\nb", "n" * 300, "\udcff", "latest", "latest/x"]


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_that_latest_cannot_name(tmp_path: Path, tag: str) -> None:
    run = tmp_path / "run"
    with pytest.raises(ValueError, match=r"(?s)the file `latest`.*save_latest=False, writes it without") as caught:
        write_engine(Engine(), os.path.join(run, tag), WriteOptions(run=run))
    assert type(caught.value) is ValueError, "and not that the checkpoint is damaged"
    assert everything(tmp_path) == {}
    if tag == "a\nb":
        write_engine(Engine(), os.path.join(run, tag), WriteOptions(run=run, latest=False))


def test_a_directory_in_the_place_of_latest(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(
        CheckpointExistsError, match=f"directory is in the place of the file `latest`.*{tmp_path}/latest"
    ):
        zckpt.write(Engine(), tmp_path / "c")
    assert everything(tmp_path) == {"latest": None}
    (tmp_path / "latest").rmdir()
    (tmp_path / "latest").symlink_to("c")  # as people make it by hand; it can be replaced
    zckpt.write(Engine(), tmp_path / "c")
    assert (tmp_path / "latest").read_text() == "c\n"


@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize("name", ["c", "epoch0/c", "checkpoint-5/c"])
def test_no_checkpoint_hides_others(tmp_path: Path, name: str, latest: bool) -> None:
    """Whoever opens a directory with a manifest gets that checkpoint, whatever ``latest`` beside it says."""
    run, other = tmp_path / "run", tmp_path / "other"
    write_engine(Engine(step=1), run / name, WriteOptions(run=run, latest=latest))
    before = everything(tmp_path)
    hidden = "the file `latest`" if latest else name
    if latest or name != "epoch0/c":  # which nobody would find there
        for overwrite in (False, True):
            with pytest.raises(
                CheckpointExistsError, match=f"directory of a run, with {hidden}:.*\n.*run/global_step<N>"
            ):
                zckpt.write(Engine(step=2), run, overwrite=overwrite, latest=latest)
    assert everything(tmp_path) == before

    other.mkdir()
    (other / "notes").mkdir()
    (other / "config.json").write_text("{}")
    zckpt.write(Engine(step=3), other, latest=latest)
    zckpt.write(Engine(step=4), other, latest=latest, overwrite=True)
    before = everything(tmp_path)
    with pytest.raises(
        CheckpointExistsError, match=f"{other} is a checkpoint, which would hide.*\n.*{other}/global_step<N>"
    ):
        write_engine(Engine(step=5), other / name, WriteOptions(run=other, latest=latest))
    assert everything(tmp_path) == before
    assert zckpt.open(other).step == 4


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "client_state must be a dict.*got list", {"client_state": [1]}),
        (ValueError, "pass background=True", {"snapshot": "lazy"}),
        (ValueError, "pass background=True", {"snapshot_bytes": 1 << 20}),
        (ValueError, "snapshot_bytes must be a number of bytes", {"snapshot_bytes": "1GB", "background": True}),
        (ValueError, "snapshot_bytes must be a number of bytes", {"snapshot_bytes": -1, "background": True}),
        (TypeError, "budget must be a zckpt.Budget", {"budget": 5}),
        (ValueError, "the engine has no part m; it has master", {"exclude": "m"}),
    ],
)
def test_an_argument_of_the_wrong_kind(
    tmp_path: Path, error: type[Exception], message: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        zckpt.write(Engine(), tmp_path / "c", **options)
    assert everything(tmp_path) == {}


def test_a_checkpoint_is_found_that_would_hide_one_far_below_it(tmp_path: Path) -> None:
    zckpt.write(Engine(step=3), tmp_path / "c", latest=False)
    before = everything(tmp_path)
    with pytest.raises(CheckpointExistsError, match=f"{tmp_path / 'c'} is a checkpoint, which would hide"):
        zckpt.write(Engine(step=4), tmp_path / "c" / "run" / "step4")
    assert everything(tmp_path) == before


def test_an_empty_path_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the path is empty; the current directory is"):
        zckpt.write(Engine(), "")
    assert everything(tmp_path) == {}


def test_one_part_by_its_name(tmp_path: Path) -> None:
    zckpt.write(Engine(), tmp_path / "c", exclude="exp_avg")
    assert zckpt.open(tmp_path / "c").parts == ("master",)


def test_latest_is_left_alone_if_asked(tmp_path: Path) -> None:
    zckpt.write(Engine(step=1), tmp_path / "first")
    zckpt.write(Engine(step=2), tmp_path / "second", latest=False)
    assert zckpt.open(tmp_path).step == 1


def test_without_a_path_the_step_names_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert zckpt.write(Engine(step=7)) == str(tmp_path / "checkpoints" / "global_step7")
    assert zckpt.open("checkpoints").step == 7


# Real engines on two ranks


def failure(action: Callable[[], object]) -> tuple[str, str, int | None]:
    """Type, message and rank of the error that ``action`` raises."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return "", "", None


def fail_to_write(directory: str) -> dict[str, Any]:
    """On each rank: how writes fail, and what is there after each."""
    from tests.support.models import make_engine, train

    engine = make_engine()
    rank = engine.global_rank
    train(engine, 1)
    found: dict[str, Any] = {}

    def attempt(name: str, path: str, **options: Any) -> None:
        error = failure(lambda: zckpt.write(engine, path, **options))
        torch.distributed.barrier()
        found[name] = (*error, sorted(os.listdir(directory)))
        torch.distributed.barrier()

    attempt("paths", f"{directory}/{rank}")
    attempt("client state", f"{directory}/c", client_state={"fn": print})
    attempt("part", f"{directory}/c", parts=["master", "exp_abs"])
    broken = mock.patch(
        "zckpt.storage.local_writer.LocalWriter.write", side_effect=OSError(errno.EIO, "the disk is on fire")
    )
    if rank == 1:
        broken.start()
    attempt("one rank", f"{directory}/c")
    mock.patch.stopall()
    losses = train(engine, 1, 1)
    zckpt.write(engine, f"{directory}/c", latest=False)
    found["valid"] = zckpt.validate(f"{directory}/c").ok
    attempt("exists", f"{directory}/c")
    before = {str(path): path.stat().st_mtime_ns for path in Path(directory).rglob("*") if path.is_file()}
    torch.distributed.barrier()
    if rank == 1:
        broken.start()
    attempt("overwrite", f"{directory}/c", overwrite=True)
    mock.patch.stopall()
    after = {str(path): path.stat().st_mtime_ns for path in Path(directory).rglob("*") if path.is_file()}
    found["untouched"] = before == after
    found["losses"] = [*losses, *train(engine, 1, 2)]
    return found


@pytest.fixture(scope="module")
def failed_writes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return cluster.run(fail_to_write, 2, str(tmp_path_factory.mktemp("failures")))


@pytest.mark.parametrize(
    ("name", "errors", "message", "rank", "left"),
    [
        ("paths", ("RankError", "RankError"), "different paths", 1, []),
        ("client state", ("StateError", "RankError"), "client_state.fn: builtin_function_or_method", 0, []),
        ("part", ("ValueError", "ValueError"), "no part exp_abs; it has master, exp_avg, exp_avg_sq", None, []),
        ("one rank", ("RankError", "OSError"), "the disk is on fire", 1, []),
        ("exists", ("CheckpointExistsError", "RankError"), "already a checkpoint", 0, ["c"]),
        ("overwrite", ("RankError", "OSError"), "rank 1 failed to write: OSError", 1, ["c"]),
    ],
)
def test_a_failed_write_fails_on_every_rank(
    failed_writes: list[dict[str, Any]],
    name: str,
    errors: tuple[str, str],
    message: str,
    rank: int | None,
    left: list[str],
) -> None:
    results = [result[name] for result in failed_writes]
    assert tuple(error for error, _, _, _ in results) == errors
    assert message in results[0][1]
    for error, _, named, there in results:
        assert there == left
        if error == "RankError":
            assert named == rank


def test_after_failed_writes_training_goes_on_as_if_nothing_had_happened(
    cluster: Cluster, failed_writes: list[dict[str, Any]]
) -> None:
    assert all(result["valid"] and result["untouched"] for result in failed_writes)
    assert [result["losses"] for result in failed_writes] == cluster.run(train_alone, 2)


def train_alone() -> list[float]:
    from tests.support.models import make_engine, train

    return train(make_engine(), 3)[1:]


def fail_to_restore(directory: str) -> dict[str, Any]:
    from tests.support.models import make_engine, train
    from tests.support.runs import held

    engine, other = make_engine(), make_engine(model="odd", groups=True, seed=1)
    train(engine, 1)
    train(other, 1)
    path = zckpt.write(engine, f"{directory}/c")
    before = held(other)
    found = {"other model": failure(lambda: zckpt.restore(other, path))}
    found["untouched"] = same_all(held(other), before)
    train(other, 1)
    found["nothing there"] = failure(lambda: zckpt.restore(engine, f"{directory}/d"))
    if engine.global_rank == 0:
        shutil.copytree(path, f"{directory}/damaged")
        (file,) = Path(directory, "damaged").rglob("rank-00001/exp_avg.safetensors")
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    torch.distributed.barrier()
    before = held(engine)
    found["damaged"] = failure(lambda: zckpt.restore(engine, f"{directory}/damaged"))
    found["paths"] = failure(lambda: zckpt.restore(engine, f"{directory}/{engine.global_rank}"))
    zckpt.restore(engine, path)
    found["whole again"] = same_all(held(engine), before)
    return found


@pytest.fixture(scope="module")
def failed_restores(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return cluster.run(fail_to_restore, 2, str(tmp_path_factory.mktemp("failures")))


def test_another_model_is_refused_with_its_differences(failed_restores: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(failed_restores):
        error, message, named = result["other model"]
        assert (error, named) == ("MismatchError", rank)
        assert "nothing was changed" in message
        assert "all 23 tensors of the engine are missing in the checkpoint" in message
        for line in (
            "missing: master/embed.weight [7, 63]",
            "tensors of the checkpoint have no place in the engine; the first 5:",
            "unexpected: master/layers.0.weight",
            "this looks like another model",
        ):
            assert (line in message) == (rank == 0)
        assert result["untouched"]


def test_damage_on_one_rank_fails_the_restore_on_all(failed_restores: list[dict[str, Any]]) -> None:
    (error, message, named), (own_error, own_message, _) = (result["damaged"] for result in failed_restores)
    assert (error, named) == (RankError.__name__, 1)
    assert own_error == DigestError.__name__
    for text in (message, own_message):
        assert "rank-00001/exp_avg.safetensors" in text
        assert "key exp_avg/layers.2" in text
        assert "D003" in text
    assert "restored in part" in own_message
    assert all(result["whole again"] for result in failed_restores)


def test_a_restore_from_nowhere_fails_alike_on_all(failed_restores: list[dict[str, Any]]) -> None:
    for result in failed_restores:
        assert result["nothing there"][0] == "CheckpointNotFoundError"
        assert result["paths"][0] == "RankError"


def test_an_attached_engine_writes_with_the_defaults_of_write() -> None:
    of_write = inspect.signature(zckpt.write).parameters
    own = {one.name: one.default for one in dataclasses.fields(WriteOptions)}
    assert own.keys() - of_write.keys() == {"run", "each_client_state", "replace_foreign"}
    assert of_write.keys() - own.keys() == {"engine", "path"}
    assert all(of_write[name].default == own[name] for name in of_write.keys() & own.keys())
