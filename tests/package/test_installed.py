"""The wheel and the source distribution are built and installed, and work without the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import zckpt

ROOT = Path(__file__).parents[2]
SOURCE = Path(zckpt.__file__).parent
NEEDED = ["pyproject.toml", "spec", "tests"]
"""What the tests need of the repository. pyproject.toml has the settings of pytest."""
CORE = [
    "tests/format/test_golden.py::test_a_golden_checkpoint_is_still_read",
    "tests/checkpoint/reading/test_load.py::test_load_gives_what_was_written",
]
WITHOUT_RANKS = ["-m", "not matrix and not machines and not cloud and not ranks"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "hatchling", "build", "-d", directory, cwd=ROOT)
    return directory


@pytest.fixture(scope="module", params=["whl", "tar.gz"])
def installed(request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of the programs of an environment that has zckpt from its distribution, and everything else
    from the environment of this process. A line of a .pth file adds a directory without following its own .pth files,
    by which an editable installation would add the repository."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    programs = environment / "bin"
    others = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (packages(environment) / "others.pth").write_text("\n".join(others))
    (distribution,) = built.glob(f"*.{request.param}")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", "--no-cache-dir"]
    run(programs / "python", "-m", "pip", "install", *options, distribution, cwd=environment)
    return programs


def packages(environment: Path) -> Path:
    (directory,) = environment.glob("lib/python*/site-packages")
    return directory


def run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    ended = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    return ended.stdout


def files(package: Path) -> dict[Path, bytes]:
    found = (path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(package): path.read_bytes() for path in found}


def test_an_installed_package_has_every_file(installed: Path) -> None:
    found = files(packages(installed.parent) / "zckpt")
    assert found == files(SOURCE)
    assert Path("py.typed") in found, "type checkers would not use the types"


def test_an_installed_package_has_one_version(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "zckpt", "--version", cwd=tmp_path) == f"zckpt {zckpt.__version__}\n"
    code = "from importlib import metadata; print(metadata.version('zckpt'))"
    assert run(installed / "python", "-c", code, cwd=tmp_path) == f"{zckpt.__version__}\n"


@pytest.mark.parametrize(
    ("tests", "count_min"),
    [(CORE, 5), pytest.param([*WITHOUT_RANKS, "@tests/elsewhere.txt"], 1000, marks=pytest.mark.matrix)],
    ids=["core", "all"],
)
def test_an_installed_package_reads_checkpoints(
    installed: Path, tmp_path: Path, tests: list[str], count_min: int
) -> None:
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    code = "import zckpt; print(zckpt.__file__)"
    assert Path(run(installed / "python", "-c", code, cwd=tmp_path).strip()).is_relative_to(installed.parent)
    shown = run(installed / "python", "-m", "pytest", "-qpno:cacheprovider", *tests, cwd=tmp_path)
    passed = re.search(r"(\d+) passed", shown)
    assert passed is not None
    assert int(passed[1]) >= count_min, "too few tests ran"
