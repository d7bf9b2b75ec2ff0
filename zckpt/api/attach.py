"""DeepSpeed's own save_checkpoint and load_checkpoint, with zckpt behind them."""

from __future__ import annotations

import functools
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zckpt.api import zero_to_fp32
from zckpt.api.background import wait
from zckpt.api.open import open as open_path
from zckpt.api.restore import restore_engine
from zckpt.api.write import write_engine
from zckpt.engines import adapt, group_of
from zckpt.engines.registered import registered
from zckpt.errors import FormatError, MismatchError, TagError, UnsupportedError, warn
from zckpt.format import names
from zckpt.format.limits import LATEST_BYTES_MAX
from zckpt.listing.other_formats import deepspeed_files
from zckpt.ranks.collectives import Ranks
from zckpt.restoring.plan import Caller, Request, engine_state
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.writing.options import WriteOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath

_WEIGHTS = ("master", "param", "buffer")
_LOAD = Caller(
    "engine.load_checkpoint",
    "load_module_strict=False",
    "load_module_only=True restores the weights alone",
    "load_optimizer_states=False also the counters, and the scheduler unless load_lr_scheduler_states=False",
)
_METHODS = ("save_checkpoint", "load_checkpoint")
_MARK = "_zckpt_attaches"


def attach(
    engine: Any,
    *,
    background: bool = False,
    replace_deepspeed: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Any:
    """Has ``save_checkpoint`` and ``load_checkpoint`` of a DeepSpeed engine use zckpt; returns the engine.

    Arguments, return values, tags, ``latest`` and ``<dir>/<tag>/`` mean what they mean in DeepSpeed, but that:
    ``load_checkpoint`` also works in an engine that has trained or saved, at another world size, stage and offload; the
    path it returns is the checkpoint's directory; a failure raises on every rank; a tag that ``latest`` cannot name,
    such as ``../best``, is a ValueError; and ``custom_load_fn`` is refused for a zckpt checkpoint. A folder in
    DeepSpeed's own format is loaded by DeepSpeed. Random number generators are left alone. Objects that are registered
    with the engine (``zckpt.register``) are saved and loaded with it. Rank 0 decides for all ranks
    what ``latest`` says and in whose format a folder is. Where DeepSpeed's configuration has
    ``checkpoint.load_universal``, a zckpt checkpoint that ``latest`` names is loaded as it is; ``latest_universal`` is
    read only where there is none.

    Tags that differ from rank to rank: ``checkpoint.tag_validation`` in DeepSpeed's configuration decides. "Fail"
    raises TagError, which is an AssertionError too; with "Warn" and "Ignore" the checkpoint is saved under rank 0's
    tag, and "Warn" says so. A ``client_state`` that differs from rank to rank: each rank's own is kept, and given back
    where the number of ranks is the same; another number of ranks gets rank 0's, with a warning. A save in the middle
    of gradient accumulation leaves the gradients out, as DeepSpeed does, with a warning. An engine without an optimizer
    saves its weights and buffers.

    ``background``: saves go on while training does; the next save or load and the end of the process wait for them and
    show their errors. ``replace_deepspeed``: a save to a tag that holds a checkpoint in DeepSpeed's own format removes
    that once its own is complete; otherwise it raises CheckpointExistsError and changes nothing. ``keep_last``,
    ``keep_every``: each save removes older checkpoints of ``save_dir``, as for ``zckpt.write``. Attaching twice changes
    nothing; ``detach`` undoes it.

    Raises UnsupportedError for an object that has no such methods, and ValueError for numbers that cannot be.
    """
    if not all(hasattr(engine, method) for method in _METHODS):
        raise UnsupportedError(
            f"{type(engine).__name__} has no {' and '.join(_METHODS)}",
            hint="attach the engine that deepspeed.initialize returns; any other one: zckpt.write and zckpt.restore",
        )
    options = WriteOptions(
        overwrite=True, pending_gradients="drop", background=background, each_client_state=True,
        replace_foreign=replace_deepspeed, keep_last=keep_last, keep_every=keep_every,
    )  # fmt: skip
    options.checked()
    if not isinstance(vars(engine).get("load_checkpoint"), functools.partial):
        stock: Callable[..., Any] = engine.load_checkpoint
        engine.save_checkpoint = functools.partial(_save_checkpoint, engine, options)
        engine.load_checkpoint = functools.partial(_load_checkpoint, engine, stock)
    return engine


def detach(engine: Any) -> Any:
    """Gives an engine its own ``save_checkpoint`` and ``load_checkpoint`` back; returns it."""
    for method in _METHODS:
        vars(engine).pop(method, None)
    return engine


def attach_all(*, replace_deepspeed: bool = False, on_attach: Callable[[Any], None] | None = None) -> None:
    """Has every engine that ``deepspeed.initialize`` returns from now on attached, whoever calls it.

    For frameworks that make the engine themselves, such as Trainer, Accelerate and Lightning: call it before they do,
    or start the script with ``zckpt run``. The functions of ``deepspeed.utils.zero_to_fp32`` read the folders of zckpt
    from then on, beside DeepSpeed's own. ``replace_deepspeed``: as for ``attach``. ``on_attach`` is called with each
    engine that was attached. Imports DeepSpeed. Calling it twice changes nothing.
    """
    import deepspeed

    stock: Callable[..., Any] = deepspeed.initialize
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def initialize(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        engine, *others = stock(*args, **kwargs)
        attach(engine, replace_deepspeed=replace_deepspeed)
        if on_attach is not None:
            on_attach(engine)
        return (engine, *others)

    setattr(initialize, _MARK, True)
    deepspeed.initialize = initialize
    zero_to_fp32.teach_deepspeed()


def _save_checkpoint(
    engine: Any,
    options: WriteOptions,
    save_dir: StrPath,
    tag: object = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    def own_tag() -> str:
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty path, got {save_dir!r}")
        Location.of(save_dir)  # it raises here, where the other ranks learn of it
        adapter.refuse_unsupported(drop_gradients=True)
        return f"global_step{engine.global_steps}" if tag is None else str(tag)

    adapter = adapt(engine)
    ranks = Ranks(group_of(engine), call="engine.save_checkpoint")
    tags = ranks.share(own_tag, "save a checkpoint")
    ranks.together(lambda: _check_tags(engine, tags, ranks), "agree on a tag")
    options = replace(
        options,
        # Without an optimizer, all that there is are parameters which nobody trains
        exclude=("param",) if exclude_frozen_parameters and adapter.trains else (),
        client_state=client_state,
        latest=save_latest,
        run=save_dir,
    )
    write_engine(engine, str(Location.of(save_dir).child(tags[0])), options)
    ranks.together(lambda: _warn_of_gradients(engine) if ranks.rank == 0 else None, "end the save")
    return True


def _check_tags(engine: Any, tags: Sequence[str], ranks: Ranks) -> None:
    """If the ranks' tags differ, raises TagError, warns or does nothing, as the engine's configuration says."""
    other = next((number for number, tag in enumerate(tags) if tag != tags[0]), None)
    if other is None or not engine.checkpoint_tag_validation_enabled():
        return
    first_rank, other_rank = ranks.members[0], ranks.members[other]
    differs = f"the ranks have different tags: {tags[0]!r} on rank {first_rank}, {tags[other]!r} on rank {other_rank}"
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
    from zckpt.engines.deepspeed.refuse import pending_gradients

    for reason in pending_gradients(engine):
        warn(f"the checkpoint does not hold {reason}")


def _load_checkpoint(
    engine: Any,
    stock: Callable[..., Any],
    load_dir: StrPath,
    tag: object = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
) -> tuple[Any, Any]:
    wait()  # A write in the background may be about to change `latest`.
    ranks = Ranks(group_of(engine), call=_LOAD.call)
    universal = engine.load_universal_checkpoint()
    run = ranks.together(lambda: open_store(load_dir), "find the checkpoint")
    chosen, theirs = ranks.first(lambda: _find(run, tag, universal), "find the checkpoint")
    if chosen is None:
        missing = f"there is no {run.location.child('latest_universal' if universal else 'latest')}"
        if universal:
            raise ValueError(f"{missing}, which DeepSpeed needs with checkpoint.load_universal")
        said = f"{missing}: pass a tag to load a checkpoint that it does not name"
        ranks.together(lambda: warn(said) if ranks.rank == 0 else None, "find the checkpoint")
        return None, None
    if theirs:
        ranks.together(lambda: _refuse_registered(engine, chosen), "find the checkpoint")
        options = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        return stock(load_dir, chosen, *options, custom_load_fn)  # type: ignore[no-any-return]
    path = str(run.location.child(chosen))
    weights_only = load_module_only or not load_optimizer_states

    def what() -> tuple[list[str] | None, list[str]]:
        """The parts and the trees of state that are to be restored."""
        if custom_load_fn is not None:
            raise UnsupportedError(
                "custom_load_fn: the weights go straight into the engine's own memory",
                hint="load them with zckpt.open(path).state_dict() and put them where they belong",
            )
        adapter = adapt(engine)
        adapter.refuse_unsupported(drop_gradients=True)
        left_out = set(adapter.trees if load_module_only else ())
        if weights_only:
            left_out.add("optimizer")
        if not load_lr_scheduler_states or engine.lr_scheduler is None:
            left_out.add("scheduler")
        parts = None
        if weights_only:
            checkpoint = open_path(path)
            parts = [part for part in checkpoint.parts if part in _WEIGHTS]
            saved = engine_state(checkpoint)
            if saved is not None and "scheduler" not in saved:  # an engine without an optimizer has none
                left_out.add("scheduler")
        return parts, [tree for tree in adapter.trees if tree not in left_out]

    parts, trees = ranks.together(what, "open the checkpoint")
    request = Request(parts=parts, state=trees, strict=load_module_strict, own_client_state=True, caller=_LOAD)
    restored, _ = restore_engine(engine, path, request)
    return path, dict(restored)


def _refuse_registered(engine: Any, tag: str) -> None:
    objects = registered(engine).objects
    if objects:
        raise MismatchError(
            f"{tag} is in DeepSpeed's own format, which has no state of {', '.join(objects)}, registered with the "
            "engine; nothing was changed",
            hint="to begin anew with such an object, register it after load_checkpoint",
        )


def _find(run: Store, tag: object, universal: bool) -> tuple[str | None, bool]:
    """The tag that is to be loaded, None if no file names one, and whether its folder is in DeepSpeed's own format.

    ``universal``: a checkpoint of DeepSpeed's is to be one that it has converted, which ``latest_universal`` names.
    """
    if tag is not None:
        return str(tag), _is_deepspeeds(run.child(str(tag)))
    for file in ("latest", "latest_universal") if universal else ("latest",):
        try:
            place = run.location.child(file).resolved()  # it may be a link, which a reader follows nowhere
            with closing(open_store(place.parent).reader()) as reader:
                raw = reader.read(place.name, 0, LATEST_BYTES_MAX + 1)
        except (FormatError, ValueError):  # there is no such file, or no file can have such a name
            continue
        named = raw.decode(errors="surrogateescape").strip()
        found = run.child(named)
        if universal and file == "latest" and not found.exists(names.MANIFEST):
            continue
        theirs = _is_deepspeeds(found)
        return (named if theirs else names.decode_latest(raw, str(run.location.child(file)))), theirs
    return None, False


def _is_deepspeeds(store: Store) -> bool:
    return not store.exists(names.MANIFEST) and bool(deepspeed_files(store.entries() or ()))
