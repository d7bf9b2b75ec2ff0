"""Show the tree of non-tensor state of a checkpoint.

The tree has the counters of the engine, its param groups, the state of the scheduler and your client_state. WHERE is a
path in the tree, such as client_state.epoch or 'engine.optimizer.param_groups[0]'. With --rank, the command shows the
tree of one rank instead, which has the state of that rank alone, such as the states of its random number generators.
Tensors in the tree are shown only by their dtypes and shapes; they are not read.
"""

from __future__ import annotations

import base64
import math
import re
from typing import TYPE_CHECKING, Any

from zckpt.cli import output
from zckpt.errors import KeyNotFoundError, count

if TYPE_CHECKING:
    import argparse

    from rich.tree import Tree

EXAMPLES = """
  zckpt state checkpoints
  zckpt state checkpoints client_state
  zckpt state checkpoints 'engine.optimizer.param_groups[0]' --json
  zckpt state checkpoints/global_step100 --rank 3
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, or the directory of a run with a `latest` file")
    parser.add_argument("where", nargs="?", default="", metavar="WHERE", help="show only what is at this path")
    parser.add_argument("--rank", type=int, metavar="N", help="show the tree of this rank, not the one that all share")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    from zckpt.checkpoint.listing.find import advised, find_and_open
    from zckpt.format import tree

    store, contents = find_and_open(arguments.path)
    with advised(store):
        packed = contents.packed_state(arguments.rank)
        if packed is None:
            raise KeyNotFoundError(
                f"there is no state of rank {arguments.rank}", file=str(store.location),
                hint=f"{count(contents.manifest.world_size, 'rank')} wrote the checkpoint, and not every engine has "
                "state of each rank",
            )  # fmt: skip
        root = tree.unpack(packed[0], lambda ext, name: contents.state_info(name), packed[1])
    value = _at(root, arguments.where)
    if arguments.json:
        output.print_json(_plain(value))
    else:
        _print(value, arguments.where or "state")
    return 0


_STEP = re.compile(r"\.?([^.\[\]]+)|\[(?:(-?[0-9]+)|'([^']*)'|\"([^\"]*)\")\]")
"""One step of a path: a name, a number in brackets, or a quoted name in brackets. Errors about trees use this notation
too."""


def _at(value: Any, where: str) -> Any:
    """Returns the value at the path ``where`` of the tree ``value``. Raises KeyNotFoundError if there is none. Its hint
    says what is there instead."""
    position = 0
    while position < len(where):
        step = _STEP.match(where, position)
        if step is None:
            raise KeyNotFoundError(
                f"{where[position:]!r} is not a step of a path", key=where,
                hint="write a path such as client_state.epoch or 'engine.optimizer.param_groups[0]'",
            )  # fmt: skip
        name, number, *quoted = step.groups()
        names = (name, *quoted)
        key: Any = int(number) if number is not None else next(name for name in names if name is not None)
        try:
            value = value[key]
        except (LookupError, TypeError):
            raise KeyNotFoundError(
                f"there is no {key!r} in {where[:position] or 'the tree'}", key=where, hint=_what_is_in(value)
            ) from None
        position = step.end()
    return value


def _what_is_in(value: Any) -> str:
    if isinstance(value, dict):
        return f"it has {', '.join(map(repr, value))}" if value else "it is empty"
    return f"it has {len(value)} elements" if isinstance(value, (list, tuple)) else "it is a single value"


def _plain(value: Any) -> Any:
    """Returns the value as JSON can express it. Bytes become base64, and NaN and infinities become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"dtype": value.torch_name, "shape": list(value.shape)}


def _print(value: Any, name: str) -> None:
    from rich.tree import Tree

    root = Tree(_line(name, value))
    _add(root, value)
    output.print_tree(root)


def _add(node: Tree, value: Any) -> None:
    if _is_short(value):
        return
    rows = value.items() if isinstance(value, dict) else ((f"[{number}]", item) for number, item in enumerate(value))
    for name, item in rows:
        _add(node.add(_line(str(name), item)), item)


def _line(name: str, value: Any) -> str:
    return f"{name}: {_text(value)}" if _is_short(value) else name


def _is_short(value: Any) -> bool:
    """Returns whether the value is shown in one line, because it is a single value or a short list."""
    if isinstance(value, dict):
        return not value
    if isinstance(value, (list, tuple)):
        is_nested = any(isinstance(item, (dict, list, tuple)) and item for item in value)
        return not is_nested and len(_text(value)) <= _LINE_LENGTH_MAX
    return True


_LINE_LENGTH_MAX = 80


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(_text, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    if value is None or isinstance(value, (bool, int, float, str, dict)):
        return repr(value)
    return f"{value.torch_name} {list(value.shape)}"
