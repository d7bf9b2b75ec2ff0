"""List the tensors of a checkpoint: their sizes, dtypes and shapes, the ranks that hold them, and their keys.

A key is `<part>/<parameter name>`. A glob such as 'master/*' or '*/model.layers.3.*' lists the tensors whose keys match
it. Put it in quotes, or the shell may replace it by names of files. A tied weight is listed under one of its names;
--long and --json print the others too. No tensor is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.cli import output
from zckpt.errors import count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from zckpt.listing.contents import Contents, Holders, TensorInfo

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
    parser.add_argument("--sort", choices=["key", "size", "ranks"], help="sort; with size and ranks, the largest first")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--tree", action="store_true", help="print a tree of modules with the sums of each")
    shown.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    from zckpt.listing.find import advised, find, open_contents

    store = find(arguments.path)
    with advised(store):
        contents = open_contents(store)
        infos = [contents[key] for key in contents.select(arguments.keys or None)]
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
    found: dict[str, list[str]] = {}
    for alias, name in contents.manifest.aliases.items():
        found.setdefault(name, []).append(alias)
    return found


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
    print(f"\n{_total(rows)}")


def _total(rows: Sequence[Row]) -> str:
    return _count(len(rows), sum(info.nbytes for info, _ in rows))


def _count(tensors: int, nbytes: int) -> str:
    return f"{count(tensors, 'tensor')}, {output.size(nbytes)}"


def _ranks(holders: Holders) -> str:
    if holders.ranks == 1:
        return str(holders.first_rank)
    span = f"{holders.first_rank}-{holders.last_rank}"
    return span if holders.ranks == holders.last_rank - holders.first_rank + 1 else f"{holders.ranks} of {span}"


def _print_tree(rows: Sequence[Row]) -> None:
    from rich.text import Text
    from rich.tree import Tree

    sums: dict[str, list[int]] = {}
    for info, _ in rows:
        for above in _modules(info):
            count = sums.setdefault(above, [0, 0])
            count[0] += 1
            count[1] += info.nbytes
    root = Tree(Text(_total(rows)))
    nodes: dict[str, Tree] = {}
    for info, _ in rows:
        at, before = root, ""
        modules = _modules(info)
        inside = [sums[below][0] for below in modules[1:]] + [1]
        for above, tensors_below in zip(modules, inside, strict=True):
            if sums[above][0] == tensors_below:
                continue  # all tensors of this module are in one below it, or it has one only: that is shown instead
            if above not in nodes:
                tensors, nbytes = sums[above]
                own = above.removeprefix(before).lstrip("/.")
                nodes[above] = at.add(Text(f"{own}  {_count(tensors, nbytes)}"))
            at, before = nodes[above], above
        own = info.key.removeprefix(before).lstrip("/.")
        at.add(Text(f"{own}  {info.torch_name} {list(info.shape)}, {output.size(info.nbytes)}"))
    output.print_tree(root)


def _modules(info: TensorInfo) -> list[str]:
    """Returns the part of a tensor and the modules that it is in, the outermost first. Each is a path from the part."""
    *modules, _ = info.name.split(".")
    return [info.part, *(f"{info.part}/{'.'.join(modules[:count])}" for count in range(1, len(modules) + 1))]
