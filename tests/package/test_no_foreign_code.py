"""zckpt executes nothing that it reads: no module of it names a function that could, except those that are listed here
with a reason."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase
from pathlib import Path

import zckpt
from tests.support.names_in_code import full_names

ROOT = Path(zckpt.__file__).parent

BY_A_NAME = "*.[*]"
UNSAFE = [
    # They make objects of pickles, or of formats that are as powerful.
    "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "shelve",
    "numpy.load", "numpy.lib.*load", "pandas.read_pickle",
    "torch.load", "torch.hub", "torch.jit.load", "torch.package", "torch.serialization.load",
    "torch.distributed.*_object", "torch.distributed.*_object_list",
    # They run code, or import modules.
    "__builtins__", "__import__", "__loader__", "__spec__", "compile", "eval", "exec", "globals",
    "builtins", "code", "codeop", "ctypes.*DLL", "ctypes.cdll", "ctypes.pythonapi", "imp", "importlib", "pkgutil",
    "pydoc", "runpy", "timeit", "torch.classes.load_library", "torch.ops.load_library",
    "torch.utils.cpp_extension", "zipimport",
    # They start other programs.
    "_posixsubprocess", "asyncio", "nt", "os.exec*", "os.popen", "os.posix_spawn*", "os.spawn*", "os.startfile",
    "os.system", "posix", "pty", "subprocess",
    # They could reach all of the above by a name that the code computes.
    BY_A_NAME, "operator.attrgetter", "operator.methodcaller",
]  # fmt: skip
"""Patterns of full names, as ``full_names`` returns them. A name is unsafe if it, or what it is in, matches one."""
SAFE = ["importlib.metadata", "importlib.resources"]
"""These modules read files of installed packages, and import nothing."""

ALLOWED = {
    "__init__.py": {"globals", "importlib"},  # imports the modules of public names, by a table in its code
    "types.py": {"globals", "importlib"},  # the same
    "frameworks/patches.py": {"importlib", BY_A_NAME},  # replaces functions of modules that a table in its code names
    "frameworks/zero_to_fp32.py": {BY_A_NAME},  # by a table in its code
    "cli/__init__.py": {"importlib"},  # imports commands, by a table in its code
    "cli/doctor.py": {BY_A_NAME},  # devices of torch and limits of the system, by lists in its code
    "cli/run.py": {"importlib", "runpy"},  # runs the script of a user
    "tools/converting/deepspeed_flats.py": {BY_A_NAME},  # a dtype of torch
    "tools/converting/deepspeed_plan.py": {BY_A_NAME},  # a dtype of torch
    "tools/converting/restricted_pickle.py": {"pickle"},  # reads pickles, as tests/tools/converting shows
    "tools/converting/pickle_objects.py": {BY_A_NAME},  # names and numbers of what a pickle may make
    "tools/converting/to_dcp.py": {"pickle"},  # writes a pickle
    "engines/__init__.py": {"importlib", BY_A_NAME},  # imports adapters, by a table in its code
    "engines/composed.py": {BY_A_NAME},  # a dtype of torch
    "adapters/deepspeed/data_sampler.py": {BY_A_NAME},  # the module of a live object
    "adapters/extra_state.py": {BY_A_NAME},  # a method of a module, by a table in its code
    "tools/hugging_face.py": {BY_A_NAME},  # a class of models, which it checks to be one
    "tools/exporting/engine_source.py": {BY_A_NAME},  # only compares what it finds with the class of a live object
    "tools/exporting/torch_file.py": {"pickle", BY_A_NAME},  # writes a pickle, with classes of torch's storages
    "ranks/groups.py": {"ctypes.pythonapi"},  # keeps objects alive
    "system/linux.py": {"ctypes.*DLL"},  # the C library of the process itself
    "transfer/torch_dtypes.py": {BY_A_NAME},  # a dtype of torch
}
"""The patterns that match in these files, and why this is harmless."""


def unsafe(code: str) -> set[str]:
    """Returns the patterns that match what the code names."""
    names = {name for name in full_names(ast.parse(code)) if not name.startswith("zckpt.")}
    starts = set().union(*(of_name for of_name in map(starts_of, names) if not of_name & {*SAFE}))
    return {pattern for pattern in UNSAFE if any(fnmatchcase(start, pattern) for start in starts)}


def starts_of(name: str) -> set[str]:
    """Returns a full name, such as ``os.path.join``, and the names of what contains it: ``os.path`` and ``os``."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def test_no_module_names_what_could_execute_what_it_reads() -> None:
    found = {path.relative_to(ROOT).as_posix(): unsafe(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
    assert {file: patterns for file, patterns in found.items() if patterns} == ALLOWED


PLANTED = """
from torch import load
from torch import load as something
from torch import *
import torch as t; t.load(path)
import torch; alias = torch; alias.load(path)
import torch; function = torch.serialization.load
import torch; getattr(torch, "load")(path)
import torch; getattr(torch, "lo" + "ad")(path)
import torch; vars(torch)["load"](path)
import torch; torch.__dict__["load"](path)
import torch.distributed as dist; dist.broadcast_object_list(objects)
from torch.distributed import all_gather_object
import numpy as np; np.load(path, allow_pickle=True)
import pickle
import pickle as p; p.loads(raw)
from pickle import loads as x
from pickle import Unpickler
from _pickle import loads
import sys; sys.modules["pickle"].loads(raw)
import sys; sys.modules.get("pick" + "le").loads(raw)
import marshal
from marshal import loads
import shelve
import dill
import joblib
from cloudpickle import loads
from multiprocessing.connection import Client
import importlib; importlib.import_module("pickle")
from importlib import import_module
import importlib.util as util
__import__("pickle")
eval(text)
exec(text)
run = eval; run(text)
list(map(exec, texts))
compile(text, name, "exec")
import builtins; builtins.eval(text)
from builtins import exec as run
__builtins__["eval"](text)
globals()["__builtins__"]
import os; os.system(text)
import os as o; o.popen(text)
from os import system
from os import execv as run
import os; os.posix_spawn(path, [], {})
import os; getattr(os, "system")(text)
import posix; posix.system(text)
import subprocess; subprocess.run(text, shell=True)
from subprocess import Popen as P
import asyncio; asyncio.create_subprocess_shell(text)
import pty; pty.spawn(text)
import runpy
import ctypes; ctypes.CDLL(path)
from ctypes import cdll
from operator import attrgetter
"""


def test_every_way_to_execute_something_is_found() -> None:
    assert [code for code in PLANTED.strip().splitlines() if not unsafe(code)] == []


def test_harmless_code_is_not_taken_for_unsafe() -> None:
    code = """
import importlib.metadata, os, re, json, torch
from importlib.resources import files
re.compile("pickle"); json.loads(text); self.eval(); model.eval(); loads = json.loads; loads(text)
getattr(torch, "bfloat16"); os.path.join("a", "b"); "pickle.loads"; getattr(self, name); vars(self)
"""
    assert unsafe(code) == set()
