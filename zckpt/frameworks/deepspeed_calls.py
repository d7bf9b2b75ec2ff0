"""The ``save_checkpoint`` and ``load_checkpoint`` that an attached engine of DeepSpeed gets in the place of its own."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zckpt.checkpoint.background import wait_for
from zckpt.checkpoint.listing.other_formats import deepspeed_files
from zckpt.checkpoint.listing.runs import latest_name, names_in
from zckpt.checkpoint.open import open_chosen, open_loader
from zckpt.checkpoint.restore import restore_engine
from zckpt.checkpoint.restoring.mismatch import Caller
from zckpt.checkpoint.restoring.plan import Request, engine_state
from zckpt.engines import adapt, group_of
from zckpt.engines.registered import registered
from zckpt.errors import FormatError, MismatchError, TagError, UnsupportedError, warn
from zckpt.format import names
from zckpt.format.limits import LATEST_BYTES_MAX
from zckpt.frameworks.attached_saves import choose_copy, save
from zckpt.plan.inventory import WEIGHT_PARTS
from zckpt.ranks.collectives import Ranks
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zckpt.checkpoint.tiers.choice import Chosen
    from zckpt.checkpoint.writing.options import WriteOptions
    from zckpt.checkpoint.writing.saves import Saves
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath

_LOAD = Caller(
    call="engine.load_checkpoint",
    in_part="load_module_strict=False",
    weights="load_module_only=True restores the weights alone",
    counters="load_optimizer_states=False restores the counters too; add load_lr_scheduler_states=False if the "
    "scheduler does not fit",
    settings='zckpt.attach(zckpt.detach(engine), settings="engine")',
    scheduler="load_lr_scheduler_states=False",
)
_HERE = ""
"""Stands for the tag of a checkpoint in the directory of the run itself."""


def save_checkpoint(
    engine: Any,
    options: WriteOptions,
    saves: Saves,
    save_dir: StrPath,
    tag: object = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    def checked_tag() -> str:
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty path, got {save_dir!r}")
        Location.of(save_dir)  # An invalid path raises its error here, so that the other ranks learn of it.
        adapter.refuse_unsupported(drop_gradients=True, leave_out=True)
        return f"global_step{engine.global_steps}" if tag is None else str(tag)

    adapter = adapt(engine)
    ranks = Ranks(group_of(engine), call="engine.save_checkpoint")
    tag_of_first, other = ranks.decide(checked_tag, _first_and_other, "save a checkpoint")
    ranks.together(lambda: _check_tags(engine, tag_of_first, other, ranks), "agree on a tag")
    path = ranks.together(lambda: _path_of(tag_of_first, save_dir), "agree on a tag")
    if save_latest:
        save_latest = ranks.together(lambda: _may_be_latest(path, save_dir, ranks), "agree on a tag")
    options = replace(
        options,
        # Without an optimizer, the engine trains no parameter, so all of its weights would be left out.
        exclude=("param",) if exclude_frozen_parameters and adapter.trains else (),
        client_state=client_state,
        latest=save_latest,
        node_local=engine.use_node_local_storage(),
    )
    save(engine, saves, options, save_dir, path, ranks)
    ranks.together(lambda: _warn_of_gradients(engine) if ranks.rank == 0 else None, "end the save")
    return True


def _path_of(tag: str, save_dir: StrPath) -> str:
    """Returns the directory of a checkpoint. Raises ValueError if it is ``save_dir`` or a directory that contains
    ``save_dir``."""
    run = Location.of(save_dir)
    place = run.child(tag)
    if {*place.absolute().path_from(run.absolute()).split("/")} <= {".", ".."}:
        raise ValueError(
            f"the tag {tag!r} names {place.absolute()}, which is or contains the directory of the run: choose a tag "
            "that names a directory of its own, such as 'global_step100'"
        )
    return str(place)


def _may_be_latest(path: str, save_dir: StrPath, ranks: Ranks) -> bool:
    """Returns whether ``latest`` can name the checkpoint. If not, rank 0 gives a warning. Raises ValueError if the
    checkpoint would take the place of the file ``latest``."""
    place, run = Location.of(path).absolute(), Location.of(save_dir).absolute()
    try:
        latest_name(place, run)
    except ValueError as error:
        if place.path_from(run).split("/")[0] == names.LATEST:
            raise
        if ranks.rank == 0:
            warn(f"the checkpoint is saved, but `latest` does not name it, so pass its tag to load it: {error}")
        return False
    return True


def _first_and_other(tags: Sequence[str]) -> tuple[str, tuple[int, str] | None]:
    """Returns the tag of rank 0, and the first rank that has another one, with its tag."""
    return tags[0], next(((number, tag) for number, tag in enumerate(tags) if tag != tags[0]), None)


def _check_tags(engine: Any, tag_of_first: str, other: tuple[int, str] | None, ranks: Ranks) -> None:
    """Gets what ``_first_and_other`` returns. If the tags differ, raises TagError, warns or does nothing, as
    DeepSpeed's configuration requires."""
    if other is None or not engine.checkpoint_tag_validation_enabled():
        return
    number, tag = other
    first_rank, other_rank = ranks.members[0], ranks.members[number]
    differs = f"the ranks have different tags: {tag_of_first!r} on rank {first_rank}, {tag!r} on rank {other_rank}"
    if engine.checkpoint_tag_validation_fail():
        raise TagError(
            differs,
            rank=other_rank,
            hint='pass the same tag on every rank; with checkpoint.tag_validation other than "Fail" in DeepSpeed\'s '
            "configuration, rank 0's is taken",
        )
    if ranks.rank == 0:
        warn(f"{differs}; the checkpoint is saved under rank {first_rank}'s tag")


