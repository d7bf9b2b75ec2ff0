"""The modules of zckpt and its tests import only what they may, and importing zckpt does not import torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import zckpt
from tests.support.names_in_code import full_names
from zckpt.frameworks import zero_to_fp32

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(zckpt.__file__).parent


IN: dict[str, dict[str, set[str]]] = {}
"""The tables in docs/architecture.md: for each package that has one, the names of its modules and folders, and the
promises of each. A module or folder imports only itself and those before it."""
for row, promises in re.findall(
    r"^\| `([\w/]+)` \| ((?:no torch, no I/O|no torch|torch late|no files)?) \| \S.* \|$",
    (ROOT.parent / "docs" / "architecture.md").read_text(),
    re.MULTILINE,
):
    *folder, name = row.split("/")
    IN.setdefault(".".join(("zckpt", *folder)), {})[name] = set(promises.split(", ")) - {""}
ORDER = {package: [*rows] for package, rows in IN.items()}
PROMISES = {f"{package}.{name}": promises for package, rows in IN.items() for name, promises in rows.items()}
WITHOUT_IO = {
    "__future__", "bisect", "collections", "contextlib", "dataclasses", "difflib", "enum", "errno", "fnmatch",
    "functools", "itertools", "json", "math", "msgpack", "numpy", "re", "reprlib", "struct", "sys", "types", "typing",
    "warnings", "xxhash", "zstandard",
}  # fmt: skip
"""The packages, other than zckpt, that a module that promises "no I/O" may import while the program runs."""
OF_FILES = {"fcntl", "io", "mmap", "pathlib", "shutil", "tempfile"}
FILE_FUNCTIONS = {
    "dump", "fdopen", "fromfile", "genfromtxt", "load", "loadtxt", "memmap", "open", "open_memmap", "save", "savetxt",
    "savez", "savez_compressed", "tofile",
}  # fmt: skip
"""The names of functions that open, read or write a file, in Python itself, in any module or of any object."""
IO_FUNCTIONS = {*FILE_FUNCTIONS, "input", "print", "stderr", "stdin", "stdout"}

PUBLIC_NAMES = """
    Background Budget Checkpoint CheckpointExistsError CheckpointNotFoundError CopyTo FormatError PendingWrite
    ProgressBar RankError TrainState ZckptError __version__ attach convert cp dcp diff errors export offload offloaded
    on_preemption open prune register reload report restore types validate wait where write write_state_dict
"""
FURTHER_NAMES = """
    CastError Cleanup Converted DeviceError Difference DigestError Exported FeatureError Finding KeyNotFoundError
    LockedError MismatchError MissingFileError NoSpaceError Observation Offloaded OffloadedError PieceInfo Placement
    PlacementEntry Preemption Progress RankMemory RankStates Removed RepairError RepairReport Report Restored SizeError
    StateDifference StateError StorageError TagError TensorDifference TensorInfo UnfinishedWriteError UnsupportedError
    VersionError attach_all convert_zero_checkpoint_to_fp32_state_dict detach gc
    get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint repair
"""
"""The names that few programs need, and that are names of zckpt, too."""

# The modules after storage that use local files, none of which belongs to a checkpoint. In all other modules after
# storage, a path is a Location, which may be that of an object store.
OF_LOCAL_FILES = {
    "frameworks/accelerate_fsdp.py",
    "frameworks/patches.py",  # removes what Trainer has written
    "frameworks/lightning_fsdp.py",
    "tools/where.py",  # looks at swap files
    "tools/hugging_face.py",  # names the configuration of a model in errors
    "tools/exporting/hugging_face.py",  # reads the folder of a model
    "tools/exporting/place.py",  # writes files of other programs
    "frameworks/trainer_files.py",  # looks at files of Trainer
    "tools/converting/dcp_folder.py",  # reads files of other programs
    "tools/converting/deepspeed_folder.py",  # reads files of other programs
    "tools/converting/formats.py",  # looks at folders of other programs
    "tools/converting/hugging_face.py",  # reads files of other programs
    "tools/converting/pickle_objects.py",  # makes values that are paths
    "tools/converting/restricted_pickle.py",
    "tools/converting/source.py",  # reads files of other programs
    "frameworks/zero_to_fp32.py",  # writes files of other programs
    "offloading/scratch.py",  # writes files that do not outlive the process
    "cli/run.py",  # runs a script
    "testing/store_data_contract.py",  # shares pages of a file outside of the store
    "checkpoint/writing/plain.py",  # replaces a value that is a path
}
PATHS = re.compile(r"os\.(path|sep|altsep|listdir|scandir|open|stat|unlink|replace|\*)\b.*|pathlib\b.*")

FILES = sorted(ROOT.rglob("*.py"))
MODULES = [".".join(("zckpt", *file.relative_to(ROOT).with_suffix("").parts)) for file in FILES]
NAMED = {module.removesuffix(".__init__"): file for module, file in zip(MODULES, FILES, strict=True)}
"""The file of each module and package by its name."""


def imports(tree: ast.AST) -> set[str]:
    """Returns the full names that a module imports anywhere.

    They are ``a.b`` for ``from a import b``, and both ``a.b`` and ``a`` for ``import a.b``, by which the module can
    reach all names in ``a``.
    """
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
    """Returns the code that runs while the module is imported, without the bodies of its functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = []
    return tree


