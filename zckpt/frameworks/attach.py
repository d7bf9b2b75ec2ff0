"""Makes DeepSpeed's own save_checkpoint and load_checkpoint use zckpt."""

from __future__ import annotations

import functools
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch.distributed as dist

from zckpt.checkpoint.background import wait_for
from zckpt.checkpoint.listing.other_formats import deepspeed_files
from zckpt.checkpoint.listing.runs import latest_name, names_in
from zckpt.checkpoint.open import open_chosen, open_loader
from zckpt.checkpoint.restore import restore_engine
from zckpt.checkpoint.restoring.mismatch import Caller
from zckpt.checkpoint.restoring.plan import Request, check_settings, engine_state
from zckpt.checkpoint.writing.collect import what_is_left_out
from zckpt.checkpoint.writing.decide import LEFT_OUT, tell
from zckpt.checkpoint.writing.options import WriteOptions, check_counts
from zckpt.checkpoint.writing.saves import Saves, forget_saves, saves_of
from zckpt.engines import adapt, group_of
from zckpt.engines.hooks import after_calls
from zckpt.engines.registered import registered, with_registered
from zckpt.errors import (
    FormatError,
    MismatchError,
    TagError,
    UnsupportedError,
    warn,
)
from zckpt.format import names
from zckpt.format.limits import LATEST_BYTES_MAX
from zckpt.frameworks import fsdp_models, zero_to_fp32
from zckpt.frameworks import patches as frameworks
from zckpt.frameworks.attached_saves import choose_copy, save
from zckpt.plan.inventory import WEIGHT_PARTS
from zckpt.ranks.collectives import Ranks
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.transfer.budget import flag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zckpt.checkpoint.tiers.choice import Chosen
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath

    class _Options(TypedDict, total=False):
        background: bool | None
        replace_deepspeed: bool
        keep_last: int | None
        keep_every: int | None
        full_every: int | None
        reuse: Literal["latest"] | None
        copy_to: StrPath | None
        copy_keep_last: int | None
        copy_keep_every: int | None
        settings: Literal["checkpoint", "engine"]
        ranks_per_file: int


_LOAD = Caller(
    call="engine.load_checkpoint",
    in_part="load_module_strict=False",
    weights="load_module_only=True restores the weights alone",
    counters="load_optimizer_states=False restores the counters too; add load_lr_scheduler_states=False if the "
    "scheduler does not fit",
    settings='zckpt.attach(zckpt.detach(engine), settings="engine")',
    scheduler="load_lr_scheduler_states=False",
)
_METHODS = ("save_checkpoint", "load_checkpoint")
_MARK = "_zckpt_attaches"


