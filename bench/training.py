"""Real runs of ZeRO-3 and of FSDP2 on the CPU: the functions that ranks run for the comparisons, and one that starts
the ranks.

Functions above ``start_ranks`` run on every rank, which ``tests/support/cluster.py`` has started. A round lasts until
all ranks are done.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import zckpt
from common import (
    GIB,
    MIB,
    PARTS,
    ROOT,
    Contestant,
    Timing,
    bring_into_cache,
    cpu_seconds,
    drop_from_cache,
    files_of,
    interleaved,
    make_durable,
)
from raw_io import Raw, whole_pages
from sampler import Sampler, metered
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.checkpoint.reading.loader import ReadRequest
from zckpt.engines import adapt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy as np

    from tests.support.memory_cgroup import MemoryGroup

BYTES_PER_PARAMETER = 12
"""The bytes of state for each parameter that a bit-exact resume needs: fp32 weights and both moments of Adam."""
TRANSFER = "zckpt, the transfer alone"
"""The label of reads that fill what a restore fills, without what an engine derives from it."""
NO_LIMIT, LIMITED = "no limit", "limited"
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    # The FAST writer uses these settings to write to the disk. The values are those of DeepSpeed's own tuning guide.
    "aio": {"block_size": MIB, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False},
    "checkpoint": {"writer": {"type": "FAST"}},
}


def make_engine(nbytes: int, seed: int = 0, *, trained: bool = True) -> Any:
    """Returns an engine over a stack of Linear layers with about ``nbytes`` of state on all ranks together.

    If ``trained`` is true, the engine has taken one step, so that the moments exist.
    """
    import deepspeed

    # The FAST writer needs the machine's place among all machines, and a buffer that is pinned without a GPU.
    os.environ |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "DS_PIN_MEMORY_BACKEND": "native"}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    torch.manual_seed(seed)
    width = 2048 if nbytes >= GIB // 2 else 256
    layers = max(1, round(nbytes / BYTES_PER_PARAMETER / width**2))
    torch.set_default_dtype(torch.bfloat16)
    module = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    torch.set_default_dtype(torch.float32)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=CONFIG)
    if trained:
        loss = engine(torch.randn(1, width, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()
    return engine


def writers(engine: Any) -> dict[str, Any]:
    """Returns DeepSpeed's default checkpoint engine, and the FAST one that this engine was configured with."""
    from deepspeed.io import fast_file_writer
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    # The FAST writer loads an op that DeepSpeed does not build for the CPU. It is not used in this way of saving.
    fast_file_writer.UtilsBuilder = lambda: SimpleNamespace(load=lambda: SimpleNamespace(cast_to_byte_tensor=None))
    return {"DeepSpeed, default": TorchCheckpointEngine(engine._config), "DeepSpeed, FAST": engine.checkpoint_engine}


def save_with_deepspeed(engine: Any, writer: Any, path: Path) -> None:
    """Calls ``engine.save_checkpoint`` and makes its files durable.

    Each rank fsyncs its own files. Then rank 0 fsyncs the files of all ranks and the directories.
    """
    engine.checkpoint_engine = writer
    engine.save_checkpoint(str(path), tag="tag")
    rank = dist.get_rank()
    for file in files_of(path):
        if f"pp_rank_{rank}_" in file.name:
            make_durable(file)
    dist.barrier()
    if rank == 0:
        make_durable(path)


def load_with_deepspeed(engine: Any, path: Path) -> None:
    engine.checkpoint_engine = writers(engine)["DeepSpeed, default"]
    loaded, _ = engine.load_checkpoint(str(path), tag="tag")
    assert loaded is not None, f"DeepSpeed found no checkpoint in {path}"


def write_rounds(directory: Path, nbytes: int, runs: int) -> dict[str, Any]:
    """Returns the rounds of raw writes, zckpt and DeepSpeed, and the bytes that this rank writes with zckpt."""
    engine = make_engine(nbytes)
    raw = Raw()
    path = directory / "written"
    zckpt.write(engine, path, latest=False)
    own_bytes = written_by_rank(path)
    memories = whole_pages_of(engine)
    dist.barrier()
    remove_on_first(path)
    contestants = [
        Contestant("raw", lambda: raw.write(directory / f"raw-{dist.get_rank()}", memories)),
        Contestant("zckpt", lambda: zckpt.write(engine, path, latest=False)),
    ]
    contestants += [
        Contestant(label, partial(save_with_deepspeed, engine, writer, path))
        for label, writer in writers(engine).items()
    ]
    rounds = together(contestants, runs, after=lambda: remove_on_first(directory))
    return {"rounds": rounds, "bytes": own_bytes}