def _warn_of_gradients(engine: Any) -> None:
    from zckpt.adapters.deepspeed.refuse import pending_gradients

    for reason in pending_gradients(engine):
        warn(f"the checkpoint does not hold {reason}")


def load_checkpoint(
    engine: Any,
    original: Callable[..., Any],
    saves: Saves,
    load_dir: StrPath,
    tag: object = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
) -> tuple[Any, Any]:
    ranks = Ranks(group_of(engine), call=_LOAD.call)
    wait_for(ranks)  # A write in the background may be about to change `latest`.
    saves.begin_anew()
    universal = engine.load_universal_checkpoint()
    run = ranks.together(lambda: open_store(load_dir), "find the checkpoint")
    found_tag, in_deepspeed_format = ranks.first(lambda: _find(run, tag, universal), "find the checkpoint")
    if found_tag is None:  # Rank 0 may be on a new machine, whose disk is empty.
        found_tag, in_deepspeed_format = ranks.decide(
            lambda: _find(run, tag, universal),
            lambda of_ranks: next((one for one in of_ranks if one[0] is not None), of_ranks[0]),
            "find the checkpoint",
        )
    chosen: Chosen | None = None
    path = "" if found_tag is None else str(run.location.child(found_tag) if found_tag != _HERE else run.location)
    found = None if in_deepspeed_format else choose_copy(saves, run.location.absolute(), tag, ranks)
    if found is not None:
        chosen, path = found
    if not path:
        missing = f"there is no {run.location.child('latest_universal' if universal else 'latest')}"
        if universal:
            raise ValueError(f"{missing}, which DeepSpeed needs with checkpoint.load_universal")
        warning = f"{missing}: pass a tag to load a checkpoint that it does not name"
        ranks.together(lambda: warn(warning) if ranks.rank == 0 else None, "find the checkpoint")
        return None, None
    if in_deepspeed_format and found_tag is not None:
        ranks.together(lambda: _refuse_registered(engine, found_tag), "find the checkpoint")
        options = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        return original(load_dir, found_tag, *options, custom_load_fn)  # type: ignore[no-any-return]
    weights_only = load_module_only or not load_optimizer_states

    def choose_parts() -> tuple[list[str] | None, list[str]]:
        """Returns the names of the parts and of the trees of state that are to be restored. None means all parts."""
        if custom_load_fn is not None:
            raise UnsupportedError(
                "custom_load_fn: the weights go straight into the engine's own memory",
                hint="load them with zckpt.open(path).state_dict() and put them where they belong",
            )
        adapter = adapt(engine)
        adapter.refuse_unsupported(drop_gradients=True, leave_out=True)
        left_out = set(adapter.trees if load_module_only else ())
        if weights_only:
            left_out.add("optimizer")
        if not load_lr_scheduler_states or engine.lr_scheduler is None:
            left_out.add("scheduler")
        parts = None
        if weights_only:
            checkpoint = open_loader(path) if chosen is None else open_chosen(chosen)
            parts = sorted(WEIGHT_PARTS)
            state = engine_state(checkpoint)
            if state is not None and "scheduler" not in state:  # The writer had no optimizer, so it had no scheduler.
                left_out.add("scheduler")
        return parts, [tree for tree in adapter.trees if tree not in left_out]

    parts, trees = ranks.together(choose_parts, "open the checkpoint")
    request = Request(
        parts=parts, state=trees, strict=bool(load_module_strict), own_client_state=True, caller=_LOAD,
        all_moments=True, leave_out=True, settings=saves.settings, absent_parts=weights_only,
    )  # fmt: skip
    restored, _ = restore_engine(engine, path if chosen is None else chosen, request)
    if not weights_only:
        saves.end(0, load_dir)
    return path, dict(restored)


def _refuse_registered(engine: Any, tag: str) -> None:
    objects = registered(engine).objects
    if objects:
        raise MismatchError(
            f"{tag} is in DeepSpeed's own format, which has no state of {', '.join(map(repr, objects))}, registered "
            "with the engine; nothing was changed",
            hint="to begin anew with such an object, register it after load_checkpoint",
        )


def _find(run: Store, tag: object, universal: bool) -> tuple[str | None, bool]:
    """Returns the tag that is to be loaded, and whether its folder is in DeepSpeed's own format. The tag is ``_HERE``
    if the directory is itself a checkpoint, such as one from ``zckpt.convert``, and None if no file names a tag.

    ``universal``: whether a checkpoint of DeepSpeed has to be a Universal Checkpoint, which ``latest_universal`` names.
    """
    if tag is not None:
        return str(tag), _has_deepspeed_format(run.child(str(tag)))
    for file in ("latest", "latest_universal") if universal else ("latest",):
        try:
            target = run.location.child(file).resolved()  # The file may be a symbolic link, and a reader follows none.
            with closing(open_store(target.parent).reader()) as reader:
                raw = reader.read(target.name, 0, LATEST_BYTES_MAX + 1)
        except (FormatError, ValueError):  # There is no such file, or no file can have such a name.
            continue
        named_tag = raw.decode(errors="surrogateescape").strip()
        checkpoint = run.child(named_tag)
        if universal and file == "latest" and checkpoint.entry(names.MANIFEST) is None:
            continue
        if _has_deepspeed_format(checkpoint):
            return named_tag, True
        return names.decode_latest(raw, str(run.location.child(file))), False
    return None if run.entry(names.MANIFEST) is None else _HERE, False


def _has_deepspeed_format(store: Store) -> bool:
    return store.entry(names.MANIFEST) is None and bool(deepspeed_files(names_in(store)))