def without_type_checking(tree: ast.Module) -> ast.Module:
    def checks_types(node: ast.stmt) -> bool:
        return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"

    return ast.Module([node for node in tree.body if not checks_types(node)], [])


def units(names: set[str], package: str = "zckpt") -> set[str]:
    """Returns the rows of the table of ``package`` that these names belong to.

    zckpt itself and its public names belong to the row ``__init__``.
    """
    inside = {name[len(package) + 1 :].partition(".")[0] for name in names if f"{name}.".startswith(f"{package}.")}
    return {name if name in ORDER[package] else "__init__" for name in inside}


def promises_of(name: str) -> set[str]:
    """Returns the promises of the row of the innermost table that a name of zckpt belongs to."""
    parts = name.split(".")
    rows = [".".join(parts[:count]) for count in (3, 2)]
    return next((PROMISES[row] for row in rows if row in PROMISES), PROMISES["zckpt.__init__"])


def of_zckpt(names: set[str]) -> set[str]:
    return {name for name in names if name.partition(".")[0] == "zckpt"}


def names_in(tree: ast.AST) -> set[str]:
    """Returns the names and attributes that a module uses, and the last parts of the full names of what it uses."""
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return used | {name.rpartition(".")[2] for name in full_names(tree)}


@pytest.mark.parametrize("package", IN)
def test_the_table_has_every_module_and_folder_once(package: str) -> None:
    inside = [name[len(package) + 1 :].partition(".")[0] for name in MODULES if name.startswith(f"{package}.")]
    assert sorted(ORDER[package]) == sorted({name for name in inside if name != "__init__" or package == "zckpt"})


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_those_before_it_in_the_table(module: str) -> None:
    names = imports(ast.parse(FILES[MODULES.index(module)].read_text()))
    for package, order in ORDER.items():
        (unit,) = units({module}, package) or {""}
        if unit in order:
            assert units(names, package) <= {*order[: order.index(unit)], unit}


@pytest.mark.parametrize("module", [module for module in MODULES if promises_of(module)])
def test_a_module_keeps_its_promises(module: str) -> None:
    promises = promises_of(module)
    tree = ast.parse(FILES[MODULES.index(module)].read_text())
    for promise in promises - {"torch late", "no files"}:
        assert not {name for name in of_zckpt(imports(tree)) if promise not in promises_of(name)}, promise
    tree = without_type_checking(tree)
    foreign = {name.partition(".")[0] for name in imports(tree)} - {"zckpt"}
    if "no torch" in promises:
        assert "torch" not in foreign
    if "torch late" in promises:
        early = imports(without_functions(tree))
        assert "torch" not in {name.partition(".")[0] for name in early}
        assert not {name for name in of_zckpt(early) if not promises_of(name) & {"torch late", "no torch"}}
    if "no I/O" in promises:
        assert foreign <= WITHOUT_IO
        assert not names_in(tree) & IO_FUNCTIONS
    if "no files" in promises:
        assert not foreign & OF_FILES
        assert not names_in(tree) & FILE_FUNCTIONS


def test_nothing_after_the_stores_takes_a_path_apart() -> None:
    after = ORDER["zckpt"][ORDER["zckpt"].index("storage") + 1 :]
    files = {file.relative_to(ROOT).as_posix(): file for file in FILES}
    with_paths = {name for name, file in files.items() if takes_paths_apart(file.read_text(encoding="utf-8"))}
    assert {name for name in with_paths if name.split("/")[0].removesuffix(".py") in after} == OF_LOCAL_FILES


def takes_paths_apart(source: str) -> bool:
    return any(map(PATHS.fullmatch, full_names(ast.parse(source))))


@pytest.mark.parametrize(
    "code",
    [
        "from os import path", "from os.path import join as j", "import os as o; o.stat(p)", "from pathlib import Path",
        "import os; getattr(os, 'listdir')(p)", "import pathlib as p",
    ],
)  # fmt: skip
def test_code_that_takes_a_path_apart_is_found(code: str) -> None:
    assert takes_paths_apart(code)
    assert not takes_paths_apart('import os; os.getpid(); "os.path"; store.listdir(location)')


def imported_first(name: str) -> set[str]:
    """Returns the modules of zckpt whose import ends before the import of the module ``name``.

    The packages that contain the module itself are among them only if the module names them.
    """
    tree = ast.parse(NAMED[name].read_text())
    modules: set[str] = set()
    for full_name in imports(without_functions(without_type_checking(tree))):
        parts = full_name.split(".")
        chain = [above for count in range(1, len(parts) + 1) if (above := ".".join(parts[:count])) in NAMED]
        modules |= {module for module in chain if module == chain[-1] or not name.startswith(f"{module}.")}
    return modules - {name}


def test_no_imports_run_in_a_circle() -> None:
    """Therefore each module can be the first one that is imported."""
    TopologicalSorter({name: imported_first(name) for name in NAMED}).prepare()


