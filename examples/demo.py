"""Writes, opens and resumes a small ZeRO-3 run, and compares every bit.

    python examples/demo.py [--keep DIR]

Two ranks with DeepSpeed ZeRO-3 train a small GPT-2 and write a checkpoint. A process without DeepSpeed opens the
checkpoint, loads parts of it, and compares them bit for bit with what the engines held. Then new engines, with other
random weights, restore the checkpoint and train on. Their losses must equal those of the run that never stopped. The
exit status is 0 if every comparison holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS, BEFORE, AFTER = 2, 6, 4
LAYER = "transformer.h.3"
MODEL: dict[str, Any] = {"vocab_size": 8192, "n_positions": 128, "n_embd": 320, "n_layer": 8, "n_head": 8}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 8}},
    "gradient_clipping": 1.0,
}


# These functions run in the processes of the ranks. Each result is written as JSON for the program that started them.


def train_and_write(directory: Path) -> dict[str, Any]:
    """One rank trains, keeps what DeepSpeed's functions read from its engine, writes a checkpoint, and trains on."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    import zckpt

    engine = make_engine(seed=0)
    before = train(engine, 0, BEFORE)
    held = {}
    for name, parameter in engine.module.named_parameters():
        held[f"master/{name}"] = safe_get_full_fp32_param(parameter).clone()
        held[f"exp_avg/{name}"] = safe_get_full_optimizer_state(parameter, "exp_avg").clone()
    if engine.global_rank == 0:
        torch.save(held, directory / "held.pt")
    del held
    with measured() as cost:
        path = zckpt.write(engine, directory / f"global_step{engine.global_steps}", client_state={"tokens_seen": 1536})
    after = train(engine, BEFORE, AFTER)
    numel = sum(parameter.ds_numel for parameter in engine.module.parameters())
    return {"path": path, "numel": numel, "before": before, "after": after, "write": cost, **versions()}


def restore_and_train(directory: Path) -> dict[str, Any]:
    """One rank of a new run makes an engine with other weights, restores the checkpoint, and trains on."""
    import zckpt

    engine = make_engine(seed=1)
    with measured() as cost:
        client_state = zckpt.restore(engine, directory)
    return {"restore": cost, "step": engine.global_steps, "client": client_state, "after": train(engine, BEFORE, AFTER)}


def open_and_load(directory: Path) -> dict[str, Any]:
    """One process without DeepSpeed and torch.distributed opens the checkpoint, loads parts of it, and validates it."""
    sys.modules["deepspeed"] = None  # type: ignore[assignment]  # makes every import of it fail
    import torch

    import zckpt

    held = torch.load(directory / "held.pt", mmap=True)
    with measured() as opened:
        checkpoint = zckpt.open(directory)
        listing = [
            [part, len(infos), sum(info.nbytes for info in infos), str(infos[0].dtype).removeprefix("torch.")]
            for part in checkpoint.parts
            if (infos := [info for info in checkpoint.values() if info.part == part])
        ]
    first = checkpoint[f"master/{LAYER}.mlp.c_fc.weight"]
    loads = []
    for pattern in (f"master/{LAYER}.*", "exp_avg/*"):
        before = checkpoint.io.data_bytes
        with measured() as cost:
            tensors = checkpoint.load(pattern)
        asked = sum(tensor.nbytes for tensor in tensors.values())
        same = all(torch.equal(tensor, held[key]) for key, tensor in tensors.items())
        expected = sum(key.startswith(pattern.removesuffix("*")) for key in held)
        read = checkpoint.io.data_bytes - before
        loads.append([pattern, len(tensors), asked, read, cost, same and len(tensors) == expected])
        del tensors
    with measured() as validated:
        report = zckpt.validate(directory)
    info = [
        first.key,
        list(first.shape),
        [[piece.rank, piece.file, piece.offset, piece.nbytes] for piece in first.pieces],
    ]
    return {
        "open": opened, "listing": listing, "info": info, "loads": loads, "size": checkpoint.nbytes,
        "validate": validated, "ok": report.ok, "report": str(report),
    }  # fmt: skip


