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

TABLE = re.findall(
    r"^    (\w+) +(no torch, no I/O|no torch|torch late|no files|-) +(\S.*)$", zckpt.__doc__ or "", re.MULTILINE
)
"""The table in the package's docstring: for each module or folder its name, what it promises, and what it is. Each
imports itself and what stands above it."""
ORDER = [name for name, _, _ in TABLE]
PROMISES = {name: set(promises.split(", ")) - {"-"} for name, promises, _ in TABLE}
WITHOUT_IO = {
    "__future__", "collections", "contextlib", "dataclasses", "difflib", "errno", "fnmatch", "functools", "itertools",
    "json", "math", "msgpack", "numpy", "re", "reprlib", "struct", "sys", "types", "typing", "warnings",
    "xxhash", "zstandard",
}  # fmt: skip
"""What may be imported while the program runs where there is no I/O, beside zckpt itself."""
OF_FILES = {"fcntl", "io", "mmap", "pathlib", "shutil", "tempfile"}
FILE_FUNCTIONS = {
    "dump", "fdopen", "fromfile", "genfromtxt", "load", "loadtxt", "memmap", "open", "open_memmap", "save", "savetxt",
    "savez", "savez_compressed", "tofile",
}  # fmt: skip
"""What opens, reads or writes a file, be it a function of Python, or of any module or object."""
IO_FUNCTIONS = {*FILE_FUNCTIONS, "input", "print", "stderr", "stdin", "stdout"}

PUBLIC_NAMES = """
    Budget CastError Checkpoint CheckpointExistsError CheckpointNotFoundError Cleanup Converted DeviceError
    Difference DigestError Exported FeatureError Finding FormatError KeyNotFoundError LockedError MismatchError
    MissingFileError NoSpaceError Observation Offloaded OffloadedError PendingWrite PieceInfo Placement
    PlacementEntry Preemption Progress ProgressBar RankError RankMemory RankStates Removed RepairError RepairReport
    Report Restored SizeError StateDifference StateError StorageError TagError TensorDifference TensorInfo
    UnfinishedWriteError UnsupportedError VersionError ZckptError __version__ attach attach_all convert
    convert_zero_checkpoint_to_fp32_state_dict cp detach diff export gc get_fp32_state_dict_from_zero_checkpoint
    load_state_dict_from_zero_checkpoint offload offloaded on_preemption open prune register reload repair report
    restore validate wait where write
"""

# The modules above storage that mean local files, none of which belongs to a checkpoint. To all others, a path is a
# Location, which may be that of an object store.
OF_LOCAL_FILES = {
    "api/where.py",  # looks at swap files
    "engines/hugging_face.py",  # names the configuration of a model in errors
    "exporting/hugging_face.py",  # reads the folder of a model
    "exporting/place.py",  # writes files of other programs
    "converting/deepspeed_folder.py",  # reads files of other programs
    "converting/formats.py",  # looks at folders of other programs
    "converting/hugging_face.py",  # reads files of other programs
    "converting/restricted_pickle.py",
    "converting/source.py",  # reads files of other programs
    "api/zero_to_fp32.py",  # writes files of other programs
    "converting/to_deepspeed.py",  # writes files of other programs
    "cli/run.py",  # runs a script
    "testing/store_contract.py",  # shares pages of a file outside of the store
    "writing/plain.py",  # replaces a value that is a path
}
PATHS = re.compile(r"\bos\.(path|sep|altsep|listdir|scandir|open|stat|unlink|replace)\b|\bpathlib\b|\bPurePath\b")

FILES = sorted(ROOT.rglob("*.py"))
MODULES = [".".join(("zckpt", *file.relative_to(ROOT).with_suffix("").parts)) for file in FILES]


def imports(tree: ast.AST) -> set[str]:
    """The full names that a module imports, anywhere in it: ``a.b`` for ``from a import b``, and both ``a.b`` and ``a``
    for ``import a.b``, by which it can reach all that is in ``a``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
            names |= {alias.name.partition(".")[0] for alias in node.names if alias.asname is None}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def without_functions(tree: ast.Module) -> ast.Module:
    """What runs while the module is imported; the bodies of its functions do not."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = []
    return tree


def without_type_checking(tree: ast.Module) -> ast.Module:
    def checks_types(node: ast.stmt) -> bool:
        return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"

    return ast.Module([node for node in tree.body if not checks_types(node)], [])


