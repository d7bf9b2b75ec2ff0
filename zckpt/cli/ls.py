"""List the tensors of a checkpoint: their sizes, dtypes and shapes, the ranks that hold them, and their keys.

A key is `<part>/<parameter name>`. A glob such as 'master/*' or '*/model.layers.3.*' lists the tensors whose keys match
it. Put globs in quotes, or the shell may replace them by names of files. A tied weight is listed under one of its
names; --long and --json print the others too. No tensor data are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.cli import output
from zckpt.errors import count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.checkpoint.listing.tensors import Holders, TensorInfo

    Row = tuple[TensorInfo, Holders]

EXAMPLES = """
  zckpt ls checkpoints
  zckpt ls checkpoints/global_step100 'master/*' --sort size
  zckpt ls checkpoints 'exp_avg/*' --tree
  zckpt ls checkpoints --json | jq -r '.[] | select(.dtype != "float32") | .key'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, or the directory of a run with a `latest` file")
    parser.add_argument("keys", nargs="*", default=[], metavar="GLOB", help="list only these keys and globs")
    parser.add_argument(
        "--long", action="store_true", help="also print pieces, tiers and the other names of tied weights"
    )
    parser.add_argument(
        "--sort", choices=["key", "size", "ranks"], help="the order; size and ranks list the largest first"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--tree", action="store_true", help="print a tree of modules with the sizes of each")
    shown.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    from zckpt.checkpoint.listing.find import advised, find_and_open

    store, contents = find_and_open(arguments.path)
    with advised(store):
        infos = list(contents.select(arguments.keys or None).values())
        rows = list(zip(infos, contents.holders(infos), strict=True))
    if arguments.sort == "key":
        rows.sort(key=lambda row: row[0].key)
    elif arguments.sort == "size":
        rows.sort(key=lambda row: -row[0].nbytes)
    elif arguments.sort == "ranks":
        rows.sort(key=lambda row: -row[1].ranks)
    names = _other_names(contents)
    if arguments.json:
        output.print_json([_record(info, holders, names.get(info.name, [])) for info, holders in rows])
    elif arguments.tree:
        _print_tree(rows)
    else:
        _print_rows(rows, names, long=arguments.long)
    return 0


def _other_names(contents: Contents) -> dict[str, list[str]]:
    """Returns the aliases of each tied weight, by the name under which the weight is stored."""
    other_names: dict[str, list[str]] = {}
    for alias, name in contents.manifest.aliases.items():
        other_names.setdefault(name, []).append(alias)
    return other_names


def _record(info: TensorInfo, holders: Holders, other_names: Sequence[str]) -> dict[str, Any]:
    return {
        "key": info.key,
        "dtype": info.torch_name,
        "shape": info.shape,
        "nbytes": info.nbytes,
        "pieces": holders.pieces,
        "ranks": holders.ranks,
        "first_rank": holders.first_rank,
        "last_rank": holders.last_rank,
        "tiers": holders.tiers,
        "other_names": other_names,
    }


def _print_rows(rows: Sequence[Row], names: dict[str, list[str]], *, long: bool) -> None:
    headings = ["size", "dtype", "shape", "ranks", *(["pieces", "tiers"] if long else []), "key"]
    cells = (
        [
            output.size(info.nbytes),
            info.torch_name,
            str(list(info.shape)),
            _ranks(holders),
            *([str(holders.pieces), ", ".join(holders.tiers)] if long else []),
            " = ".join([info.key, *(names.get(info.name, []) if long else [])]),
        ]
        for info, holders in rows
    )
    output.print_table(headings, cells, numbers=("size",))
    output.print_text(f"\n{_total(rows)}")


def _total(rows: Sequence[Row]) -> str:
    return _count(len(rows), sum(info.nbytes for info, _ in rows))


def _count(tensors: int, nbytes: int) -> str:
    return f"{count(tensors, 'tensor')}, {output.size(nbytes)}"


def _ranks(holders: Holders) -> str:
    """Returns the ranks as text: ``3``, ``0-7`` for all ranks from 0 to 7, or ``2 of 0-7`` for some of them."""
    if holders.ranks == 1:
        return str(holders.first_rank)
    first_to_last = f"{holders.first_rank}-{holders.last_rank}"
    are_all = holders.ranks == holders.last_rank - holders.first_rank + 1
    return first_to_last if are_all else f"{holders.ranks} of {first_to_last}"


def _print_tree(rows: Sequence[Row]) -> None:
    from rich.tree import Tree

    sums: dict[str, list[int]] = {}
    """The number of tensors and of bytes in each module."""
    for info, _ in rows:
        for module in _modules(info):
            sum_ = sums.setdefault(module, [0, 0])
            sum_[0] += 1
            sum_[1] += info.nbytes
    root = Tree(_total(rows))
    nodes: dict[str, Tree] = {}
    for info, _ in rows:
        parent, parent_path = root, ""
        modules = _modules(info)
        tensors_in_next = [sums[module][0] for module in modules[1:]] + [1]
        for module, tensors_below in zip(modules, tensors_in_next, strict=True):
            # A module is not shown if all of its tensors are in a single module below it, or if it has only one tensor.
            if sums[module][0] == tensors_below:
                continue
            if module not in nodes:
                tensors, nbytes = sums[module]
                label = module.removeprefix(parent_path).lstrip("/.")
                nodes[module] = parent.add(f"{label}  {_count(tensors, nbytes)}")
            parent, parent_path = nodes[module], module
        label = info.key.removeprefix(parent_path).lstrip("/.")
        parent.add(f"{label}  {info.torch_name} {list(info.shape)}, {output.size(info.nbytes)}")
    output.print_tree(root)


def _modules(info: TensorInfo) -> list[str]:
    """Returns the part of a tensor, and the modules around the tensor, the outermost first. Each module is a path that
    begins with the part, such as ``master/model.layers``."""
    *modules, _ = info.name.split(".")
    return [info.part, *(f"{info.part}/{'.'.join(modules[:depth])}" for depth in range(1, len(modules) + 1))]