def make_engine(seed: int) -> Any:
    import deepspeed
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(**MODEL, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    return engine


def train(engine: Any, start: int, steps: int) -> list[float]:
    """Trains, and returns the losses of this rank. Even and odd steps have different batches, and so have the ranks."""
    import torch

    losses = []
    for step in range(start, start + steps):
        random = torch.Generator().manual_seed(1000 * (step % 2) + engine.global_rank)
        tokens = torch.randint(MODEL["vocab_size"], (2, 64), generator=random)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def versions() -> dict[str, str]:
    import deepspeed
    import torch
    import transformers

    return {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "transformers": transformers.__version__}


@contextlib.contextmanager
def measured() -> Any:
    """Measures the seconds, and by how many bytes the peak of this process's resident memory rose."""
    cost: dict[str, float] = {}
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of the resident memory
    memory, start = resident("VmRSS"), time.perf_counter()
    yield cost
    cost["seconds"] = time.perf_counter() - start
    cost["peak"] = max(0, resident("VmHWM") - memory)


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


# The program starts the processes, compares their results, and prints them.


class Demo:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.failures = 0

    def title(self, number: int, text: str) -> None:
        print(f"\n\033[1m{number}  {text}\033[0m" if sys.stdout.isatty() else f"\n{number}  {text}", flush=True)

    def line(self, text: str) -> None:
        print(f"   {text}", flush=True)

    def check(self, holds: bool, text: str) -> None:
        self.failures += not holds
        self.line(f"{'ok  ' if holds else 'FAIL'} {text}")

    def start(self, role: str, ranks: int) -> list[dict[str, Any]]:
        """Runs one of the functions above in ``ranks`` new processes, and returns the result of each."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        processes, logs, results = [], [], []
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
            log = self.directory / f"{role}-{rank}.log"
            logs.append(log)
            with log.open("w") as out:
                command = [sys.executable, __file__, "--role", role, "--keep", str(self.directory)]
                environment = {**os.environ, **place, **master}
                processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
        for process in processes:
            process.wait()
        for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            leftover.unlink()  # DeepSpeed does not remove its buffer of 66 MiB per rank
        for rank, process in enumerate(processes):
            if process.returncode:
                print(logs[rank].read_text()[-4000:], file=sys.stderr)
                sys.exit(f"{role}: rank {rank} ended with status {process.returncode}")
            results.append(json.loads((self.directory / f"{role}-{rank}.json").read_text()))
        return results

    def run(self) -> int:
        print("zckpt: write a ZeRO-3 run, open any part of it anywhere, resume it bit for bit")

        self.title(1, f"Train: {RANKS} ranks, ZeRO-3, bf16")
        trained = self.start("train_and_write", RANKS)
        rank0 = trained[0]
        self.line(f"GPT-2 shape, {MODEL['n_layer']} layers, {rank0['numel'] / 1e6:.1f} M parameters, random weights")
        self.line(f"DeepSpeed {rank0['deepspeed']}, torch {rank0['torch']}, transformers {rank0['transformers']}")
        self.line(f"loss on rank 0, steps 1 to {BEFORE}:  {losses(rank0['before'])}")

        self.title(2, f'zckpt.write(engine, ".../{Path(rank0["path"]).name}")')
        opened = self.start("open_and_load", 1)[0]
        seconds = max(rank["write"]["seconds"] for rank in trained)
        peak = max(rank["write"]["peak"] for rank in trained)
        self.line(f"{mib(opened['size'])} in {seconds:.2f} s, durable; peak of extra memory {mib(peak)} per rank")

        self.title(3, "zckpt.open(run), in a process without DeepSpeed")
        self.line(f"opened and listed in {opened['open']['seconds'] * 1e3:.0f} ms")
        for part, tensors, size, dtype in opened["listing"]:
            self.line(f"{part:12} {tensors:4} tensors  {mib(size):>10}  {dtype}")
        key, shape, pieces = opened["info"]
        self.line(f"{key} {shape}:")
        for rank, file, offset, nbytes in pieces:
            self.line(f"    rank {rank}: bytes [{offset:,}, {offset + nbytes:,}) of {file}")

        self.title(4, "Checkpoint.load: only the bytes asked for")
        for pattern, tensors, asked, read, cost, same in opened["loads"]:
            self.line(f'load("{pattern}"): {tensors} tensors, {mib(asked)} in {cost["seconds"] * 1e3:.0f} ms')
            self.check(read <= 1.05 * asked, f"read {read / asked:.3f} x the bytes asked for")
            self.check(same, "bit for bit what the engines held")

        self.title(5, "zckpt.validate(path)")
        self.check(
            opened["ok"],
            f"{opened['report'].splitlines()[-1].partition(': ')[2]}, {opened['validate']['seconds']:.2f} s",
        )

        self.title(6, "zckpt.restore(engine, run), into new engines with other weights; then train on")
        resumed = self.start("restore_and_train", RANKS)
        seconds = max(rank["restore"]["seconds"] for rank in resumed)
        peak = max(rank["restore"]["peak"] for rank in resumed)
        self.line(f"restored step {resumed[0]['step']} in {seconds:.2f} s; peak of extra memory {mib(peak)} per rank,")
        self.line("    including the moments that a new engine does not have yet")
        self.check(resumed[0]["client"] == {"tokens_seen": 1536}, f"client_state {resumed[0]['client']}")
        self.line(f"loss on rank 0, steps {BEFORE + 1} to {BEFORE + AFTER}")
        self.line(f"    never stopped:  {losses(rank0['after'])}")
        self.line(f"    resumed:        {losses(resumed[0]['after'])}")
        same = [rank["after"] for rank in trained] == [rank["after"] for rank in resumed]
        self.check(same, f"equal, bit for bit, on all {RANKS} ranks")

        print(f"\n{'Every comparison holds.' if not self.failures else f'{self.failures} comparisons FAILED.'}")
        return 1 if self.failures else 0


def losses(values: list[float]) -> str:
    return "  ".join(f"{value:.6f}" for value in values)


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the checkpoint and the logs here")
    parser.add_argument(
        "--role", choices=["train_and_write", "restore_and_train", "open_and_load"], help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.role:
        result = globals()[options.role](options.keep)
        (options.keep / f"{options.role}-{os.environ['RANK']}.json").write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)  # the threads of gloo may delay a normal exit for seconds
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        return Demo(options.keep).run()
    with tempfile.TemporaryDirectory(prefix="zckpt-demo-") as directory:
        return Demo(Path(directory)).run()


if __name__ == "__main__":
    sys.exit(main())