def attach(
    engine: Any,
    *,
    background: bool | None = None,
    replace_deepspeed: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
    full_every: int | None = None,
    reuse: Literal["latest"] | None = "latest",
    copy_to: StrPath | None = None,
    copy_keep_last: int | None = None,
    copy_keep_every: int | None = None,
    settings: Literal["checkpoint", "engine"] = "checkpoint",
    ranks_per_file: int = 1,
) -> Any:
    """Makes ``save_checkpoint`` and ``load_checkpoint`` of a DeepSpeed engine use zckpt.

    Arguments, return values, tags, ``latest`` and ``<dir>/<tag>/`` mean what they mean in DeepSpeed, with these
    differences:

    - ``load_checkpoint`` also works in an engine that has trained or saved, and with another world size, ZeRO stage and
      offload than those of the checkpoint.
    - The path that ``load_checkpoint`` returns is the directory of the checkpoint.
    - A failure on one rank raises an error on every rank.
    - A tag that ``latest`` cannot name, such as ``../best``, is saved without a change to ``latest``, with a warning.
    - ``custom_load_fn`` raises UnsupportedError for a zckpt checkpoint.

    A folder in DeepSpeed's own format is loaded by DeepSpeed. ``load_checkpoint`` does not restore random number
    generators. Objects that are registered with the engine (``zckpt.register``) are saved and loaded with it. Rank 0
    reads ``latest`` and determines the format of a folder for all ranks. If DeepSpeed's configuration sets
    ``checkpoint.load_universal``, a zckpt checkpoint that ``latest`` names is loaded as it is. ``latest_universal`` is
    read only if ``latest`` names no zckpt checkpoint.

    If the ranks pass different tags, ``checkpoint.tag_validation`` in DeepSpeed's configuration decides. "Fail" raises
    TagError, which is an AssertionError too. "Warn" and "Ignore" save the checkpoint under the tag of rank 0, and
    "Warn" gives a warning. If the ranks pass different ``client_state``, the ``client_state`` of each rank is saved. A
    load with the same number of ranks returns to each rank its own. A load with another number of ranks returns the
    ``client_state`` of rank 0 to every rank, with a warning. A save in the middle of gradient accumulation leaves the
    gradients out, as DeepSpeed does, with a warning. What a module adds to its ``state_dict`` and no checkpoint can
    hold, such as an object, is left out too, with a warning. An engine without an optimizer saves its weights and
    buffers.

    What ``zckpt.write`` would refuse, such as a function in ``client_state`` or in the state of a scheduler, is left
    out of the checkpoint. A warning names each such value once: those of the scheduler and the optimizer's settings at
    this call, those of the optimizer's state and of registered objects after the first step, and those of
    ``client_state`` at the save. After a load, the engine keeps its own values in their place. If the ranks have
    different values of which one is saved for all, such as one that an optimizer computes from its own partition, that
    of rank 0 is saved, with a warning.

    With ``full_every``, a checkpoint is full if it holds the whole state. The first save into a directory is full, and
    the count begins anew with each full checkpoint that is saved there or loaded. Directories whose paths differ only
    in their numbers, such as ``checkpoint-10`` and ``checkpoint-20``, count as one. A run that was stopped and resumed
    therefore has its full checkpoints at the same steps as a run that was not. ``load_checkpoint`` raises MismatchError
    for a checkpoint that is not full, and names the newest full one, unless it is called with ``load_module_only=True``
    or ``load_optimizer_states=False``. For this reason ``latest`` continues to name the newest full checkpoint of
    ``save_dir``, if there is one. A save into the directory of a full checkpoint is full as well.

    Attaching an engine a second time changes nothing, whatever the arguments are, even if ``zckpt run`` attached it
    first. ``detach`` undoes ``attach``: ``zckpt.attach(zckpt.detach(engine), keep_last=3)`` attaches the engine anew.

    Args:
        engine: the engine that ``deepspeed.initialize`` has returned.
        background: whether saves continue in the background while the training goes on. The next save or load and the
            end of the process wait for them and show their errors. None means that the environment variable
            ZCKPT_BACKGROUND decides, which is 0 or 1. If it is not set, saves do not run in the background.
        replace_deepspeed: whether a save to a tag that holds a checkpoint in DeepSpeed's own format removes that
            checkpoint once the new one is complete. If not, such a save raises CheckpointExistsError and changes
            nothing.
        keep_last: the number of checkpoints of ``save_dir`` that each save keeps, as for ``zckpt.write``. None keeps
            all.
        keep_every: as for ``zckpt.write``.
        full_every: a number N: every N-th save holds the whole state. The others leave out what the optimizer keeps for
            each weight, such as the moments of Adam. With Adam they take a third of the bytes. None means that all
            checkpoints are full.
        reuse: None writes all files anew. "latest" has the same meaning as for ``zckpt.write``.
        copy_to: the directory of a run, such as ``"s3://bucket/run"``, to which each save is copied while the training
            goes on, as by ``zckpt.write``. ``load_checkpoint`` then looks in ``load_dir`` and in this directory, as
            ``zckpt.restore`` does with both paths. If Trainer, Accelerate or Lightning has made a directory for one
            save, such as ``checkpoint-10``, the copy is in a directory of this name in ``copy_to``. The frameworks' own
            files are not copied.
        copy_keep_last: as for ``zckpt.write``.
        copy_keep_every: as for ``zckpt.write``.
        settings: whether ``load_checkpoint`` restores the settings of the checkpoint, or the engine keeps its own, such
            as a new learning rate, as for ``zckpt.restore``. With ``load_lr_scheduler_states=False`` the scheduler
            stays where it is.
        ranks_per_file: as for ``zckpt.write``.

    Returns:
        The engine.

    Raises:
        UnsupportedError: the object has no methods ``save_checkpoint`` and ``load_checkpoint``, or zckpt could not save
            and restore everything in the engine. The error names the mode. Or there is no store for the scheme of
            ``copy_to``.
        ValueError: a number is not a whole number of 1 or more, or an argument or the environment variable has a value
            that is not allowed.
    """
    if not all(hasattr(engine, method) for method in _METHODS):
        raise UnsupportedError(
            f"{type(engine).__name__} has no {' and '.join(_METHODS)}",
            hint="attach the engine that deepspeed.initialize returns; any other one: zckpt.write and zckpt.restore",
        )
    options = _write_options(
        background, replace_deepspeed, keep_last, keep_every, full_every, reuse, copy_to, copy_keep_last,
        copy_keep_every, settings, ranks_per_file,
    )  # fmt: skip
    if saves_of(engine) is None:
        adapter = adapt(engine)
        adapter.refuse_unsupported(drop_gradients=True, leave_out=True)
        original: Callable[..., Any] = engine.load_checkpoint
        saves = Saves(engine, full_every or 1, settings, copy_to)
        engine.save_checkpoint = functools.partial(_save_checkpoint, engine, options, saves)
        engine.load_checkpoint = functools.partial(_load_checkpoint, engine, original, saves)
        _tell_what_is_left_out(engine, None)
        _after_first_step(engine, adapter.step, functools.partial(_check_after_step, engine, saves))
    return engine


def _after_first_step(engine: Any, step: int, action: Callable[[], None]) -> None:
    """Arranges that ``action`` is called once, after the step of the engine that follows ``step``."""

    def once() -> None:
        if adapt(engine).step != step:  # It was not only a step of gradient accumulation.
            undo()
            action()

    undo = after_calls([(engine, "step", once)])


