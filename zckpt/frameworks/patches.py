"""Adapts Trainer, Accelerate and Lightning to checkpoints of zckpt: from which checkpoints they resume, with which
settings, and when they remove older ones."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.adapters.scheduler import SavedScheduler
from zckpt.checkpoint import background
from zckpt.checkpoint.listing.find import find, manifest_of
from zckpt.checkpoint.tiers.queue import needed_sources
from zckpt.checkpoint.writing.saves import saves_of
from zckpt.engines import group_of
from zckpt.errors import ZckptError, warn
from zckpt.format import names
from zckpt.frameworks import accelerate_fsdp, lightning_fsdp
from zckpt.frameworks.fsdp_models import engine_of_model
from zckpt.frameworks.last_step import LastStep
from zckpt.frameworks.preemption import workers_ignore
from zckpt.frameworks.trainer_files import (
    RESUMABLE,
    SCHEDULER,
    TRAINER_STATE,
    DirectoryKind,
    is_last_to_resume,
    is_zckpts,
    kind_of,
    kind_of_models,
    last_checkpoint,
    last_of_kinds,
    rng_file,
    superseded,
)
from zckpt.ranks.collectives import Ranks
from zckpt.storage.files import sync_file
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MARK = "_zckpt_replaces"
_LAST_STEP = "_zckpt_last_step"
"""The attribute of Trainer's callback for signals that holds the ``LastStep``, by which the ranks agree on a step."""
_WORKERS_DIE = "_zckpt_workers_die"
"""The attribute of Trainer's callback for signals that holds the function which undoes ``workers_ignore``."""
_SENTINEL = "checkpoint-is-incomplete.txt"
_postponed: list[Callable[[], None]] | None = None
"""The removals of older checkpoints that Trainer has asked for while it saves a checkpoint. They wait until all ranks
have written everything. None if Trainer is not saving."""

_held_back: dict[str, tuple[str, Callable[[], None]]] = {}
"""The removals of checkpoints that Lightning has asked for, by the path of the checkpoint, with its save id."""


def replace_functions() -> None:
    """Makes Trainer resume only from complete checkpoints, and makes Trainer, Accelerate and Lightning remove an older
    checkpoint only when a newer one is complete. Imports none of them: the functions of a module that is not imported
    yet are replaced when it is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in _REPLACEMENTS:
        if name in sys.modules:
            _replace_in(sys.modules[name])


class _Finder:
    """An import hook that finds the modules of ``_REPLACEMENTS`` as Python does, and replaces their functions once they
    are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _REPLACEMENTS else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _replace_in(module)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


def _replace_in(module: ModuleType) -> None:
    where, replacements = _REPLACEMENTS[module.__name__]
    owner = getattr(module, where, None) if where else module
    missing = [name for name in replacements if not hasattr(owner, name)]
    if missing:
        package = module.__name__.partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "of an unknown version")
        warn(
            f"zckpt does not know {package} {version}: "
            f"{module.__name__} has no {' and no '.join(missing)}. Resume from a checkpoint that you have found to be "
            "whole, and remove no older one while a write in the background is under way"
        )
    for name, replacement in replacements.items():
        original = getattr(owner, name, None)
        if original is None or hasattr(original, _MARK):
            continue
        wrapper = _wrapped(original, replacement)
        setattr(owner, name, wrapper)
        for other in list(sys.modules.values()):  # Other modules may have imported the function by its name.
            if getattr(other, "__dict__", {}).get(name) is original:
                setattr(other, name, wrapper)


def _wrapped(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(call, _MARK, True)
    return call


# These replace functions of transformers.trainer_utils. Rank 0 may call each of them alone, so they must not wait for
# other ranks.


def _get_last_checkpoint(original: Callable[..., str | None], folder: str) -> str | None:
    background.wait_until_all_ended()
    return None if original(folder) is None else last_checkpoint(folder)


def _rotate_checkpoints(
    original: Callable[..., None],
    output_dir: str,
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = "checkpoint",
) -> None:
    arguments = (output_dir, save_total_limit, best_model_checkpoint, use_mtime, checkpoint_prefix)
    if save_total_limit is None or save_total_limit <= 0:
        return
    from transformers.trainer_utils import sort_checkpoints

    # The folders are listed now, because the next checkpoint may have begun when they are removed.
    folders: list[str] = sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)
    if not any(map(is_zckpts, folders)):
        original(*arguments)
        return
    best = None if best_model_checkpoint is None else str(Path(best_model_checkpoint))  # in the notation of ``folders``
    rotate = functools.partial(_remove_superseded, folders, save_total_limit, best)
    if _postponed is None:
        _remove_once_committed(rotate)
    else:
        _postponed.append(rotate)


