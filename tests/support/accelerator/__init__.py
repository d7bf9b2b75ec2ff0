"""A simulated accelerator: a backend of torch with two devices, "sim:0" and "sim:1", that finds races and misuse.

Its memory is in pages that the host may not touch. An operation that is queued on a stream runs as late as possible,
namely when a thread waits for it. Fresh memory, and memory of the host that a copy has not reached yet, hold noise.
Therefore a test fails in every run if it does not wait for a copy, uses a buffer again too early, or accesses memory of
a device from the host.

A process can have only one such backend, and torch takes it for the machine's accelerator. Therefore a test that is
marked ``sim`` runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.accelerator import build

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DEVICE_TYPE = "sim"


class Operation(NamedTuple):
    """An operation that was queued on a stream: a copy, or another operator of torch by its name.

    ``queued`` and ``ran`` are ticks of the logical clock. ``ran`` is 0 as long as the operation is under way.
    ``waited`` is true if the host waited for the operation on the spot. ``thread`` is the native id of the thread that
    queued the operation.
    """

    name: str
    nbytes: int
    queued: int
    ran: int
    device: int
    stream: int
    pinned: bool
    waited: bool
    thread: int


class Wait(NamedTuple):
    """A wait of a thread of the host.

    ``what`` is "stream", "event", "device" (``stream`` is -1 then), or the name of an operation that the thread waited
    for on the spot.
    """

    what: str
    began: int
    ended: int
    device: int
    stream: int
    thread: int


class Mark(NamedTuple):
    """A mark that a test has put into the order of events."""

    text: str
    tick: int
    thread: int


@lru_cache(maxsize=1)
def load() -> str:
    """Makes the devices known to torch in this process, and returns their type, "sim"."""
    _sim()
    return DEVICE_TYPE


def compiled() -> Path:
    """Returns the path of the compiled module, and compiles it first if needed.

    A separate process compiles, because torch's build function also loads the module, which would give this process the
    devices.
    """
    if not build.built().exists():
        subprocess.run([sys.executable, build.__file__], check=True)
    return build.built()


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Loads the devices and calls ``function``. ``cluster.run`` is given this function to have devices in its ranks."""
    load()
    return function(*args, **kwargs)


@lru_cache(maxsize=1)
def _sim() -> Any:
    import torch

    spec = importlib.util.spec_from_file_location(build.MODULE, compiled())
    assert spec is not None
    assert spec.loader is not None
    sim = importlib.util.module_from_spec(spec)
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    spec.loader.exec_module(sim)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module(DEVICE_TYPE, _device_module(sim))
    return sim


def _device_module(sim: Any) -> ModuleType:
    """Returns the module ``torch.sim``, with the functions that torch and code for any device look for in it."""
    import torch

    generators = [torch.Generator() for _ in range(sim.DEVICES)]
    for device, generator in enumerate(generators):
        torch.ops.sim.use_generator(device, generator)

    def index_of(device: torch.device | str | int) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        return sim.current_device() if index is None else index

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module: Any = ModuleType(f"torch.{DEVICE_TYPE}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: sim.DEVICES
    module.current_device = sim.current_device
    module.set_device = sim.set_device
    module.device = lambda device: torch.accelerator.device_index(index_of(device))
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device=DEVICE_TYPE: generators[index_of(device)].get_state()
    module.set_rng_state = lambda state, device=DEVICE_TYPE: generators[index_of(device)].set_state(state)
    return module


def mark(text: str) -> int:
    """Puts a mark into the order of events and returns its tick."""
    tick: int = _sim().mark(text)
    return tick


def operations() -> list[Operation]:
    """Returns all operations, in the order in which they were queued."""
    return [Operation(*row) for row in _sim().operations()]


def copies() -> list[Operation]:
    """Returns the operations that are named "host to device", "device to host" or "device to device"."""
    return [operation for operation in operations() if " to " in operation.name]


def waits() -> list[Wait]:
    """Returns all waits, in the order in which they ended."""
    return [Wait(*row) for row in _sim().waits()]


def marks() -> list[Mark]:
    """Returns all marks."""
    return [Mark(*row) for row in _sim().marks()]


def _in_flight_bytes_max() -> int:
    """Returns the most bytes of copies between host and devices that were under way at the same time."""
    changes = []
    for copy in copies():
        if copy.name != "device to device":
            changes += [(copy.queued, copy.nbytes), (copy.ran or sys.maxsize, -copy.nbytes)]
    most = now = 0
    for _, nbytes in sorted(changes):
        now += nbytes
        most = max(most, now)
    return most


def counters() -> dict[str, Any]:
    """Returns the counts of bytes of memory since the start or the last ``reset``, by name.

    A name that ends in ``_bytes`` is that of the bytes that are allocated now, ``_bytes_max`` that of the most bytes at
    any time, and ``_bytes_taken`` that of all bytes that were allocated in that time. Pinned memory includes the memory
    that torch keeps for later. The count of device memory is a list with an element for each device. ``in_flight``
    counts the bytes of copies between host and devices.
    """
    sim = _sim()
    pinned = sim.pinned_bytes()
    devices = [sim.device_bytes(device) for device in range(sim.DEVICES)]
    result: dict[str, Any] = {"in_flight_bytes_max": _in_flight_bytes_max()}
    for number, suffix in enumerate(("", "_max", "_taken")):
        result[f"pinned_bytes{suffix}"] = pinned[number]
        result[f"device_bytes{suffix}"] = [counts[number] for counts in devices]
    return result


def reset() -> None:
    """Clears the log and the byte counts. The clock goes on."""
    _sim().reset()