def units(names: set[str]) -> set[str]:
    """Which rows of the table these names belong to; the package itself and its public names are ``__init__``."""
    own = {(*name.split("."), "")[1] for name in names if name.partition(".")[0] == "zckpt"}
    return {name if name in ORDER else "__init__" for name in own}


def names_in(tree: ast.AST) -> set[str]:
    """The names and attributes that a module uses, and the last parts of what it imports."""
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return used | {name.rpartition(".")[2] for name in imports(tree)}


def test_the_table_has_every_module_and_folder_once() -> None:
    there = {file.stem if file.parent == ROOT else file.relative_to(ROOT).parts[0] for file in FILES}
    assert sorted(ORDER) == sorted(there)


@pytest.mark.parametrize("module", MODULES)
def test_no_import_runs_up(module: str) -> None:
    unit = module.split(".")[1]
    found = units(imports(ast.parse(FILES[MODULES.index(module)].read_text())))
    assert found <= {*ORDER[: ORDER.index(unit)], unit}


@pytest.mark.parametrize("module", [module for module in MODULES if PROMISES[module.split(".")[1]]])
def test_promises_are_kept(module: str) -> None:
    promises = PROMISES[module.split(".")[1]]
    tree = ast.parse(FILES[MODULES.index(module)].read_text())
    for promise in promises - {"torch late", "no files"}:
        assert not {unit for unit in units(imports(tree)) if promise not in PROMISES[unit]}, promise
    tree = without_type_checking(tree)
    foreign = {name.partition(".")[0] for name in imports(tree)} - {"zckpt"}
    if "no torch" in promises:
        assert "torch" not in foreign
    if "torch late" in promises:
        early = imports(without_functions(tree))
        assert "torch" not in {name.partition(".")[0] for name in early}
        assert not {unit for unit in units(early) if not PROMISES[unit] & {"torch late", "no torch"}}
    if "no I/O" in promises:
        assert foreign <= WITHOUT_IO
        assert not names_in(tree) & IO_FUNCTIONS
    if "no files" in promises:
        assert not foreign & OF_FILES
        assert not names_in(tree) & FILE_FUNCTIONS


def test_the_architecture_has_the_same_table() -> None:
    rows = [f"| {link(name)} | {'' if promises == '-' else promises} | {what} |" for name, promises, what in TABLE]
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    assert "\n".join(rows) in text


def link(name: str) -> str:
    file = name if (ROOT / name).is_dir() else f"{name}.py"
    return f"[`{file}`](../zckpt/{file})"


def test_nothing_above_the_stores_takes_a_path_apart() -> None:
    above = ORDER[ORDER.index("storage") + 1 :]
    files = {file.relative_to(ROOT).as_posix(): file for file in FILES}
    found = {name for name, file in files.items() if PATHS.search(file.read_text(encoding="utf-8"))}
    assert {name for name in found if name.split("/")[0].removesuffix(".py") in above} == OF_LOCAL_FILES


def test_every_module_imports_on_its_own_and_all_but_its_adapter_without_deepspeed() -> None:
    names = [name.removesuffix(".__init__") for name in MODULES if not name.endswith("__main__")]
    script = """
import importlib, os, sys, torch, zckpt  # torch here, once for all
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


def test_type_checkers_see_the_public_names_that_are_imported_late() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    late = imports(tree) - imports(without_type_checking(tree)) - {"typing.TYPE_CHECKING"}
    assert late == {f"zckpt.{module}.{name}" for module, names in zckpt._LATE.items() for name in names}
    assert {*zckpt.__all__} <= {*dir(zckpt)}
    assert all(hasattr(zckpt, name) for name in zckpt.__all__)


def test_to_import_zckpt_or_its_command_line_imports_no_torch() -> None:
    code = "import sys, zckpt, zckpt.cli, zckpt.listing.find; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_test_module_imports_another() -> None:
    """What several need is in tests/support."""
    tests = Path(__file__).parents[1]
    for file in tests.rglob("test_*.py"):
        imported = {name for name in imports(ast.parse(file.read_text())) if name.startswith("tests.")}
        assert not {name for name in imported if ".test_" in name}, file


def test_type_checkers_find_the_types_of_an_installed_package() -> None:
    assert (ROOT / "py.typed").is_file()
