"""Files of other people and programs stay, whatever removes those of zckpt, and the user is told of them."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.faults import BROKEN, Fault, faulty, kill
from tests.support.forks import fork, result_of
from tests.support.litter import tree, write_steps
from tests.support.states import EngineOfAnAdapter, engine_state, write_state, write_through
from zckpt.cli import main
from zckpt.format.data_file import BEGINNING_BYTES, SECTOR_BYTES, begins_like_data_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DATA = "data-0123456789abcdef"
told = pytest.warns(UserWarning, match="was not removed: ")


def put(path: Path, content: bytes = b"the only copy") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def safetensors(path: Path) -> None:
    """Writes a file of safetensors with a header as long as one of zckpt's."""
    text = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(4088)
    put(path, len(text).to_bytes(8, "little") + text + b"\x07")


def make_fifo(path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    path.parent.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir="/tmp") as directory, socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{directory}/s")  # the path of a socket has to be short
        shutil.move(f"{directory}/s", path)


def link(path: Path) -> None:
    put(path.parent / "master.safetensors", b"")
    path.symlink_to("master.safetensors")


def link_to_nowhere(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to("nowhere")


FOREIGN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a file": ("thesis.txt", put),
    "a file beside those of a rank": ("rank-00000/thesis.txt", put),
    "a directory": ("src/main.py", put),
    "a directory in that of a rank": ("rank-00000/more/master.safetensors", put),
    "an empty directory": ("rank-00000/more", lambda path: path.mkdir(parents=True)),
    "a file in the place of a directory": ("rank-00000", put),
    "a directory in the place of a file": ("index.bin/thesis.txt", put),
    "a rank of another form": ("rank-000001/digests.bin", put),
    "a name of another form": ("rank-00000/a.b.c.safetensors", put),
    "a text with the name of a data file": ("rank-00000/master.safetensors", put),
    "a short text with this name": ("rank-00000/master.safetensors", lambda path: put(path, b"mine")),
    "another program's data file": ("rank-00000/model.safetensors", safetensors),
    "a link": ("rank-00000/exp_avg.safetensors", link),
    "a link that leads nowhere": ("rank-00000/digests.bin", link_to_nowhere),
    "a pipe": ("rank-00000/digests.bin", make_fifo),
    "a socket": ("index.bin", make_socket),
}


