"""The reader in C, which was written from the specification alone, reports the rule that each fixture breaks, and reads
what the library reads."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import torch
import xxhash

import zckpt
from tests.support.apart import Apart
from tests.support.thread_ranks import ONE_THREAD, ThreadRanks
from zckpt.testing import ReferenceEngine
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC = Path(__file__).parents[2] / "spec"
GOLDEN = Path(__file__).parents[1] / "golden"
MAKE = Path(__file__).parents[1] / "broken" / "make.py"
FIXTURES = json.loads((SPEC / "fixtures.json").read_text())["fixtures"]
SOUND = [fixture for fixture in FIXTURES if fixture["rule"] is None]
SLOW = {"M005-names", "M005-aliases", "M005-containers", "T004-containers"}
COMPILER = os.environ.get("CC", "cc")
FLAGS = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
LIBRARIES = ["-lzstd", "-lxxhash"]
NEEDS = "needs a C compiler and the headers of zstd and xxHash, such as Debian's gcc, libzstd-dev and libxxhash-dev"


def compile_c(sources: list[Path | str], program: Path, flags: list[str], text: str = "") -> str:
    """Returns what the compiler says, and "" if it has made the program."""
    command = [COMPILER, *flags, *map(str, sources), "-o", str(program), *LIBRARIES]
    try:
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return "" if result.returncode == 0 else result.stderr or "it fails"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Compiles the reader, with sanitizers if the compiler has them. Returns a function that runs it."""
    folder = tmp_path_factory.mktemp("reader")
    probe = "#include <xxhash.h>\n#include <zstd.h>\nint main(void) { return 0; }\n"
    if compile_c(["-xc", "-"], folder / "probe", [], probe):
        pytest.skip(NEEDS)
    flags = FLAGS if compile_c(["-xc", "-"], folder / "probe", SANITIZERS, probe) else [*FLAGS, *SANITIZERS]
    assert compile_c(sorted((SPEC / "readers").glob("*.c")), folder / "reader", flags) == ""
    # With the most random addresses of Linux, the address sanitizer of some compilers ends one program in many.
    launcher = ["setarch", "--addr-no-randomize"] if flags != FLAGS and shutil.which("setarch") else []
    if subprocess.run([*launcher, "true"], capture_output=True, check=False).returncode:
        launcher = []

    def run(*words: str | Path) -> subprocess.CompletedProcess[bytes]:
        # The reader ends the program at the first broken rule, and frees nothing then.
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
        command = [*launcher, folder / "reader", *words]
        return subprocess.run(command, capture_output=True, check=False, env=environment)

    return run


def rule_of(result: subprocess.CompletedProcess[bytes]) -> str | None:
    """Returns the rule that the reader has reported, and None if it has found nothing wrong."""
    output = result.stdout.decode()
    assert result.stderr == b"", result.stderr.decode()
    if (result.returncode, output) == (0, "ok\n"):
        return None
    assert (result.returncode, output.count("\n"), output[-1:]) == (1, 1, "\n"), output
    return output.partition(" ")[0]


def place(fixture: dict[str, Any], tmp_path: Path) -> Path:
    """Returns the directory of a fixture. One that is not in the repository is made."""
    if fixture["directory"] is not None:
        return SPEC / fixture["directory"]
    subprocess.run([sys.executable, MAKE, fixture["name"], tmp_path / "large"], check=True)
    return tmp_path / "large"


@pytest.mark.parametrize(
    "fixture",
    [pytest.param(fixture, marks=pytest.mark.matrix) if fixture["name"] in SLOW else fixture for fixture in FIXTURES],
    ids=lambda fixture: fixture["name"],
)
def test_it_reports_the_rule_of_each_fixture(run: Any, fixture: dict[str, Any], tmp_path: Path) -> None:
    path = place(fixture, tmp_path)
    assert rule_of(run("validate", path)) == fixture["rule"]
    assert rule_of(run("load", path)) == (fixture["rule"] if fixture["loader"] else None)
    shutil.rmtree(tmp_path)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def dump(run: Any, path: Path, key: str) -> bytes:
    result = run("dump", path, key)
    assert (result.returncode, result.stderr) == (0, b"")
    content: bytes = result.stdout
    return content