def restore_rounds(directory: Path, nbytes: int, runs: int) -> dict[str, Any]:
    engine = make_engine(nbytes)
    raw = Raw()
    ours, theirs = directory / "zckpt", directory / "deepspeed"
    also_ours = directory / "transfer"
    for path in (ours, also_ours):
        zckpt.write(engine, path, latest=False)
    save_with_deepspeed(engine, writers(engine)["DeepSpeed, default"], theirs)
    dist.barrier()
    # A file of its own, because the host of a virtual machine may keep a file that another contestant has just read.
    raw_file = directory / f"raw-{dist.get_rank()}"
    raw.write(raw_file, raw.again(written_by_rank(ours)))
    memories = whole_pages_of(engine)  # the memory that zckpt and DeepSpeed read into, too
    # DeepSpeed loads moments into new tensors. Afterwards the engine gets its old tensors back, so that all contestants
    # read into the same memory.
    optimizer = engine.optimizer.optimizer
    put_back = partial(setattr, optimizer, "state", optimizer.state)
    fragments = adapt(engine).inventory(None).fragments

    def transfer() -> None:
        checkpoint = zckpt.open(also_ours)
        requests = [
            ReadRequest(checkpoint[f.key], f.span, f.data) for f in fragments if isinstance(f.data, torch.Tensor)
        ]
        loader_of(checkpoint).read(requests)

    reads = [
        Contestant("zckpt", lambda: zckpt.restore(engine, ours)),
        Contestant("DeepSpeed", lambda: load_with_deepspeed(engine, theirs), after=put_back),
    ]
    others = [Contestant("raw", lambda: raw.read_into(raw_file, memories)), Contestant(TRANSFER, transfer)]
    cold = together(others + reads, runs, before=lambda: on_first(drop_from_cache, directory))
    cached: dict[str, list[Timing]] = {}
    # One by one, because the page cache has no room for both.
    for contestant, path in zip(reads, (ours, theirs), strict=True):
        on_first(drop_from_cache, directory)
        cached |= together([contestant], runs, before=partial(on_first, bring_into_cache, path))
    return {"cold": cold, "cached": cached, "bytes": written_by_rank(ours)}


def whole_pages_of(engine: Any) -> list[np.ndarray]:
    """Returns the memory of the engine's masters and moments, without parts of pages at both ends."""
    fragments = adapt(engine).inventory(None).fragments
    return whole_pages(f.data for f in fragments if f.part in PARTS and isinstance(f.data, torch.Tensor))


def other_world_rounds(directories: dict[str, Path], nbytes: int, runs: int) -> dict[str, Any]:
    """Returns the rounds of restores of checkpoints of several world sizes into the same engine."""
    engine = make_engine(nbytes)
    contestants = [
        Contestant(label, partial(zckpt.restore, engine, path), partial(on_first, drop_from_cache, path))
        for label, path in directories.items()
    ]
    cold = together(contestants, runs)
    contestants = [
        replace(contestant, before=partial(on_first, bring_into_cache, directories[contestant.label]))
        for contestant in contestants
    ]
    return {"cold": cold, "cached": together(contestants, runs)}


def background_rounds(directory: Path, nbytes: int, runs: int) -> dict[str, Any]:
    """Returns the rounds of background writes, without what goes on in the background, and of copies in memory."""
    engine = make_engine(nbytes)
    path = directory / "written"
    state = [f.data for f in adapt(engine).inventory(None).fragments if isinstance(f.data, torch.Tensor)]
    touched = [tensor.clone() for tensor in state]

    def copy() -> None:
        for target, source in zip(touched, state, strict=True):
            target.copy_(source)

    contestants = [
        Contestant("copy into touched memory", copy),
        Contestant("copy into fresh memory", lambda: [tensor.clone() for tensor in state]),
        Contestant("zckpt, background", lambda: zckpt.write(engine, path, background=True), finish=zckpt.wait),
        Contestant(
            "zckpt, background, lazy",
            lambda: zckpt.write(engine, path, background=True, snapshot="lazy"),
            finish=zckpt.wait,
        ),
        Contestant("zckpt, not in the background", lambda: zckpt.write(engine, path)),
    ]
    rounds = together(contestants, runs, after=lambda: remove_on_first(directory))
    return {"rounds": rounds, "bytes": sum(tensor.nbytes for tensor in state)}


def write_once(nbytes: int, ours: Path, theirs: Path | None = None) -> int:
    """Writes a checkpoint of a trained engine to ``ours``, and one of DeepSpeed to ``theirs``.

    Returns the bytes of this rank's files in ``ours``.
    """
    engine = make_engine(nbytes)
    zckpt.write(engine, ours, latest=False)
    if theirs is not None:
        save_with_deepspeed(engine, writers(engine)["DeepSpeed, default"], theirs)
    dist.barrier()
    return written_by_rank(ours)


