"""If a write or a restore fails, every rank raises the right error, nothing is left behind, and older checkpoints stay
complete."""

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
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zckpt
from tests.support.memory_store import MemoryStore, in_memory
from tests.support.plain_engine import Engine, engines_are_adapters, everything, is_whole
from tests.support.states import fragment, same_all
from zckpt.checkpoint.writing.options import WriteOptions
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.errors import (
    CheckpointExistsError,
    DigestError,
    NoSpaceError,
    RankError,
    StorageError,
)
from zckpt.format.names import Tier
from zckpt.plan.inventory import FileRange
from zckpt.storage.local_store import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cluster import Cluster

pytestmark = pytest.mark.usefixtures("engines_are_adapters")

MIB = 1 << 20


# One rank, and calls that the operating system refuses


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
            assert everything(disk) == {}
        zckpt.write(small, disk / "run" / "old")
        before = everything(disk)
        with pytest.raises(NoSpaceError):
            zckpt.write(large, disk / "run" / "old", overwrite=True)
        assert everything(disk) == before
        assert is_whole(disk / "run" / "old", small)


def numbers(error: NoSpaceError) -> list[int]:
    """Returns how many bytes are needed and how many are free, as the message of the error says."""
    return [int(text.replace(",", "")) for text in re.findall(r"([\d,]+) (?:bytes are needed|are free)", str(error))]


@contextmanager
def not_a_byte_is_written() -> Iterator[None]:
    with (
        mock.patch.object(LocalStore, "create", side_effect=AssertionError("a file was made")),
        mock.patch.object(LocalStore, "prepare", side_effect=AssertionError("a manifest was written")),
    ):
        yield


def test_a_write_that_does_not_fit_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    """On a disk of 12 MiB, a checkpoint of 8 MiB fits once, but not twice. Every call that would need more space is
    refused, and the error says how many bytes are needed and how many are free. Files on another disk cannot be shared,
    so their bytes count too."""
    engine, swapped = Engine(4 * MIB), Engine(4 * MIB)
    zckpt.write(engine, tmp_path / "source")
    (tmp_path / "swap").write_bytes(engine.weight.numpy().tobytes())
    span = FileRange(str(tmp_path / "swap"), 0, 4 * MIB)
    swapped_fragments = [original._replace(tier=Tier.NVME, data=span) for original in engine.fragments()]
    swapped.fragments = lambda: swapped_fragments  # type: ignore[method-assign]
    with mounted(tmp_path / "disk", "size=12m") as disk:
        zckpt.write(engine, disk / "old")
        before = everything(disk)
        calls: dict[str, Callable[[], object]] = {
            "write": lambda: zckpt.write(engine, disk / "new", reuse=None),
            "overwrite": lambda: zckpt.write(engine, disk / "old", overwrite=True, reuse=None),
            "background": lambda: zckpt.write(engine, disk / "new", background=True, reuse=None),
            "reuse": lambda: zckpt.write(engine, disk / "new", reuse=tmp_path / "source"),
            "swap files": lambda: zckpt.write(swapped, disk / "new", reuse=None),
            "cp": lambda: zckpt.cp(tmp_path / "source", disk / "new"),
            "cp that shares nothing": lambda: zckpt.cp(tmp_path / "source", disk / "new", share=False),
            "cp of a part": lambda: zckpt.cp(tmp_path / "source", disk / "new", ["master/*", "exp_avg/*"]),
            "export": lambda: zckpt.export(tmp_path / "source", disk / "out"),
            "export of one file": lambda: zckpt.export(tmp_path / "source", disk / "out.pt", format="pt"),
        }
        for what, call in calls.items():
            free = shutil.disk_usage(disk).free
            with not_a_byte_is_written(), pytest.raises(NoSpaceError) as caught:
                call()
            needed, said_free = numbers(caught.value)
            least = 4 * MIB if "export" in what else 8 * MIB
            assert least < needed < least + 64 * 1024, what
            assert 0 <= free - said_free <= 16 * 4096, f"{what}: a lock or a directory may take some pages"
            assert everything(disk) == before, what
        zckpt.wait()
        assert is_whole(disk / "old", engine)


