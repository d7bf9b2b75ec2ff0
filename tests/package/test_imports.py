"""Who may import whom inside zckpt and among its tests, and what importing zckpt costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zckpt

ROOT = Path(zckpt.__file__).parent

# The modules and folders of the package, from the lowest to the highest. Each imports itself and what stands above it.
ORDER = [
    "version", "errors", "progress", "system", "format", "state", "plan", "ranks", "storage", "transfer", "engines",
    "reading", "validation", "repairing", "writing", "restoring", "api", "__init__", "testing", "cli", "__main__",
]  # fmt: skip
ALLOWED = {name: set(ORDER[:number]) for number, name in enumerate(ORDER)}
WITHOUT_TORCH = {"version", "errors", "format", "state", "plan"}

PUBLIC_NAMES = """
    Budget CastError Checkpoint CheckpointExistsError CheckpointNotFoundError Cleanup DeviceError DigestError
    FeatureError Finding FormatError KeyNotFoundError LockedError MismatchError MissingFileError NoSpaceError
    Observation PendingWrite PieceInfo Progress ProgressBar RankError Removed RepairError RepairReport Report Restored
    SizeError StateError StorageError TagError TensorInfo UnfinishedWriteError UnsupportedError VersionError ZckptError
    __version__ attach attach_all convert_zero_checkpoint_to_fp32_state_dict detach gc
    get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint open repair restore validate wait
    write
"""

# The modules above storage that mean local files, none of which belongs to a checkpoint. To all others, a path is a
# Location, which may be that of an object store.
OF_LOCAL_FILES = {
    "api/zero_to_fp32.py",  # writes files of other programs
    "cli/run.py",  # runs a script
    "testing/store_contract.py",  # shares pages of a file outside of the store
    "writing/plain.py",  # replaces a value that is a path
}
PATHS = re.compile(r"\bos\.(path|sep|altsep|listdir|scandir|open|stat|unlink|replace)\b|\bpathlib\b|\bPurePath\b")

FILES = sorted(ROOT.rglob("*.py"))
MODULES = [".".join(("zckpt", *file.relative_to(ROOT).with_suffix("").parts)) for file in FILES]


def imports(tree: ast.AST) -> set[str]:
    """The full names that a module imports, anywhere in it: for ``from a import b``, ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def without_type_checking(tree: ast.Module) -> ast.Module:
    def checks_types(node: ast.stmt) -> bool:
        return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"

    return ast.Module([node for node in tree.body if not checks_types(node)], [])


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_stands_before_it(module: str) -> None:
    tree = ast.parse(FILES[MODULES.index(module)].read_text())
    unit = module.split(".")[1]
    imported = set()
    for name in imports(tree):
        package, _, rest = name.partition(".")
        if package == "zckpt":
            first = rest.partition(".")[0]
            imported.add(first if first in ALLOWED else "__init__")
    assert imported <= ALLOWED[unit] | {unit}
    if unit in WITHOUT_TORCH:
        assert "torch" not in {name.partition(".")[0] for name in imports(without_type_checking(tree))}


def test_nothing_above_the_stores_takes_a_path_apart() -> None:
    above = ORDER[ORDER.index("storage") + 1 :]
    files = {file.relative_to(ROOT).as_posix(): file for file in FILES}
    found = {name for name, file in files.items() if PATHS.search(file.read_text(encoding="utf-8"))}
    assert {name for name in found if name.split("/")[0].removesuffix(".py") in above} == OF_LOCAL_FILES


def test_every_module_imports_on_its_own_and_all_but_its_adapter_without_deepspeed() -> None:
    names = [name.removesuffix(".__init__") for name in MODULES if not name.endswith("__main__")]
    script = """
import importlib, os, sys, zckpt
assert "deepspeed" not in sys.modules
for name in sys.argv[1:]:
    adapter = name.startswith("zckpt.engines.deepspeed")
    if adapter:
        import deepspeed  # here, once for all
    pid = os.fork()
    if pid == 0:
        if not adapter:
            sys.modules["deepspeed"] = None  # importing it raises
        importlib.import_module(name)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
"""
    subprocess.run([sys.executable, "-c", script, *names], check=True)


def test_the_public_names_are_these() -> None:
    assert sorted(zckpt.__all__) == sorted(PUBLIC_NAMES.split())


def test_no_test_module_imports_another() -> None:
    """What several need is in tests/support."""
    tests = Path(__file__).parents[1]
    for file in tests.rglob("test_*.py"):
        imported = {name for name in imports(ast.parse(file.read_text())) if name.startswith("tests.")}
        assert not {name for name in imported if ".test_" in name}, file
