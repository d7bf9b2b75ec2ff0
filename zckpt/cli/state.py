"""Show the tree of non-tensor state of a checkpoint.

The tree has the counters of the engine, its param groups, the state of the scheduler and your client_state. WHERE is a
path in the tree, such as client_state.epoch or 'engine.optimizer.param_groups[0]'. With --rank, the tree of one rank is
shown instead, which holds what that rank alone had, such as the states of its random number generators. Of tensors in
the tree only the dtype and shape are shown; they are not read.
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

    from zckpt.listing.contents import TensorInfo

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
    from zckpt.format import tree
    from zckpt.listing.find import advised, find, open_contents

    store = find(arguments.path)
    with advised(store):
        contents = open_contents(store)
        packed = contents.packed_state(arguments.rank)
        if packed is None:
            raise KeyNotFoundError(
                f"there is no state of rank {arguments.rank}", file=str(store.location),
                hint=f"{count(contents.manifest.world_size, 'rank')} wrote the checkpoint, and not every engine has "
                "state of each rank",
            )  # fmt: skip
        found = tree.unpack(packed[0], lambda ext, name: contents.state_info(name), packed[1])
    found = _at(found, arguments.where)
    if arguments.json:
        output.print_json(_plain(found))
    else:
        _print(found, arguments.where or "state")
    return 0


_STEP = re.compile(r"\.?([^.\[\]]+)|\[(?:(-?[0-9]+)|'([^']*)'|\"([^\"]*)\")\]")
"""One step of a path: a name, a number in brackets, or a quoted name in brackets. Errors about trees write paths in the
same way."""


def _at(found: Any, where: str) -> Any:
    """Returns what is at a path of the tree. Raises KeyNotFoundError, which says what is there instead."""
    position = 0
    while position < len(where):
        step = _STEP.match(where, position)
        if step is None:
            raise KeyNotFoundError(
                f"{where[position:]!r} is not a step of a path", key=where,
                hint="write a path such as client_state.epoch or 'engine.optimizer.param_groups[0]'",
            )  # fmt: skip
        name, number, *quoted = step.groups()
        key: Any = int(number) if number is not None else next(one for one in (name, *quoted) if one is not None)
        try:
            found = found[key]
        except (LookupError, TypeError):
            raise KeyNotFoundError(
                f"there is no {key!r} in {where[:position] or 'the tree'}", key=where, hint=_what_is_in(found)
            ) from None
        position = step.end()
    return found


def _what_is_in(found: Any) -> str:
    if isinstance(found, dict):
        return f"it has {', '.join(map(repr, found))}" if found else "it is empty"
    return f"it has {len(found)} elements" if isinstance(found, (list, tuple)) else "it is a single value"


def _plain(found: Any) -> Any:
    """Returns a value that JSON can hold. Bytes become base64, and numbers that JSON does not have become text."""
    if isinstance(found, dict):
        return {str(key): _plain(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_plain(one) for one in found]
    if isinstance(found, bytes):
        return {"base64": base64.b64encode(found).decode()}
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    if found is None or isinstance(found, (bool, int, float, str)):
        return found
    return {"dtype": found.torch_name, "shape": list(found.shape)}


def _print(found: Any, name: str) -> None:
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text(_line(name, found)))
    _add(root, found)
    output.print_tree(root)


def _add(node: Tree, found: Any) -> None:
    from rich.text import Text

    if _is_short(found):
        return
    rows = found.items() if isinstance(found, dict) else ((f"[{number}]", one) for number, one in enumerate(found))
    for name, value in rows:
        _add(node.add(Text(_line(str(name), value))), value)


def _line(name: str, found: Any) -> str:
    return f"{name}: {_text(found)}" if _is_short(found) else name


def _is_short(found: Any) -> bool:
    """Whether the value is shown in one line, because it is a single value or a short list."""
    if isinstance(found, dict):
        return not found
    if isinstance(found, (list, tuple)):
        return not any(isinstance(one, (dict, list, tuple)) and one for one in found) and len(_text(found)) <= _LINE
    return True


_LINE = 80


def _text(found: Any) -> str:
    if isinstance(found, bytes):
        return f"{len(found):,} bytes"
    if isinstance(found, (list, tuple)):
        inside = ", ".join(map(_text, found))
        return f"[{inside}]" if isinstance(found, list) else f"({inside})"
    return repr(found) if found is None or isinstance(found, (bool, int, float, str, dict)) else _tensor(found)


def _tensor(info: TensorInfo) -> str:
    return f"{info.torch_name} {list(info.shape)}"