@pytest.mark.linux
@pytest.mark.parametrize("what", FOREIGN)
def test_a_directory_with_a_foreign_entry_is_kept_whole_by_gc_and_by_a_write(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, make = FOREIGN[what]
    data = tmp_path / "run" / "c" / DATA
    put(data / "rank-00001" / "digests.bin", b"as zckpt would have left it")
    shutil.copytree(data, tmp_path / "own" / "c" / DATA)
    shutil.rmtree(data)
    make(data / name)
    shutil.copytree(tmp_path / "own" / "c" / DATA, data, dirs_exist_ok=True)
    before = tree(tmp_path / "run")
    for dry_run in (True, False):
        cleanup = zckpt.gc(tmp_path / "run", dry_run=dry_run)
        assert (cleanup.removed, cleanup.foreign) == ((), (str(data),))
        assert tree(tmp_path / "run") == before
    assert main(["gc", str(tmp_path / "run")]) == 0
    assert f"foreign                     {data}" in capsys.readouterr().out
    with told as warnings:
        write_through(tmp_path / "run" / "c", torch.ones(3))
    assert str(data) in str(warnings[0].message)
    assert before < tree(tmp_path / "run")
    assert zckpt.validate(tmp_path / "run").ok
    assert zckpt.gc(tmp_path / "own").foreign == (), "the same without the foreign entry"
    assert tree(tmp_path / "own") == set()


def test_a_directory_or_link_with_the_name_of_a_temporary_file_stays(tmp_path: Path) -> None:
    """It does not end a write or a clean-up with an error either."""
    write_steps(tmp_path, 1)
    names = [f"s1/{name}.01234567.tmp" for name in ("manifest.msgpack", "write.lock")]
    for name in (*names, "latest.01234567.tmp"):
        put(tmp_path / name / "thesis.txt")
    (tmp_path / "latest.89abcdef.tmp").symlink_to("s1")
    before = tree(tmp_path)
    cleanup = zckpt.gc(tmp_path)
    assert (cleanup.removed, cleanup.foreign) == ((), tuple(str(tmp_path / name) for name in names))
    assert tree(tmp_path) == before
    with told:
        write_through(tmp_path / "s1", torch.ones(3), overwrite=True)
    thesis = [path for path in before if path.endswith("thesis.txt")]
    assert len(thesis) == 3
    assert {*thesis, "latest.89abcdef.tmp"} <= tree(tmp_path)


# Foreign files in the data directory of a checkpoint


def keep_in(checkpoint: Path) -> set[Path]:
    """Puts foreign files into the data directory of a checkpoint. Returns their paths."""
    (data,) = checkpoint.glob("data-*")
    for name in ("thesis.txt", "rank-00000/weights.safetensors", "plots/loss.png"):
        (safetensors if name.endswith("safetensors") else put)(data / name)
    (data / "rank-00000" / "link.safetensors").symlink_to("weights.safetensors")
    return {
        data / name for name in ("thesis.txt", "rank-00000/weights.safetensors", "rank-00000/link.safetensors", "plots")
    }


def files_below(path: Path) -> set[Path]:
    return {file for file in path.rglob("*") if not file.is_dir()}


@contextmanager
def only_own_files_go(checkpoint: Path, stay: set[Path]) -> Iterator[None]:
    before = {file: file.read_bytes() for path in stay for file in (path, *path.rglob("*")) if file.is_file()}
    yield
    assert {file: file.read_bytes() for file in before} == before
    assert {file for path in stay for file in (path, *path.rglob("*")) if not file.is_dir()} == {
        file for file in files_below(checkpoint) if file.name != "manifest.msgpack"
    }


def test_prune_keeps_foreign_files_and_tells_of_them(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    stay = keep_in(tmp_path / "s1")
    with only_own_files_go(tmp_path / "s1", stay):
        cleanup = zckpt.prune(tmp_path, keep_last=1, dry_run=True)
        assert zckpt.validate(tmp_path / "s1").ok
        assert zckpt.prune(tmp_path, keep_last=1) == zckpt.Cleanup(
            cleanup.removed, (), dry_run=False, checkpoints=2, reasons=cleanup.reasons, foreign=cleanup.foreign
        )
    assert {*cleanup.foreign} == {str(path) for path in stay}
    (data,) = (tmp_path / "s1").glob("data-*")
    assert [removed.path for removed in cleanup.removed] == [str(tmp_path / "s1" / "manifest.msgpack"), str(data)]
    assert cleanup.removed[1].nbytes > 3 * 40 * 50 * 4, "the sizes of zckpt's files count"
    assert zckpt.gc(tmp_path).foreign == (str(data),)


def test_a_write_that_keeps_the_last_ones_tells_of_foreign_files(tmp_path: Path) -> None:
    engine = EngineOfAnAdapter()
    write_through(tmp_path / "s1", torch.ones(3), engine=engine)
    stay = keep_in(tmp_path / "s1")
    with only_own_files_go(tmp_path / "s1", stay), told as warnings:
        write_through(tmp_path / "s2", torch.ones(3), keep_last=1, engine=engine)
    assert len(warnings) == 1
    assert "weights.safetensors and 1 more" in str(warnings[0].message)
    assert zckpt.validate(tmp_path / "s2").ok


@pytest.mark.parametrize("manifest", ["whole", "damaged", "lost"])
def test_an_overwritten_checkpoint_leaves_foreign_files(tmp_path: Path, manifest: str) -> None:
    """If no manifest says whose data they are, all of them stay."""
    path = tmp_path / "c"
    write_through(path, torch.ones(300), step=1)
    (old,) = path.glob("data-*")
    stay = keep_in(path) if manifest == "whole" else files_below(old) | keep_in(path)
    if manifest == "damaged":
        (path / "manifest.msgpack").write_bytes(b"damaged")
    elif manifest == "lost":
        (path / "manifest.msgpack").unlink()
    with only_own_files_go(old, stay), told as warnings:
        write_through(path, torch.zeros(300), step=2, overwrite=True)
    assert len(warnings) == 1
    assert zckpt.open(path).step == 2
    assert zckpt.validate(path).ok


def test_a_failed_write_keeps_what_somebody_has_put_into_its_directory(tmp_path: Path) -> None:
    path, kept = tmp_path / "run" / "c", []

    def fail(operation: Callable[[], Any], file: str) -> Any:
        put(Path(file).parent / "thesis.txt")
        kept.append(Path(file).parent / "thesis.txt")
        return BROKEN(operation, file)

    fault = Fault(fail, names=("sync_names",), path="rank-")
    with faulty(fault), told, pytest.raises(zckpt.StorageError):
        write_through(path, torch.ones(3))
    assert files_below(tmp_path) == {*kept} != set()


def test_a_discarded_checkpoint_leaves_foreign_files(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    (tmp_path / "s1" / "manifest.msgpack").unlink()
    (data,) = (tmp_path / "s1").glob("data-*")
    put(data / "rank-00000" / "thesis.txt")
    cleanup = zckpt.gc(tmp_path)
    assert (cleanup.removed, cleanup.recoverable) == ((), (str(tmp_path / "s1"),))
    with only_own_files_go(tmp_path / "s1", {data / "rank-00000" / "thesis.txt"}):
        dry = zckpt.gc(tmp_path, discard="s1", dry_run=True)
        cleanup = zckpt.gc(tmp_path, discard="s1")
    assert (cleanup.removed, cleanup.foreign) == (dry.removed, dry.foreign)
    assert [removed.reason for removed in cleanup.removed] == ["discarded"]
    assert str(data / "rank-00000" / "thesis.txt") in cleanup.foreign


def test_a_repair_that_fails_keeps_what_somebody_has_put_into_its_output(tmp_path: Path) -> None:
    write_state(tmp_path / "c", 2, {"w": (40, 50)})
    next((tmp_path / "c").glob("data-*/index.bin")).unlink()

    def fail(operation: Callable[[], Any], file: str) -> Any:
        put(Path(file).parent / "thesis.txt")
        return BROKEN(operation, file)

    with faulty(Fault(fail, names=("sync_names",), path="out/")), told, pytest.raises(zckpt.StorageError):
        zckpt.repair(tmp_path / "c", output=tmp_path / "out" / "c")
    assert [file.name for file in files_below(tmp_path / "out")] == ["thesis.txt"]


def test_a_stranger_who_comes_while_a_checkpoint_is_removed_loses_nothing(tmp_path: Path) -> None:
    """Only files that were looked at are removed, one by one."""
    write_steps(tmp_path, 1, 2)
    (data,) = (tmp_path / "s1").glob("data-*")

    def come(operation: Callable[[], Any], file: str) -> Any:
        put(data / "rank-00001" / "thesis.txt")
        return operation()

    with faulty(Fault(come, names=("remove",), path="rank-00000")):
        zckpt.prune(tmp_path, keep_last=1)
    assert files_below(tmp_path / "s1") == {data / "rank-00001" / "thesis.txt"}


def test_files_that_the_manifest_names_are_not_read_to_recognise_them(tmp_path: Path) -> None:
    """A write needs few operations, however many files it replaces."""
    write_through(tmp_path / "c", torch.ones(300))
    (old,) = (tmp_path / "c").glob("data-*")
    with faulty() as operations:
        write_through(tmp_path / "c", torch.zeros(300), overwrite=True, reuse=None)
    of_old = [(name, os.path.relpath(file, old)) for name, file in operations.done if old.name in file]
    assert {name for name, _ in of_old} <= {"entry", "entries", "remove"}
    assert sum(name == "entries" for name, _ in of_old) == 2, "one for each directory"


# Crashes


def headers(path: Path) -> Iterator[bytes]:
    """Yields beginnings of data files with a header of one page, and with a longer one."""
    for numel in (1, 2000):
        write_state(path / str(numel), 1, {f"layers.{n}.weight": (1,) for n in range(numel)}, parts=("master",))
        (file,) = (path / str(numel)).glob("data-*/rank-00000/master.safetensors")
        yield file.read_bytes()


def test_a_data_file_is_recognised_whatever_a_crash_has_left_of_it(tmp_path: Path) -> None:
    """Its blocks may be reserved and empty, it may be cut off, and each sector may be there or not."""
    for data in headers(tmp_path):
        sectors = BEGINNING_BYTES // SECTOR_BYTES
        for there in range(1 << sectors):
            page = b"".join(
                data[SECTOR_BYTES * n :][:SECTOR_BYTES] if there >> n & 1 else bytes(SECTOR_BYTES)
                for n in range(sectors)
            )
            assert begins_like_data_file(page)
        for stop in (0, *range(2, BEGINNING_BYTES + 1)):
            assert begins_like_data_file(data[:stop])
            assert begins_like_data_file(data[:stop].ljust(BEGINNING_BYTES, b"\0"))
        assert not begins_like_data_file(data[:BEGINNING_BYTES].replace(b'"zckpt.', b'"other.'))
        assert not begins_like_data_file(b"\x01" + data[1:BEGINNING_BYTES])


@pytest.mark.linux
def test_a_write_that_is_killed_at_any_operation_leaves_nothing_foreign(tmp_path: Path) -> None:
    write_through(tmp_path / "c", torch.ones(99))
    for at in itertools.count(step=int(os.environ.get("ZCKPT_TEST_EVERY", "4"))):

        def write(at: int = at) -> int:
            with faulty(Fault(kill, at)) as operations:
                write_through(tmp_path / "c", torch.zeros(99), overwrite=True, latest=False)
            return len(operations.done)

        done = result_of(fork(write))
        cleanup = zckpt.gc(tmp_path)
        assert (cleanup.foreign, cleanup.in_use, cleanup.recoverable) == ((), (), ())
        assert sorted(path.name[:5] for path in (tmp_path / "c").iterdir()) == ["data-", "manif"]
        if isinstance(done, int) and done > 0:
            break
    assert at > 40


# Folders of other formats


def write_run(path: Path) -> None:
    write_state(path / "global_step5", 2, {"a": (3, 5)}, engine_state=engine_state("a"))
    (path / "latest").write_text("global_step5\n")


@pytest.mark.parametrize(
    "name",
    ["thesis.txt", "plots/loss.png", "my_states.pt", "offloaded_tensors/notes.txt", "offloaded_tensors/rank00/a.txt"],
)
def test_a_conversion_replaces_only_what_deepspeed_has_written(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "run")
    folder = Path(zckpt.convert(tmp_path / "run", tmp_path / "out", to="deepspeed").path)
    swapped = folder / "offloaded_tensors" / "rank00" / "1_2.tensor.swp"
    put(swapped)
    put(folder / name)
    before = {file: file.read_bytes() for file in files_below(tmp_path)}
    with pytest.raises(zckpt.CheckpointExistsError, match=f"has: {name.partition('/')[0]}"):
        zckpt.convert(tmp_path / "run", tmp_path / "out", to="deepspeed", overwrite=True)
    assert {file: file.read_bytes() for file in files_below(tmp_path)} == before
    (folder / name).unlink()
    while not any((folder / name).parent.iterdir()):
        name = name.rpartition("/")[0]
        (folder / name).rmdir()
    zckpt.convert(tmp_path / "run", tmp_path / "out", to="deepspeed", overwrite=True)
    assert not swapped.exists()


def test_a_conversion_replaces_the_target_of_a_link(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tag").symlink_to(tmp_path / "elsewhere")
    for overwrite in (False, True):
        zckpt.convert(tmp_path / "run", tmp_path / "out", to="deepspeed", tag="tag", overwrite=overwrite)
        assert sorted(os.listdir(tmp_path / "out")) == ["latest", "tag"]
        assert (tmp_path / "out" / "tag").is_symlink()
        assert len(os.listdir(tmp_path / "elsewhere")) == 4
        assert sorted(os.listdir(tmp_path)) == ["elsewhere", "out", "run"]


@pytest.mark.parametrize("name", ["lora.safetensors", "model.safetensors.bak"])
def test_an_export_replaces_only_files_that_an_export_writes(tmp_path: Path, name: str) -> None:
    write_state(tmp_path / "c", parts=["master"])
    zckpt.export(tmp_path / "c", tmp_path / "out")
    put(tmp_path / "out" / name)
    with pytest.raises(zckpt.CheckpointExistsError, match=f"no export has: {name}"):
        zckpt.export(tmp_path / "c", tmp_path / "out", overwrite=True)
    (tmp_path / "out" / name).unlink()
    shutil.move(tmp_path / "out" / "model.safetensors", tmp_path / "blob")
    (tmp_path / "out" / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(zckpt.CheckpointExistsError, match=r"has: model\.safetensors"):
        zckpt.export(tmp_path / "c", tmp_path / "out", overwrite=True)
    assert (tmp_path / "blob").exists()


def test_a_checkpoint_of_deepspeed_that_is_replaced_leaves_other_files(tmp_path: Path) -> None:
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "my_states.pt", "notes.txt"):
        put(tmp_path / "c" / name)
    write_through(tmp_path / "c", torch.ones(3), overwrite=True)
    assert {"my_states.pt", "notes.txt"} < tree(tmp_path / "c")
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt" not in tree(tmp_path / "c")
