"""Makes DeepSpeed's own save_checkpoint and load_checkpoint use zckpt."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch.distributed as dist

from zckpt.checkpoint.restoring.plan import check_settings
from zckpt.checkpoint.writing.collect import what_is_left_out
from zckpt.checkpoint.writing.decide import LEFT_OUT, tell
from zckpt.checkpoint.writing.options import (
    Background,
    CopyTo,
    EarlierOptions,
    WriteOptions,
    check_counts,
    only_earlier,
)
from zckpt.checkpoint.writing.saves import Saves, forget_saves, saves_of
from zckpt.engines import adapt, group_of
from zckpt.engines.hooks import after_calls
from zckpt.engines.registered import with_registered
from zckpt.errors import UnsupportedError, check_flags, refuse_unknown, warn
from zckpt.frameworks import fsdp_models, patches, zero_to_fp32
from zckpt.frameworks.deepspeed_calls import load_checkpoint, save_checkpoint
from zckpt.storage.schemes import open_store
from zckpt.transfer.budget import flag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zckpt.storage.location import StrPath

_METHODS = ("save_checkpoint", "load_checkpoint")
_MARK = "_zckpt_attaches"


class _Options(EarlierOptions, total=False):
    background: bool | Background | None
    replace_deepspeed: bool
    keep_last: int | None
    keep_every: int | None
    full_every: int | None
    reuse: Literal["latest"] | None
    copy_to: StrPath | CopyTo | None
    settings: Literal["checkpoint", "engine"]
    ranks_per_file: int


def attach(
    engine: Any,
    *,
    background: bool | Background | None = None,
    replace_deepspeed: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
    full_every: int | None = None,
    reuse: Literal["latest"] | None = "latest",
    copy_to: StrPath | CopyTo | None = None,
    settings: Literal["checkpoint", "engine"] = "checkpoint",
    ranks_per_file: int = 1,
    **earlier: Unpack[EarlierOptions],
) -> Any:
    """Makes ``save_checkpoint`` and ``load_checkpoint`` of a DeepSpeed engine use zckpt.

    Arguments, return values, tags, ``latest`` and ``<dir>/<tag>/`` mean what they mean in DeepSpeed, with these
    differences:

    - ``load_checkpoint`` also works in an engine that has trained or saved, and with another world size, ZeRO stage and
      offload than those of the checkpoint.
    - The path that ``load_checkpoint`` returns is the directory of the checkpoint.
    - A failure on one rank raises an error on every rank.
    - A tag that ``latest`` cannot name, such as ``../best``, is saved without a change to ``latest``, with a warning.
    - A tag that names ``<dir>`` itself or a directory around it, such as ``..``, or that has a name of a checkpoint's
      own files, such as ``manifest.msgpack``, raises ValueError.
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
            files are not copied. A ``zckpt.CopyTo`` also says which copies are kept.
        settings: whether ``load_checkpoint`` restores the settings of the checkpoint, or the engine keeps its own, such
            as a new learning rate, as for ``zckpt.restore``. With ``load_lr_scheduler_states=False`` the scheduler
            stays where it is.
        ranks_per_file: as for ``zckpt.write``.
        earlier: as for ``zckpt.write``.

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
        background, replace_deepspeed, keep_last, keep_every, full_every, reuse, copy_to, settings, ranks_per_file,
        **earlier,
    )  # fmt: skip
    if saves_of(engine) is None:
        adapter = adapt(engine)
        adapter.refuse_unsupported(drop_gradients=True, leave_out=True)
        original: Callable[..., Any] = engine.load_checkpoint
        saves = Saves(engine, full_every or 1, settings, options.copies)
        engine.save_checkpoint = functools.partial(save_checkpoint, engine, options, saves)
        engine.load_checkpoint = functools.partial(load_checkpoint, engine, original, saves)
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
    background: bool | Background | None = None,
    replace_deepspeed: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
    full_every: int | None = None,
    reuse: str | None = "latest",
    copy_to: StrPath | CopyTo | None = None,
    settings: str = "checkpoint",
    ranks_per_file: int = 1,
    **earlier: Unpack[EarlierOptions],
) -> WriteOptions:
    """Returns the options of the writes of an attached engine. Raises ValueError and TypeError."""
    check_counts(full_every=full_every)
    check_flags(replace_deepspeed=replace_deepspeed)
    check_settings(settings)
    if reuse not in ("latest", None):
        raise ValueError(f"reuse must be 'latest' or None, got {reuse!r}")
    options = WriteOptions(
        overwrite=True, pending_gradients="drop", each_client_state=True, leave_out=True,
        replace_foreign=replace_deepspeed, keep_last=keep_last, keep_every=keep_every, reuse=reuse,
        copy_to=copy_to, ranks_per_file=ranks_per_file, earlier=only_earlier(attach, earlier),
        background=flag("ZCKPT_BACKGROUND", False) if background is None else background,
    )  # fmt: skip
    options.checked()
    if options.copies is not None:
        open_store(options.copies.path)
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
        TypeError: there is no such option.
    """
    refuse_unknown("zckpt.attach_all", options, ("on_attach", *_Options.__annotations__))
    of_writes, full_every = _write_options(**options), options.get("full_every") or 1
    fsdp_models.enable(fsdp_models.Options(of_writes, full_every, options.get("settings", "checkpoint"), on_attach))
    patches.replace_functions()
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