def make_llama(nbytes: int) -> Any:
    """Returns an engine over a Llama model of transformers with about ``nbytes`` of state."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = 2048 if nbytes >= GIB // 2 else 256
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_attention_heads=16, vocab_size=1024, dtype="bfloat16",
        num_hidden_layers=max(1, round(nbytes / BYTES_PER_PARAMETER / (16 * width**2))),
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    config_of_engine = {name: value for name, value in CONFIG.items() if name != "checkpoint"}
    config_of_engine["zero_optimization"] = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config_of_engine)
    return engine


def write_llama(directory: Path, nbytes: int) -> None:
    """Writes a checkpoint of a Llama with about ``nbytes`` of state, one of DeepSpeed, and the model's config."""
    engine = make_llama(nbytes)
    zckpt.write(engine, directory / "zckpt", latest=False)
    engine.save_checkpoint(str(directory / "deepspeed"), tag="tag")
    if dist.get_rank() == 0:
        engine.module.config.save_pretrained(directory / "config")
    dist.barrier()


LIVE_EXPORTS = ("zckpt.export", "save_16bit_model", "GatheredParameters + save_pretrained")


def live_exports(engine: Any, out: Path) -> dict[str, Callable[[], object]]:
    """Returns the actions that ``LIVE_EXPORTS`` names: an export by zckpt, and two that gather the weights."""

    def durable(save: Callable[[], object]) -> None:
        save()
        on_first(make_durable, out)

    def save_pretrained() -> None:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            if dist.get_rank() == 0:
                engine.module.save_pretrained(out, max_shard_size="5GB")

    actions = (
        lambda: zckpt.export(engine, out),
        lambda: durable(lambda: engine.save_16bit_model(str(out))),
        lambda: durable(save_pretrained),
    )
    return dict(zip(LIVE_EXPORTS, actions, strict=True))


def live_export_rounds(directory: Path, nbytes: int, runs: int) -> dict[str, Any]:
    engine = make_llama(nbytes)
    contestants = [Contestant(label, action) for label, action in live_exports(engine, directory / "out").items()]
    rounds = together(contestants, runs, after=lambda: remove_on_first(directory))
    weights = sum(p.ds_numel * p.element_size() for p in engine.module.parameters())
    return {"rounds": rounds, "bytes": weights}


def live_export_peak(directory: Path, nbytes: int, label: str) -> float:
    """Returns the MiB by which the memory of this rank grows at most during the first export of the process."""
    action = live_exports(make_llama(nbytes), directory / "out")[label]
    dist.barrier()
    figures: dict[str, dict[str, float]] = {}
    with metered(figures, label):
        action()
    remove_on_first(directory)
    return figures[label]["peak_mib"]


def watched_save(directory: Path, nbytes: int, kind: str) -> dict[str, Any]:
    """Saves once and returns the record of ``watched``."""
    engine = make_engine(nbytes)
    save_with_deepspeed(engine, writers(engine)["DeepSpeed, default"], directory / "warm-up")
    on_first(drop_from_cache, directory)
    remove_on_first(directory)
    with watched() as record:
        if kind == "zckpt":
            zckpt.write(engine, directory / kind, latest=False)
        else:
            save_with_deepspeed(engine, writers(engine)["DeepSpeed, default"], directory / kind)
    return record


def watched_resume(directory: Path, nbytes: int, kind: str) -> dict[str, Any]:
    """Resumes once, into an engine that has not trained yet, and returns the record of ``watched``."""
    engine = make_engine(nbytes, seed=1, trained=False)
    on_first(drop_from_cache, directory)
    with watched() as record:
        if kind == "zckpt":
            zckpt.restore(engine, directory / kind)
        else:
            load_with_deepspeed(engine, directory / kind)
    return record


def memory_of_engine(directory: Path, nbytes: int) -> dict[str, dict[str, float]]:
    """Returns the extra memory of a write, and of a restore into memory that the engine has already."""
    engine = make_engine(nbytes)
    figures: dict[str, dict[str, float]] = {}
    with metered(figures, "write of an engine"):
        zckpt.write(engine, directory / "checkpoint", latest=False)
    drop_from_cache(directory)
    with metered(figures, "restore of an engine"):
        zckpt.restore(engine, directory / "checkpoint")
    return figures