def test_a_store_that_cannot_know_its_free_space_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_memory():
        zckpt.write(Engine(), "memory://run/a", latest=False)
        monkeypatch.setattr(MemoryStore, "free_bytes", lambda store: 1)
        with pytest.raises(NoSpaceError, match="and 1 are free"):
            zckpt.write(Engine(), "memory://run/b", latest=False)


def write_to_a_small_disk(directory: str, nbytes: int) -> list[int]:
    """Each rank writes ``nbytes`` bytes in each part, and is refused. Returns the numbers of the error."""
    engine = Engine(nbytes)
    fragments = [fragment(part, f"w{dist.get_rank()}", engine.weight, 0, len(engine.weight)) for part in engine.parts]
    with (
        engines_are_adapters(), mock.patch.object(engine, "fragments", return_value=fragments), not_a_byte_is_written(),
        pytest.raises(NoSpaceError) as caught,
    ):  # fmt: skip
        zckpt.write(engine, os.path.join(directory, "new"))
    return numbers(caught.value)


def test_the_error_counts_what_all_ranks_need_together(cluster: Cluster, tmp_path: Path) -> None:
    """Each of the two ranks alone needs less than what is free."""
    with mounted(tmp_path / "disk", "size=3m") as disk:
        first, second = cluster.run(write_to_a_small_disk, 2, str(disk), MIB)
        assert first == second
        assert first[0] > 4 * MIB
        assert first[0] // 2 < first[1] <= 3 * MIB
        assert everything(disk) == {}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_read_only_directory(tmp_path: Path, overwrite: bool) -> None:
    old, new = Engine(), Engine(seed=1)
    with mounted(tmp_path / "disk", "size=1m") as disk:
        zckpt.write(old, disk / "old")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(StorageError) as caught:
            zckpt.write(new, disk / ("old" if overwrite else "new"), overwrite=overwrite)
        assert type(caught.value) is StorageError
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EROFS
        assert is_whole(disk / "old", old)
        assert sorted(os.listdir(disk)) == ["latest", "old"]


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError):
            zckpt.write(Engine(), path)
    assert everything(tmp_path) == {"file": b"mine"}


