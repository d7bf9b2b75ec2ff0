"""Finds which modules and functions a piece of Python code names, whatever it calls them itself.

``import pickle as p; p.loads``, ``from pickle import loads as x`` and ``getattr(pickle, "loads")`` all name
``pickle.loads``. A test that looked for the words ``pickle.loads`` would find none of them.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def full_names(tree: ast.AST) -> set[str]:
    """Returns the full names of all modules that the code imports, and of all that it uses of them, such as
    ``torch.load``, and the names of Python's own functions that it uses, such as ``eval``.

    A name ends in ``.*`` where the code could reach everything in a module: by ``from module import *``, by ``vars``,
    or by ``getattr`` with a name that it computes.
    """
    code = Code(tree)
    names = {name for name, _ in code.uses()}
    for node in code.nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


class Code:
    """A piece of code, and what its own names stand for. A name that means different things in different functions
    stands for all of them."""

    def __init__(self, tree: ast.AST) -> None:
        self.nodes = [*ast.walk(tree)]
        self._bound: dict[str, set[str]] = defaultdict(set)
        assignments: list[tuple[str, ast.expr]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    self._bound[alias.asname or first].add(alias.name if alias.asname else first)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self._bound[alias.asname or alias.name].add(f"{node.module}.{alias.name}")
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                assignments += [(target.id, node.value) for target in targets if isinstance(target, ast.Name)]
        number = -1
        while number != (number := sum(map(len, self._bound.values()))):
            for name, value in assignments:
                if found := self.meanings(value):
                    self._bound[name] |= found

    def meanings(self, node: ast.AST) -> set[str]:
        """Returns the full names of the module, class or function that an expression may stand for."""
        if isinstance(node, ast.Name):
            if node.id in self._bound:
                return self._bound[node.id]
            return {node.id} & {"__builtins__", *vars(builtins)}
        if isinstance(node, ast.Attribute):
            name = "*" if node.attr == "__dict__" else node.attr
            return {f"{owner}.{name}" for owner in self.meanings(node.value)}
        if isinstance(node, ast.Subscript) and self.meanings(node.value) == {"sys.modules"}:
            return _text(node.slice) or {"sys.modules.*"}
        if isinstance(node, ast.Call):
            function = self.meanings(node.func)
            if function == {"getattr"} and len(node.args) > 1:
                names = _text(node.args[1]) or {"*"}
                return {f"{owner}.{name}" for owner in self.meanings(node.args[0]) for name in names}
            if function == {"vars"} and node.args:
                return {f"{owner}.*" for owner in self.meanings(node.args[0])}
            if function == {"sys.modules.get"} and node.args:
                return _text(node.args[0]) or {"sys.modules.*"}
            if function & {"importlib.import_module", "__import__"} and node.args:
                return _text(node.args[0])
        return set()

    def uses(self) -> Iterator[tuple[str, ast.AST]]:
        """Yields what each expression in the code may stand for, and the expression."""
        for node in self.nodes:
            for name in self.meanings(node):
                yield name, node


def _text(node: ast.AST) -> set[str]:
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