def limited_rounds(group: MemoryGroup, directory: Path, nbytes: int, headroom_bytes: int, runs: int) -> dict[str, Any]:
    """Returns the rounds without and with a limit on memory, and the peak of the memory taken in each one with it."""
    group.enter()
    engine = make_engine(nbytes)
    ours, theirs = directory / "zckpt", directory / "deepspeed"
    writer = writers(engine)["DeepSpeed, default"]
    save_with_deepspeed(engine, writer, theirs)
    zckpt.write(engine, ours, latest=False)
    fragments = adapt(engine).inventory(None).fragments
    out = {f.key: f.data.view(f.shape) for f in fragments if isinstance(f.data, torch.Tensor)}

    def write_in_background() -> None:
        zckpt.write(engine, ours, latest=False, overwrite=True, background=True)
        zckpt.wait()

    doings: dict[str, Callable[[], object]] = {
        "zckpt, write": lambda: zckpt.write(engine, ours, latest=False, overwrite=True),
        "zckpt, write in the background": write_in_background,
        "zckpt, restore": lambda: zckpt.restore(engine, ours),
        "zckpt, load": lambda: zckpt.open(ours).load(list(out), out=out),
        "DeepSpeed, save": lambda: save_with_deepspeed(engine, writer, theirs),
    }
    peaks: dict[str, list[int]] = {doing: [] for doing in doings}

    def close() -> None:
        drop_from_cache(directory)
        group.close(headroom_bytes)
        result["used"] = group.used_bytes()

    def note_peak(doing: str) -> None:
        peaks[doing].append(group.peak_bytes() - result["used"])
        group.open()

    result: dict[str, Any] = {"rounds": {}, "peak_bytes": peaks, "bytes": sum(tensor.nbytes for tensor in out.values())}
    for doing, action in doings.items():
        contestants = [
            Contestant(NO_LIMIT, action, before=partial(drop_from_cache, directory)),
            Contestant(LIMITED, action, before=close, after=partial(note_peak, doing)),
        ]
        result["rounds"][doing] = interleaved(contestants, runs)
    return result


def limited_load(group: MemoryGroup, directory: Path, nbytes: int, headroom_bytes: int) -> None:
    """Loads the checkpoint of DeepSpeed that ``limited_rounds`` has saved, by DeepSpeed, with the limit on memory."""
    group.enter()
    engine = make_engine(nbytes)
    group.close(headroom_bytes)
    load_with_deepspeed(engine, directory / "deepspeed")


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Yields a record that gets the timing of the ``with`` block.

    On rank 0 the record also gets samples of the memory of all ranks and of the page cache, from two seconds before the
    block to two seconds after it.
    """
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    record: dict[str, Any] = {}
    margin = 2.0
    sampler = Sampler(pids) if dist.get_rank() == 0 else None
    time.sleep(margin)
    dist.barrier()
    start, used = time.monotonic(), cpu_seconds()
    yield record
    dist.barrier()
    record["timing"] = Timing(time.monotonic() - start, over_ranks(cpu_seconds() - used))
    time.sleep(margin)
    if sampler:
        record["samples"] = [(at - start, rss, cached) for at, rss, cached in sampler.stop()]


def together(
    contestants: Sequence[Contestant],
    runs: int,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> dict[str, list[Timing]]:
    """Calls ``interleaved`` on all ranks, with ``before`` before every contestant and ``after`` after each."""

    def in_turn(first: Callable[[], object], second: Callable[[], object]) -> None:
        first()
        second()

    wrapped = [
        replace(
            contestant,
            before=partial(in_turn, before, contestant.before),
            after=partial(in_turn, contestant.after, after),
        )
        for contestant in contestants
    ]
    return interleaved(wrapped, runs, dist.barrier, over_ranks)


def over_ranks(value: float) -> float:
    """Returns the sum of the values of all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def written_by_rank(path: Path) -> int:
    """Returns the bytes of this rank's files in a checkpoint of zckpt."""
    return sum(file.stat().st_size for file in files_of(path) if f"rank-{dist.get_rank():05d}" in str(file))


def on_first(action: Callable[[Path], None], path: Path) -> None:
    """Calls ``action(path)`` on rank 0, while the other ranks wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        action(path)
    dist.barrier()


def remove_on_first(path: Path) -> None:
    """Removes all that is in a directory, but not the directory itself, on rank 0."""
    import shutil

    def empty(directory: Path) -> None:
        for entry in directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    on_first(empty, path)


# The function below runs in the process of the program.


def start_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 1800) -> list[Any]:
    """Calls a function of a file of this folder on every rank and returns the values of all ranks."""
    sys.path.insert(0, str(ROOT))
    paths = [str(ROOT / "bench"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    from tests.support.cluster import Cluster

    cluster = Cluster()
    try:
        return cluster.run(f"{function.__module__}:{function.__name__}", world_size, *args, timeout=timeout)
    finally:
        cluster.close()