def _remove_superseded(
    folders: Sequence[str], limit: int, best: str | None, kind: Callable[[str], DirectoryKind] = kind_of
) -> None:
    for folder in superseded([folder for folder in folders if os.path.isdir(folder)], limit, best, kind):
        if _is_being_copied(folder):  # A later call removes it.
            continue
        if os.path.islink(folder):  # The target of a symbolic link may belong to somebody else.
            os.unlink(folder)
            continue
        # A killed removal leaves a folder without these files, which counts as incomplete.
        for decisive in (Path(folder, TRAINER_STATE), *Path(folder).glob(f"*/{names.MANIFEST}")):
            decisive.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # Accelerate may take several ranks for the main process.
            shutil.rmtree(folder)


def _remove_once_committed(remove: Callable[[], None], ranks: Ranks | None = None) -> None:
    """Calls ``remove`` on this rank once the checkpoint that these ranks write is committed. Without ``ranks``, it
    waits for all checkpoints that this process writes."""

    def attempt() -> None:
        try:
            remove()
        except Exception as error:  # The save itself has succeeded, so this must not raise.
            warn(f"older checkpoints could not be removed: {error}")

    background.after_commit(attempt, ranks)


def _sort_checkpoints(
    original: Callable[..., list[str]],
    output_dir: str,
    checkpoint_prefix: str = "checkpoint",
    use_mtime: bool = False,
    best_model_checkpoint: str | None = None,
) -> list[str]:
    """Returns what Trainer's function returns, with one exception. At the end of the training, with
    ``save_total_limit=1``, Trainer removes all of these checkpoints but the best one. If training cannot resume from
    the best one, the newest checkpoint from which it can resume is left out here, so that Trainer keeps it."""
    if best_model_checkpoint is not None:
        background.wait_until_all_ended()
    folders = original(output_dir, checkpoint_prefix, use_mtime, best_model_checkpoint)
    if best_model_checkpoint is None or kind_of(best_model_checkpoint) in RESUMABLE:
        return folders
    return [folder for folder in folders if folder != last_of_kinds(folders, RESUMABLE)]


# These replace methods of Trainer and of its callback for signals. All ranks call each of them.