@pytest.mark.parametrize("fixture", SOUND, ids=lambda fixture: fixture["name"])
def test_it_reads_what_the_library_reads(run: Any, fixture: dict[str, Any], tmp_path: Path) -> None:
    path = place(fixture, tmp_path)
    tensors = zckpt.open(path).load()
    rows = [
        f"{key}\t{DTYPE_NAMES[tensor.dtype]}\t[{','.join(map(str, tensor.shape))}]\n" for key, tensor in tensors.items()
    ]
    assert run("list", path).stdout.decode() == "".join(rows)
    for key, tensor in tensors.items():
        assert dump(run, path, key) == raw(tensor), key


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_it_reads_state_and_aliases_of_golden_checkpoints(run: Any, name: str) -> None:
    path = GOLDEN / name / "run"
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    checkpoint = zckpt.open(path)
    states = [key for key in expected["tensors"] if key.startswith("state/")]
    assert states
    for key in states:
        assert xxhash.xxh3_128_hexdigest(dump(run, path, key)) == expected["tensors"][key]["xxh3_128"]
    assert checkpoint.aliases
    for alias, target in checkpoint.aliases.items():
        assert dump(run, path, f"master/{alias}") == dump(run, path, f"master/{target}")
    for rank in range(checkpoint.world_size):
        assert run("tree", path, str(rank)).stdout == dump(run, path, f"state/rank/{rank}")
    manifest = (Path(checkpoint.path) / "manifest.msgpack").read_bytes()
    body = msgpack.unpackb(msgpack.unpackb(manifest)[3])
    assert run("tree", path).stdout == body["state"]


def test_it_reads_files_that_several_ranks_have_written(run: Any, tmp_path: Path) -> None:
    def write(rank: int) -> None:
        zckpt.write(ReferenceEngine(), tmp_path / "c", budget=ONE_THREAD, ranks_per_file=2)

    assert not [outcome.error for outcome in ThreadRanks(3).run(write) if outcome.error]
    assert run("validate", tmp_path / "c").stdout == b"ok\n"
    checkpoint = zckpt.open(tmp_path / "c")
    assert checkpoint["master/weight"].ranks == (0, 2)
    assert dump(run, tmp_path / "c", "master/weight") == raw(checkpoint.load("master/weight")["master/weight"])


def test_it_finds_every_changed_byte(run: Any, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "v1" / "run", tmp_path / "run")
    randomness = random.Random(0)
    for file in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for _ in range(4):
            changed = bytearray(content)
            changed[randomness.randrange(len(content))] ^= 1 << randomness.randrange(8)
            file.write_bytes(changed)
            if file.name == "latest":  # It has no digest. Here no other checkpoint is at the path that it names.
                assert rule_of(run("validate", tmp_path / "run")) == "L001"
            else:
                assert rule_of(run("validate", tmp_path / "run")) in {
                    "M001",
                    "M002",
                    "M003",
                    "I002",
                    "D002",
                    "D003",
                    "S001",
                    "S003",
                }
        file.write_bytes(content)
    assert rule_of(run("validate", tmp_path / "run")) is None


def test_it_says_which_bytes_are_damaged(run: Any, tmp_path: Path) -> None:
    shutil.copytree(SPEC / "example" / "second", tmp_path / "run")
    (file,) = tmp_path.rglob("swap.master.safetensors")
    content = bytearray(file.read_bytes())
    content[8216] ^= 1
    file.write_bytes(content)
    for command in ("validate", "load"):
        output = run(command, tmp_path / "run").stdout.decode()
        assert output.startswith("D003 data-00000000000000aa/rank-00000/swap.master.safetensors: bytes [8216, 8220) ")
    result = run("dump", tmp_path / "run", "master/m")
    assert (result.returncode, result.stdout, result.stderr[:5]) == (1, b"", b"D003 ")


def test_it_accepts_what_a_later_minor_version_may_add(run: Any, tmp_path: Path) -> None:
    apart = Apart.of(SPEC / "example" / "run" / "global_step7")
    apart.version = apart.body["version"] = [1, 300]
    apart.body["later"] = {"any": [msgpack.ExtType(5, b"\xc1"), {1: None}]}
    apart.body["files"]["later"] = None
    apart.files[0].header["__metadata__"]["zckpt.later"] = "text"
    apart.write(tmp_path)
    assert rule_of(run("validate", tmp_path)) is None
    assert rule_of(run("load", tmp_path)) is None


def test_it_names_every_feature_that_it_does_not_know(run: Any, tmp_path: Path) -> None:
    apart = Apart.of(SPEC / "example" / "run" / "global_step7")
    apart.body["requires"] = ["telepathy", "shared-files", "zstd"]
    apart.write(tmp_path)
    output = run("validate", tmp_path).stdout.decode()
    assert output == "M006 manifest.msgpack: requires features that this reader does not know: telepathy zstd\n"


@pytest.mark.parametrize("words", [[], ["read"], ["dump", "x"], ["list", "x", "y"], ["list", "/nonexistent"]])
def test_what_is_no_rule_has_another_status(run: Any, words: list[str]) -> None:
    assert run(*words).returncode == 2