def test_every_module_but_the_adapter_of_deepspeed_is_imported_without_it() -> None:
    names = [name for name in NAMED if not name.endswith(("__main__", "torchtitan"))]  # torchtitan may not be there
    names.sort(key=lambda name: name.startswith("zckpt.adapters.deepspeed"))
    script = """
import importlib, sys
sys.modules["deepspeed"] = None  # importing it raises
for name in sys.argv[1:]:
    if name.startswith("zckpt.adapters.deepspeed"):
        if sys.modules["deepspeed"] is None:
            del sys.modules["deepspeed"]
        import deepspeed
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-c", script, *names], check=True)


def test_the_public_names_are_these() -> None:
    assert sorted(zckpt.__all__) == sorted(PUBLIC_NAMES.split())
    assert all(hasattr(zckpt, name) for name in (PUBLIC_NAMES + FURTHER_NAMES).split())
    assert {*zckpt.__all__} <= {*dir(zckpt)}
    assert not any(hasattr(zckpt, name) for name in ("nothing", "Nothing"))


def test_type_checkers_see_the_public_names_that_are_imported_late() -> None:
    """What is not in ``__all__`` is public for them if it is imported by ``import *`` or ``import a as a``."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    late = imports(tree) - imports(without_type_checking(tree)) - {"typing.TYPE_CHECKING"}
    names = {f"zckpt.{name}" for name in zckpt._MODULES}
    for module in ("errors", "types", "frameworks.zero_to_fp32"):
        names.add(f"zckpt.{module}.*")
    names |= {f"zckpt.{of}.{name}" for name, of in zckpt._HOME.items() if f"zckpt.{of}.*" not in names}
    assert late == names
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    renamed = {alias.name for alias in aliases if alias.asname == alias.name}
    assert renamed == {name.rpartition(".")[2] for name in late} - {*zckpt.__all__, "*"}
    types = ast.parse((ROOT / "types.py").read_text())
    homes = {f"zckpt.{module}.{name}" for name, module in zckpt.types._HOMES.items()}
    assert imports(types) - imports(without_type_checking(types)) - {"typing.TYPE_CHECKING"} == homes
    assert zero_to_fp32.__all__ == zckpt._LATE["frameworks.zero_to_fp32"]


def test_importing_zckpt_or_its_command_line_imports_no_torch() -> None:
    code = (
        "import sys, zckpt, zckpt.cli, zckpt.checkpoint.listing.find; zckpt.Cleanup; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_load_imports_nothing_that_takes_longer_than_to_open_a_checkpoint(tmp_path: Path) -> None:
    zckpt.write_state_dict({"weight": torch.ones(3)}, tmp_path / "checkpoint")
    code = (
        "import sys, zckpt; ck = zckpt.open(sys.argv[1]); assert ck['param/weight'].pieces; ck.load();"
        "sys.exit('numpy.ma' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "checkpoint"], check=True)


def test_no_test_module_imports_another() -> None:
    """Code that several test modules need is in tests/support."""
    tests = Path(__file__).parents[1]
    for file in tests.rglob("test_*.py"):
        imported = {name for name in imports(ast.parse(file.read_text())) if name.startswith("tests.")}
        assert not {name for name in imported if ".test_" in name}, file


def test_mypy_expects_no_package_that_make_setup_does_not_install() -> None:
    """Otherwise mypy fails on a clean machine, and on no machine that has the package for another reason."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    mypy = project["tool"]["mypy"]
    ignored = {
        name.removesuffix(".*")
        for override in mypy["overrides"] if override.get("ignore_missing_imports") for name in override["module"]
    }  # fmt: skip
    folders = [ROOT.parent, *(ROOT.parent / folder for folder in mypy["mypy_path"])]
    ours = {path.stem for folder in folders for path in folder.iterdir()}
    files = [file for folder in mypy["files"] for file in (ROOT.parent / folder).rglob("*.py")]
    imported = {name.partition(".")[0] for file in files for name in imports(ast.parse(file.read_text()))}
    extras = project["project"]["optional-dependencies"]
    installed = with_dependencies([*project["project"]["dependencies"], *extras["deepspeed"], *extras["dev"]])
    packages = metadata.packages_distributions()
    importable = {name for name in packages if installed.intersection(map(canonicalize_name, packages[name]))}
    assert imported - ours - set(sys.stdlib_module_names) - importable <= ignored
    assert ignored <= imported


def with_dependencies(requirements: list[str]) -> set[str]:
    """Returns the names of the packages that these requirements install. A package that is not installed here is
    returned without the packages that it depends on."""
    seen: set[tuple[str, str]] = set()
    queue = names_and_extras(map(Requirement, requirements))
    while queue:
        name, extra = queue.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            further = [Requirement(text) for text in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            continue
        queue += names_and_extras(r for r in further if r.marker is None or r.marker.evaluate({"extra": extra}))
    return {name for name, _ in seen}


def names_and_extras(requirements: Iterable[Requirement]) -> list[tuple[str, str]]:
    return [
        (canonicalize_name(requirement.name), extra)
        for requirement in requirements
        for extra in ("", *requirement.extras)
    ]
