"""What ``fsdp_vs_dcp.py`` runs on every rank: saves and loads of an FSDP2 model by zckpt, by PyTorch's distributed
checkpoints (DCP) and by torch_checkpointing."""

from __future__ import annotations

import os
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import zckpt
from common import GIB, Contestant, bring_into_cache, drop_from_cache, make_durable
from raw_io import Raw, prepared_with_free_memory, whole_pages
from sampler import metered
from training import BYTES_PER_PARAMETER, on_first, remove_on_first, together, written_by_rank
from zckpt.engines import adapt

if TYPE_CHECKING:
    from pathlib import Path


def make_fsdp(nbytes: int, seed: int = 0, *, trained: bool = True) -> zckpt.TrainState:
    """Returns an FSDP2 model in fp32 with AdamW, a stack of Linear layers with about ``nbytes`` of state on all ranks
    together. If ``trained`` is true, it has taken one step, so that the moments exist."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    torch.manual_seed(seed)
    width = 2048 if nbytes >= GIB // 2 else 256
    layers = max(1, round(nbytes / BYTES_PER_PARAMETER / width**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = zckpt.TrainState(model, optimizer)
    if trained:
        model(torch.randn(1, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state


def save_with_dcp(state: zckpt.TrainState, path: Path, *, in_background: bool = False) -> Any:
    """Saves as PyTorch's tutorial does. DCP makes its files durable itself. Returns the future of a save in the
    background."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(state.model, state.optimizers)
    saved = {"model": model, "optimizer": optimizer}
    if in_background:
        return dcp.async_save(saved, checkpoint_id=path, process_group=_background_group())
    return dcp.save(saved, checkpoint_id=path)