def _check_after_step(engine: Any, saves: Saves) -> None:
    """Tells what saves cannot keep. Some states of the optimizer, and registered objects, exist only after a step."""
    if saves_of(engine) is not saves:  # The engine was detached.
        return
    try:
        adapt(engine).refuse_unsupported(drop_gradients=True, leave_out=True)
        _tell_what_is_left_out(engine, with_registered(engine, None))
    except Exception as error:  # A save raises it again. The training goes on until then.
        warn(f"save_checkpoint of this engine is going to fail: {error}")


def _tell_what_is_left_out(engine: Any, states: Mapping[str, Any] | None) -> None:
    """Gives a warning about what saves leave out. ``states``: those of the registered objects."""
    if _is_first(engine):
        tell(engine, LEFT_OUT, what_is_left_out(adapt(engine), states))


def _is_first(engine: Any) -> bool:
    """Returns whether this is the first rank of the engine, which gives the warnings."""
    return not dist.is_initialized() or dist.get_rank(group_of(engine)) == 0


def _write_options(
    background: bool | None = None,
    replace_deepspeed: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
    full_every: int | None = None,
    reuse: str | None = "latest",
    copy_to: StrPath | None = None,
    copy_keep_last: int | None = None,
    copy_keep_every: int | None = None,
    settings: str = "checkpoint",
    ranks_per_file: int = 1,
) -> WriteOptions:
    """Returns the options of the writes of an attached engine. Raises ValueError."""
    check_counts(full_every=full_every)
    check_settings(settings)
    if reuse not in ("latest", None):
        raise ValueError(f"reuse must be 'latest' or None, got {reuse!r}")
    options = WriteOptions(
        overwrite=True, pending_gradients="drop", each_client_state=True, leave_out=True,
        replace_foreign=replace_deepspeed, keep_last=keep_last, keep_every=keep_every, reuse=reuse,
        copy_to=copy_to, copy_keep_last=copy_keep_last, copy_keep_every=copy_keep_every,
        ranks_per_file=ranks_per_file,
        background=flag("ZCKPT_BACKGROUND", False) if background is None else background,
    )  # fmt: skip
    options.checked()
    if copy_to is not None:
        open_store(copy_to)
    return options


def detach(engine: Any) -> Any:
    """Gives an engine back its own ``save_checkpoint`` and ``load_checkpoint``.

    Args:
        engine: an engine. Nothing happens if it is not attached.

    Returns:
        The engine.
    """
    for method in _METHODS:
        vars(engine).pop(method, None)
    forget_saves(engine)
    return engine


def attach_all(*, on_attach: Callable[[Any], None] | None = None, **options: Unpack[_Options]) -> None:
    """Attaches all engines of ``deepspeed.initialize`` and all FSDP2 models of frameworks, from now on.

    This is for frameworks that create the engine themselves, such as Trainer, Accelerate and Lightning. Call it before
    they do, or start the script with ``zckpt run``. From then on:

    - The functions of ``deepspeed.utils.zero_to_fp32`` also read the checkpoints of zckpt.
    - Trainer resumes only from complete checkpoints.
    - Trainer, Accelerate and Lightning remove an older checkpoint only when a newer one is complete.
    - FSDP2 models that Accelerate and Trainer save with ``SHARDED_STATE_DICT``, and those of Lightning's
      ModelParallelStrategy, are saved and loaded by zckpt.

    The framework itself goes on to save and load what zckpt does not support, and a warning says so.

    This imports DeepSpeed, if it is installed. Calling it a second time changes nothing.

    Args:
        on_attach: a function that is called with each engine after it was attached.
        options: the options of ``attach``.

    Raises:
        ValueError: an option has a value that is not allowed.
    """
    fsdp_models.enable(
        _write_options(**options), options.get("full_every") or 1, options.get("settings", "checkpoint"), on_attach
    )
    frameworks.replace_functions()
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        return
    original: Callable[..., Any] = deepspeed.initialize
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        engine, *others = original(*args, **kwargs)
        try:
            attach(engine, **options)
        except UnsupportedError as error:
            if _is_first(engine):
                warn(f"DeepSpeed itself saves and loads this engine: {error}")
        else:
            if on_attach is not None:
                on_attach(engine)
        return (engine, *others)

    setattr(initialize, _MARK, True)
    deepspeed.initialize = initialize
    zero_to_fp32.teach_deepspeed()


def _save_checkpoint(
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
    path = str(Location.of(save_dir).child(tag_of_first))
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


def _load_checkpoint(
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
            parts = [part for part in checkpoint.parts if part in WEIGHT_PARTS]
            state = engine_state(checkpoint)
            if state is not None and "scheduler" not in state:  # The writer had no optimizer, so it had no scheduler.
                left_out.add("scheduler")
        return parts, [tree for tree in adapter.trees if tree not in left_out]

    parts, trees = ranks.together(choose_parts, "open the checkpoint")
    request = Request(
        parts=parts, state=trees, strict=load_module_strict, own_client_state=True, caller=_LOAD, all_moments=True,
        leave_out=True, settings=saves.settings,
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


_HERE = ""
"""Stands for the tag of a checkpoint in the directory of the run itself."""


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