def _save_checkpoint(original: Callable[..., None], trainer: Any, model: Any, trial: Any, **others: Any) -> None:
    global _postponed  # noqa: PLW0603  Trainer cannot pass an argument through to ``_rotate_checkpoints``
    engine = engine_of_model(trainer.model_wrapped)
    saves = saves_of(engine)
    if saves is None:
        original(trainer, model, trial, **others)
        return
    if trainer.control.should_training_stop:  # This is the last checkpoint of the training.
        saves.have_next_full()
    removals: list[Callable[[], None]] = []
    _postponed = removals
    try:
        original(trainer, model, trial, **others)
    finally:
        _postponed = None
    folder = os.path.join(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")
    ranks = Ranks(group_of(engine), call="Trainer")
    files = [rng_file(trainer.args.process_index, trainer.args.world_size)]
    files += [SCHEDULER, TRAINER_STATE] if trainer.args.should_save else []

    def sync() -> None:
        written = [path for path in (os.path.join(folder, name) for name in files) if os.path.exists(path)]
        for path in written:
            sync_file(path)
        if written:  # With save_only_model, this rank may get here before another rank has made the folder.
            open_store(folder).sync_names("")
        # Trainer's callback for signals would remove this file on all ranks at once, which can fail on some of them.
        if trainer.args.should_save:
            Path(folder, _SENTINEL).unlink(missing_ok=True)

    ranks.together(sync, "save Trainer's own files")
    for rotate in removals:
        _remove_once_committed(rotate, ranks)


def _load_best_model(original: Callable[..., None], trainer: Any) -> None:
    """Loads the best checkpoint. If it has no optimizer state, loads only its weights."""
    engine, best = trainer.model_wrapped, trainer.state.best_model_checkpoint
    if saves_of(engine) is None:
        original(trainer)
        return
    ranks = Ranks(group_of(engine), call="Trainer")
    background.wait_for(ranks)
    load = engine.load_checkpoint
    if ranks.first(lambda: kind_of(best) is DirectoryKind.WEIGHTS, "look at the best checkpoint"):
        engine.load_checkpoint = lambda *args, **options: load(*args, **{**options, "load_module_only": True})
    try:
        original(trainer)
    finally:
        engine.load_checkpoint = load


def _load_scheduler(original: Callable[..., None], trainer: Any, checkpoint: Any) -> None:
    with _own_schedules(engine_of_model(trainer.model_wrapped), [] if checkpoint is None else [trainer.lr_scheduler]):
        original(trainer, checkpoint)


@contextmanager
def _own_schedules(engine: Any, schedulers: Sequence[Any]) -> Iterator[None]:
    """In this context, a framework loads the state of schedulers that the engine does not have. If the engine keeps its
    own settings, so do they: each goes to the step that was loaded in its own schedule."""
    saves = saves_of(engine)
    if saves is None or saves.settings != "engine":
        yield
        return
    unwrapped = [getattr(scheduler, "scheduler", scheduler) for scheduler in schedulers]  # from those of Accelerate
    own = [scheduler for scheduler in unwrapped if scheduler is not getattr(engine, "lr_scheduler", None)]
    states = [scheduler.state_dict() for scheduler in own]
    yield
    for scheduler, state in zip(own, states, strict=True):
        loaded = scheduler.state_dict()
        scheduler.load_state_dict(state)
        saved = SavedScheduler({"class": type(scheduler).__name__, "state": loaded}, scheduler, (), None)
        problems = saved.problems(strict=False, keeps_settings=True)
        if problems:
            scheduler.load_state_dict(loaded)
            warn(f"{problems[0]}; it has the settings of the checkpoint")
        else:
            saved.take_steps(keeps_settings=True)


# These replace methods of JITCheckpointCallback, with which Trainer saves after SIGTERM. In transformers, each rank
# saves when it has received the signal itself, even if DeepSpeed has ended a step that Trainer has not counted yet. The
# functions below make all ranks save at the end of the same step.


def _set_trainer(original: Callable[..., None], callback: Any, trainer: Any) -> None:
    original(callback, trainer)
    if callback.jit_manager is not None:
        setattr(callback, _WORKERS_DIE, workers_ignore([signal.SIGTERM]))


def _begin_step(original: Callable[..., None], callback: Any, *args: Any, **options: Any) -> None:
    if not _takes_signals(callback):
        original(callback, *args, **options)
    elif not hasattr(callback, _LAST_STEP):
        ranks = Ranks(group_of(engine_of_model(callback.trainer.model_wrapped)), call="Trainer")
        setattr(callback, _LAST_STEP, LastStep(ranks))


def _end_step(original: Callable[..., None], callback: Any, *args: Any, **options: Any) -> None:
    if _takes_signals(callback):
        last_step: LastStep = getattr(callback, _LAST_STEP)
        if callback.jit_manager.is_checkpoint_requested:
            last_step.ask(signal.SIGTERM)
        callback.jit_manager.is_checkpoint_requested = last_step.ended()
    original(callback, *args, **options)


def _not_now(original: Callable[..., None], callback: Any, *args: Any, **options: Any) -> None:
    """Does nothing, because only ``_end_step`` saves after a signal."""
    if not _takes_signals(callback):
        original(callback, *args, **options)


def _end_training(original: Callable[..., None], callback: Any, *args: Any, **options: Any) -> None:
    if hasattr(callback, _LAST_STEP):
        getattr(callback, _LAST_STEP).close()
        delattr(callback, _LAST_STEP)
    if hasattr(callback, _WORKERS_DIE):
        getattr(callback, _WORKERS_DIE)()
        delattr(callback, _WORKERS_DIE)
    original(callback, *args, **options)


def _takes_signals(callback: Any) -> bool:
    """Returns whether the callback saves after signals, and the engine is attached to zckpt."""
    return callback.jit_manager is not None and saves_of(engine_of_model(callback.trainer.model_wrapped)) is not None


# These replace methods of other frameworks.


def _save_state(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
    """Removes older checkpoints after the save, once it is committed. Accelerate removes them before it saves, and also
    if training cannot go on from those that stay."""
    background.wait()
    configuration = accelerator.project_configuration
    limit = configuration.total_limit
    engines = map(engine_of_model, accelerator._models)
    if limit is None or not configuration.automatic_checkpoint_naming or not any(map(saves_of, engines)):
        return original(accelerator, *args, **options)
    configuration.total_limit = None
    try:
        result = original(accelerator, *args, **options)
    finally:
        configuration.total_limit = limit
    if accelerator.is_main_process:
        directory = os.path.join(accelerator.project_dir, "checkpoints")
        numbers = (name.removeprefix("checkpoint_") for name in os.listdir(directory))
        ordered = sorted(int(number) for number in numbers if number.isdecimal())
        folders = [os.path.join(directory, f"checkpoint_{number}") for number in ordered]
        _remove_once_committed(functools.partial(_remove_superseded, folders, limit, None, kind_of_models))
    return result


def _load_state(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
    with _own_schedules(engine_of_model(next(iter(accelerator._models), None)), accelerator._schedulers):
        return original(accelerator, *args, **options)


def _remove_checkpoint(original: Callable[..., None], strategy: Any, filepath: Any) -> None:
    """Postpones the removal until the write in the background is committed, and as long as training can be resumed from
    no newer checkpoint. Lightning removes older checkpoints after it has saved a new one."""
    if saves_of(engine_of_model(getattr(strategy, "model", None))) is None:
        original(strategy, filepath)
    else:
        path = os.fspath(filepath)
        _held_back[path] = _save_id(path), functools.partial(original, strategy, filepath)
        _remove_once_committed(_remove_held_back)


def _remove_held_back() -> None:
    for path, (save_id, remove) in [*_held_back.items()]:
        is_another = _save_id(path) != save_id  # Another checkpoint has been saved there meanwhile.
        if is_another or not (is_last_to_resume(path) or _is_being_copied(path)):
            del _held_back[path]
            if not is_another:
                remove()


def _is_being_copied(folder: str) -> bool:
    """Returns whether an upload of this process needs a checkpoint in this folder."""
    sources = [source.resolved() for source in needed_sources().values()]
    return Location.of(folder).resolved() in (*sources, *(source.parent for source in sources))


def _save_id(path: str) -> str:
    """Returns the save id of the checkpoint at a path, or an empty text if there is none that can be read."""
    with suppress(ZckptError):
        return manifest_of(find(path)).save_id
    return ""


_OF_LIGHTNING: dict[str, tuple[str, dict[str, Callable[..., Any]]]] = {
    "strategies.strategy": ("Strategy", {"remove_checkpoint": _remove_checkpoint}),
    "strategies.fsdp": ("FSDPStrategy", {"setup": lightning_fsdp.warn_of_fsdp1}),
    "trainer.connectors.checkpoint_connector": (
        "_CheckpointConnector",
        {"dump_checkpoint": lightning_fsdp.dump_checkpoint},
    ),
    "strategies.model_parallel": (
        "ModelParallelStrategy",
        {
            "setup": lightning_fsdp.setup,
            "lightning_module_state_dict": lightning_fsdp.lightning_module_state_dict,
            "optimizer_state": lightning_fsdp.optimizer_state,
            "save_checkpoint": lightning_fsdp.save_checkpoint,
            "load_checkpoint": lightning_fsdp.load_checkpoint,
        },
    ),
}
"""The replacements in the package of Lightning, which exists under two names."""

_REPLACEMENTS: dict[str, tuple[str, dict[str, Callable[..., Any]]]] = {
    "transformers.trainer_utils": (
        "",
        {
            "get_last_checkpoint": _get_last_checkpoint,
            "rotate_checkpoints": _rotate_checkpoints,
            "sort_checkpoints": _sort_checkpoints,
        },
    ),
    "transformers.trainer": (
        "Trainer",
        {
            "_save_checkpoint": _save_checkpoint,
            "_load_best_model": _load_best_model,
            "_load_optimizer_and_scheduler": _load_scheduler,
        },
    ),
    "transformers.trainer_jit_checkpoint": (
        "JITCheckpointCallback",
        {
            "set_trainer": _set_trainer,
            "on_step_begin": _begin_step,
            "on_pre_optimizer_step": _not_now,
            "on_step_end": _end_step,
            "on_epoch_end": _not_now,
            "on_train_end": _end_training,
        },
    ),
    "accelerate.accelerator": (
        "Accelerator",
        {"save_state": _save_state, "load_state": _load_state, "prepare": accelerate_fsdp.prepare},
    ),
    "accelerate.utils.fsdp_utils": (
        "",
        {
            "save_fsdp_model": accelerate_fsdp.save_weights,
            "save_fsdp_optimizer": accelerate_fsdp.save_optimizer,
            "load_fsdp_model": accelerate_fsdp.load_weights,
            "load_fsdp_optimizer": accelerate_fsdp.load_optimizer,
        },
    ),
    **{
        f"{package}.{module}": replacements
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, replacements in _OF_LIGHTNING.items()
    },
}
"""Maps the name of a module to the name of a class in it, or "" for functions of the module itself, and to the
replacements by the names of the functions. A replacement gets the original function as its first argument."""
