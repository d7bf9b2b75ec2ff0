"""A simulated accelerator: a backend of torch with two devices, "sim:0" and "sim:1", that finds races and misuse.

Its memory lies in pages that the host may not touch. What is queued on a stream runs only when somebody waits for it,
as late as it can be. What is fresh, and what is still under way to the host, holds noise. So each copy that is not
waited for, each buffer that is used again too early, and each access from the host makes a test fail, in every run.

There is one such backend to a process, and torch then takes it for the machine's accelerator. So a test that is marked
``sim`` runs in a process of its own.
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
    """What was queued on a stream: a copy, or another operator of torch by its name.

    ``queued`` and ``ran`` are ticks of the logical clock, ``ran`` is 0 as long as the operation is under way.
    ``waited``: the host waited for it on the spot. ``thread``: the native id of the thread that queued it.
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
    """A thread of the host waited for a "stream" or an "event", or a "device" (whose ``stream`` is -1), or for an
    operation on the spot, by its name.
    """

    what: str
    began: int
    ended: int
    device: int
    stream: int
    thread: int


class Mark(NamedTuple):
    """What a test has put into the order of events."""

    text: str
    tick: int
    thread: int


@lru_cache(maxsize=1)
def load() -> str:
    """Makes the devices known to torch, in this process. Returns their type, "sim"."""
    _sim()
    return DEVICE_TYPE


def compiled() -> Path:
    """Returns the path of the compiled module, and compiles it first if needed. A separate process compiles, because
    torch's build function also loads the module, which would give this process the devices.
    """
    if not build.built().exists():
        subprocess.run([sys.executable, build.__file__], check=True)
    return build.built()


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``function`` with the devices loaded: what ``cluster.run`` is given, to have them in its ranks."""
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
    """What torch, and who is generic, looks for in ``torch.sim``."""
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
    """Puts a mark into the order of events; returns its tick."""
    tick: int = _sim().mark(text)
    return tick


def operations() -> list[Operation]:
    """In the order in which they were queued."""
    return [Operation(*row) for row in _sim().operations()]


def copies() -> list[Operation]:
    """Those named "host to device", "device to host", "device to device"."""
    return [one for one in operations() if " to " in one.name]


def waits() -> list[Wait]:
    """In the order in which they ended."""
    return [Wait(*row) for row in _sim().waits()]


def marks() -> list[Mark]:
    return [Mark(*row) for row in _sim().marks()]


def _in_flight_bytes_max() -> int:
    """The most bytes of copies between host and devices that were under way at the same time."""
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
    """Bytes of memory: ``_bytes`` is what is allocated now, ``_bytes_max`` the most at any time since the start or the
    last ``reset``, ``_bytes_taken`` what was allocated in that time. Pinned memory is counted with what torch keeps for
    later; device memory is a list, by device. ``in_flight`` is said of copies between host and devices.
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
    """Clears the log and the byte counts; the clock goes on."""
    _sim().reset()