def test_an_existing_checkpoint_is_replaced_only_if_asked(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("call", ["lstat", "scandir", "open", "mkdir", "pwritev", "write", "fsync", "replace"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_any_system_call_may_fail(tmp_path: Path, call: str, overwrite: bool) -> None:
    """The first call fails, then the second, and so on. Afterwards either the old or the new checkpoint is there and
    complete."""
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
                cause: Any = error.__cause__
                failed = cause.errno == errno.EIO
        if failed and everything(run) == before:
            assert not overwrite or is_whole(run / "c", old)
        else:
            assert is_whole(run / "c", new)  # if the write failed, it did so after the commit
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


# Real engines on two ranks


def failure(action: Callable[[], object]) -> tuple[str, str, int | None]:
    """Returns type, message and rank of the error that ``action`` raises."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return "", "", None


def damaging(damage: Callable[[Path], object]) -> Callable[..., bytes]:
    """Returns a function that writes the files of a rank, and then calls ``damage`` with their directory."""
    write = RankWrite.write_data_files

    def write_and_damage(rank_write: RankWrite, *args: Any) -> bytes:
        table_digest = write(rank_write, *args)
        damage(Path(str(rank_write.store.location), rank_write.data_files[0].id.path).parent)
        return table_digest

    return write_and_damage


def fail_to_write(directory: str) -> dict[str, Any]:
    """Returns, for each way to fail on this rank, the error of the write and the names that are in the directory
    afterwards."""
    from tests.support.models import make_engine, train

    engine = make_engine()
    rank = engine.global_rank
    train(engine, 1)
    failures: dict[str, Any] = {}

    def attempt(name: str, path: str, **options: Any) -> None:
        error = failure(lambda: zckpt.write(engine, path, **options))
        torch.distributed.barrier()
        failures[name] = (*error, sorted(os.listdir(directory)))
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
    for name, damage in (
        ("cut off", lambda files: os.truncate(files / "master.safetensors", 4097)),
        ("table cut off", lambda files: os.truncate(files / "digests.bin", 17)),
        ("removed", lambda files: os.remove(files / "master.safetensors")),
    ):
        with mock.patch.object(RankWrite, "write_data_files", damaging(damage)) if rank == 0 else nullcontext():
            attempt(name, f"{directory}/c")
    losses = train(engine, 1, 1)
    zckpt.write(engine, f"{directory}/c", latest=False)
    failures["valid"] = zckpt.validate(f"{directory}/c").ok
    attempt("exists", f"{directory}/c")
    before = {str(path): path.stat().st_mtime_ns for path in Path(directory).rglob("*") if path.is_file()}
    torch.distributed.barrier()
    if rank == 1:
        broken.start()
    attempt("overwrite", f"{directory}/c", overwrite=True)
    mock.patch.stopall()
    after = {str(path): path.stat().st_mtime_ns for path in Path(directory).rglob("*") if path.is_file()}
    failures["untouched"] = before == after
    failures["losses"] = [*losses, *train(engine, 1, 2)]
    return failures


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
        ("cut off", ("RankError", "RankError"), "bytes were written, rank 1 sees 4097", 1, []),
        ("table cut off", ("RankError", "RankError"), "bytes were written, rank 1 sees 17", 1, []),
        ("removed", ("RankError", "MissingFileError"), "rank 1 failed to check the files", 1, []),
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
    from tests.support.runs import tensors_of

    engine, other = make_engine(), make_engine(model="odd", groups=True, seed=1)
    train(engine, 1)
    train(other, 1)
    path = zckpt.write(engine, f"{directory}/c")
    before = tensors_of(other)
    failures: dict[str, Any] = {"other model": failure(lambda: zckpt.restore(other, path))}
    failures["untouched"] = same_all(tensors_of(other), before)
    train(other, 1)
    failures["nothing there"] = failure(lambda: zckpt.restore(engine, f"{directory}/d"))
    if engine.global_rank == 0:
        shutil.copytree(path, f"{directory}/damaged")
        (file,) = Path(directory, "damaged").rglob("rank-00001/exp_avg.safetensors")
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    torch.distributed.barrier()
    before = tensors_of(engine)
    failures["damaged"] = failure(lambda: zckpt.restore(engine, f"{directory}/damaged"))
    failures["paths"] = failure(lambda: zckpt.restore(engine, f"{directory}/{engine.global_rank}"))
    zckpt.restore(engine, path)
    failures["whole again"] = same_all(tensors_of(engine), before)
    return failures


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


def test_a_restore_from_a_missing_path_fails_on_all_ranks(failed_restores: list[dict[str, Any]]) -> None:
    for result in failed_restores:
        assert result["nothing there"][0] == "CheckpointNotFoundError"
        assert result["paths"][0] == "RankError"


def test_an_attached_engine_writes_with_the_defaults_of_write() -> None:
    of_write = inspect.signature(zckpt.write).parameters
    defaults = {field.name: field.default for field in dataclasses.fields(WriteOptions)}
    assert defaults.keys() - of_write.keys() == {"run", "each_client_state", "leave_out", "replace_foreign"}
    assert of_write.keys() - defaults.keys() == {"engine", "path"}
    named = (of_write.keys() & defaults.keys()) - {"earlier"}  # the arguments that ``write`` does not name itself
    assert all(of_write[name].default == defaults[name] for name in named)