@cache
def _background_group() -> dist.ProcessGroup:
    """Returns a group for the messages of a save in the background, as torchtitan makes one. Without it, DCP's thread
    and the main thread use the default group at the same time, and two ranks may wait for each other forever."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def load_with_dcp(state: zckpt.TrainState, path: Path) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = get_state_dict(state.model, state.optimizers)
    loaded: dict[str, Any] = {"model": model, "optimizer": optimizer}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(
        state.model, state.optimizers, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )


TORCH_CHECKPOINTING = "torch_checkpointing"


class TorchCheckpointing:
    """The package torch_checkpointing (https://pypi.org/project/torch-checkpointing). It makes no file durable. Without
    CUDA it can load only into the layout that has saved."""

    def __init__(self) -> None:
        from torch_checkpointing import CheckpointManager, SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # Its direct I/O fails on ext4, with EINVAL for the end of a file.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
        self.manager = CheckpointManager(config)

    def save(self, state: zckpt.TrainState, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(state.model, state.optimizers)
        self.manager.save(str(path), {"model": model, "optimizer": optimizer})
        on_first(make_durable, path)

    def load(self, state: zckpt.TrainState, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = get_state_dict(state.model, state.optimizers)
        loaded = self.manager.load(path, into={"model": model, "optimizer": optimizer})
        set_state_dict(
            state.model, state.optimizers, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )


def fsdp_rounds(directory: Path, nbytes: int, runs: int) -> dict[str, Any]:
    """Returns the rounds of writes, of the pauses of writes in the background, and of cold and cached loads of an FSDP2
    model. The libraries are zckpt, DCP and, if it is installed, torch_checkpointing. Raw direct I/O of as many bytes,
    from and to the same memory, shows what the disk allows at the same time, and a copy of the state shows what the
    memory allows."""
    state = make_fsdp(nbytes)
    third = TorchCheckpointing() if find_spec(TORCH_CHECKPOINTING) else None
    ours, theirs, pending = directory / "zckpt", directory / "dcp", list[Any]()
    fragments = adapt(state).inventory(None).fragments
    tensors = [fragment.data for fragment in fragments if isinstance(fragment.data, torch.Tensor)]
    raw, memories = Raw(), whole_pages(tensors)
    copies = [tensor.clone() for tensor in tensors]

    def begin() -> None:
        pending.append(save_with_dcp(state, directory / "async", in_background=True))

    def copy() -> None:
        for target, source in zip(copies, tensors, strict=True):
            target.copy_(source)

    writes = [
        Contestant("raw", lambda: raw.write(directory / f"raw-{dist.get_rank()}", memories)),
        Contestant("zckpt", lambda: zckpt.write(state, directory / "written", latest=False)),
        Contestant("DCP", lambda: save_with_dcp(state, directory / "saved")),
    ]
    if third is not None:
        writes.append(Contestant(TORCH_CHECKPOINTING, partial(third.save, state, directory / "third")))
    rounds = {"write": together(writes, runs, after=lambda: remove_on_first(directory))}
    pauses = [
        Contestant("copy into touched memory", copy),
        Contestant(
            "zckpt", lambda: zckpt.write(state, directory / "later", latest=False, background=True), finish=zckpt.wait
        ),
        Contestant(
            "zckpt, lazy",
            lambda: zckpt.write(
                state, directory / "lazy", latest=False, background=True, snapshot="lazy", snapshot_bytes=0
            ),
            finish=zckpt.wait,
        ),
        Contestant("DCP", begin, finish=lambda: pending.pop().result()),
    ]
    rounds["pause of a write in the background"] = together(pauses, runs, after=lambda: remove_on_first(directory))
    copies.clear()
    zckpt.write(state, ours, latest=False)
    save_with_dcp(state, theirs)
    dist.barrier()
    own_bytes = written_by_rank(ours)
    raw_file = directory / f"raw-{dist.get_rank()}"
    raw.write(raw_file, memories)
    loads = {
        "zckpt": (ours, lambda: zckpt.restore(state, ours)),
        "DCP": (theirs, lambda: load_with_dcp(state, theirs)),
    }
    if third is not None:
        path = directory / "third"
        third.save(state, path)
        loads[TORCH_CHECKPOINTING] = path, partial(third.load, state, path)
    # The page cache has room for the files of one contestant at a time.
    drop = prepared_with_free_memory(partial(on_first, drop_from_cache), own_bytes)
    bring = prepared_with_free_memory(partial(on_first, partial(_bring_alone_into_cache, directory)), own_bytes)
    cold = [Contestant(label, load, before=partial(drop, directory)) for label, (_, load) in loads.items()]
    cold.append(Contestant("raw", lambda: raw.read_into(raw_file, memories), before=partial(drop, directory)))
    rounds["load, cold"] = together(cold, runs)
    cached = [Contestant(label, load, before=partial(bring, path)) for label, (path, load) in loads.items()]
    rounds["load, cached"] = together(cached, runs)
    return {"rounds": rounds, "bytes": own_bytes}


def _bring_alone_into_cache(directory: Path, path: Path) -> None:
    """Brings the files of ``path`` into the page cache, and drops all others of ``directory`` from it."""
    drop_from_cache(directory)
    bring_into_cache(path)


def fsdp_memory(directory: Path, nbytes: int, library: str) -> dict[str, dict[str, float]]:
    """Returns the memory that a first save in the background, another save, and the first load into a model that has
    not trained take at most. torch_checkpointing has no save in the background without CUDA."""
    path, figures = directory / library, dict[str, dict[str, float]]()
    state = make_fsdp(nbytes)
    third = TorchCheckpointing() if library == TORCH_CHECKPOINTING else None
    functions: dict[str, Any] = {"zckpt": (partial(zckpt.write, latest=False), zckpt.restore)}
    functions["DCP"] = save_with_dcp, load_with_dcp
    functions[TORCH_CHECKPOINTING] = getattr(third, "save", None), getattr(third, "load", None)
    save, load = functions[library]
    if library == "zckpt":
        with metered(figures, "background"):
            zckpt.write(
                state, directory / "background", latest=False, background=True, snapshot="lazy", snapshot_bytes=0
            ).wait()
    elif library == "DCP":
        with metered(figures, "background"):
            save_with_dcp(state, directory / "background", in_background=True).result()
    with metered(figures, "write"):
        save(state, path)
    fresh = make_fsdp(nbytes, seed=1, trained=False)
    with metered(figures, "load"):
        load(fresh, path)
    return figures
