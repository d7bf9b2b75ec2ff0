"""A small cluster of machines on this one, for tests of what differs between machines.

Each machine is a set of Linux namespaces. It has its own network address, host name, process ids, boot id, ``/dev/shm``
and disk. All machines are on one switch, which is a bridge in a network namespace of its own. The disk is mounted at
the same path on every machine. One machine can export a directory of its disk, which others mount at the same path as
well. Everything else, such as ``/tmp`` and the files of Python, is that of this machine.

Each machine lives as long as one process, which is the first in its pid namespace. When this process ends, the kernel
ends all others of the machine, and removes its mounts, the loop device of its disk and its network. The process ends
with the process that made it. So nothing but a temporary directory is left even if the tests are killed.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.cluster import ROOT
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

DISK_BYTES = 256 << 20
SHM_BYTES = 256 << 20
COMMAND_SECONDS = 60
FILES_PORT = 2022
EXPORTED = "exported"
CACHE_SECONDS = 10
"""How long a machine may show old attributes of a common file, in seconds. Clients of NFS do so for 3 to 60 s."""
SFTP_SERVER = "/usr/lib/openssh/sftp-server"
COMPILER = os.environ.get("CC", "cc")
SHIFTED_CLOCK = Path(__file__).parent / "scripts" / "shifted_clock.c"
EXT4_IOC_SHUTDOWN = 0x8004587D
EXT4_GOING_FLAGS_NOLOGFLUSH = 2
NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
BOOT_ID = "/proc/sys/kernel/random/boot_id"
WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL")


@functools.cache
def why_no_machines() -> str | None:
    """Returns the reason for which this system cannot make machines, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "machines need Linux and root"
    tools = ("ip", "losetup", "mkfs.ext4", "mount", "nsenter", "setpriv", "tc", "unshare")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"machines need {', '.join(missing)} (install iproute2, e2fsprogs and util-linux)"
    script = f"ip link add name b type bridge && mount -t tmpfs none {ROOT} && losetup --find"
    try:
        command("unshare", *NAMESPACES, "--fork", "sh", "-c", script)
    except AssertionError as error:
        return f"machines need more rights than this system gives: {error}"
    return None


def why_no_common_files() -> str | None:
    """Returns the reason for which machines cannot have a common file system, or None if they can."""
    if shutil.which("sshfs") is None or not os.path.exists(SFTP_SERVER):
        return "a common file system needs sshfs and sftp-server (install sshfs and openssh-sftp-server)"
    return None if os.path.exists("/dev/fuse") else "a common file system needs /dev/fuse"


def why_no_clocks() -> str | None:
    """Returns the reason for which the clocks of machines cannot differ, or None if they can. A time namespace does not
    suffice, because it cannot shift the time of day."""
    return None if shutil.which(COMPILER) else "other clocks need a C compiler (install gcc)"


def command(*arguments: Any) -> str:
    """Runs a program outside of the machines and returns what it prints. Fails if its exit status is not 0."""
    text = [*map(str, arguments)]
    done = subprocess.run(text, check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    assert done.returncode == 0, f"{shlex.join(text)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def first_process(*options: str) -> tuple[subprocess.Popen[str], int]:
    """Starts a process in new namespaces, for which ``options`` are those of unshare(1), and which it keeps.

    Returns its parent, which ends with it and with this process, and its id in the pid namespace of this process.
    """
    enter = [*WITH_ITS_PARENT, "unshare", *options, "--fork", "--kill-child"]
    parent = subprocess.Popen(
        [*enter, "sh", "-c", "echo ready; exec sleep infinity"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # so that only pytest gets Ctrl-C
    )
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "ready\n"
    return parent, int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text())


def end(parent: subprocess.Popen[str], pid: int) -> None:
    """Ends a process that ``first_process`` has started."""
    os.kill(pid, signal.SIGKILL)
    parent.wait()


class Machine:
    """One machine. ``Machines`` makes it and starts it."""

    def __init__(self, machines: Machines, number: int, name: str) -> None:
        self.name = name
        self.address = f"10.77.0.{number}"
        self.disk = machines.directory / "disk"
        """The directory where the machine's own disk is mounted, at the same path on every machine."""
        self.common = machines.directory / "common"
        """The directory where the common file system is mounted, at the same path on every machine."""
        self.pid = 0
        """The id, in the pid namespace of the tests, of the machine's first process. It is 0 if the machine is off."""
        self._machines = machines
        self._port = f"port-{number}"
        self._hardware_address = f"02:00:00:00:00:{number:02x}"
        self._image = machines.directory / f"disk-of-{name}.ext4"
        self._boot_id = machines.directory / f"boot-id-of-{name}"
        self._exporter: Machine | None = None
        self._clock: dict[str, str] = {}
        self._delay: subprocess.Popen[str] | None = None
        self._processes: list[subprocess.Popen[Any]] = []

    def start(self) -> None:
        """Switches the machine on, with the disk that it had or, if it has none, with an empty one."""
        assert not self.pid, f"{self.name} is on already"
        if not self._image.exists():
            with self._image.open("wb") as image:
                image.truncate(DISK_BYTES)
            command("mkfs.ext4", "-q", "-m", "0", self._image)
        self._boot_id.write_text(f"{uuid.uuid4()}\n")
        self._first, self.pid = first_process(*NAMESPACES, "--mount-proc")
        self._machines.in_switch(
            f"""ip link add name {self._port} type veth peer name eth0 address {self._hardware_address} netns {self.pid}
            ip link set {self._port} master switch up"""
        )
        self.shell(
            f"""hostname {self.name}
            ip link set lo up
            ip address add {self.address}/24 dev eth0
            ip link set eth0 up
            mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm
            mount --bind {self._boot_id} {BOOT_ID}
            mount --bind {self._machines.hosts} /etc/hosts
            mount -o loop {self._image} {self.disk}"""
        )
        if self._exporter is not None:
            self.mount_common(self._exporter)

    def kill(self, *, keep_disk: bool = True) -> None:
        """Ends the machine as a loss of power does: all processes at once, without a word to the other machines. What
        was not synced to its disk is lost. With ``keep_disk=False``, the next start has an empty disk."""
        self.cut()  # otherwise the kernel would close its connections
        disk = os.open(self.path(self.disk), os.O_RDONLY)
        try:
            assert os.fstat(disk).st_dev != self._machines.directory.stat().st_dev, "this is not the machine's own disk"
            fcntl.ioctl(disk, EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH.to_bytes(4, sys.byteorder))
        finally:
            os.close(disk)
        self.end()
        if not keep_disk:
            self._image.unlink()

    def end(self) -> None:
        """Ends all processes of the machine, and waits until nothing of it is left but the content of its disk."""
        if self.pid:
            end(self._first, self.pid)
            self.pid = 0
            while self._processes:
                with self._processes.pop():  # waits for it and closes its pipes
                    pass
            # The kernel removes the rest soon after the last process, and the machine can start again after that.
            self._machines.in_switch(
                f"for link in {self._port} {self._port}-s; do ip link delete $link 2>/dev/null || true; done"
            )
            if self._delay is not None:
                self._delay.kill()
                with self._delay:  # waits for it and closes its pipe
                    self._delay = None
            wait_until(lambda: not command("losetup", "--associated", self._image))

    def cut(self) -> None:
        """Takes the link of the machine down. Connections stay, and go on after ``mend``."""
        self._machines.in_switch(f"ip link set {self._port} down")

    def mend(self) -> None:
        """Takes the link up again."""
        self._machines.in_switch(f"ip link set {self._port} up")

    def slow(self, bytes_per_second: int, delay_seconds: float = 0) -> None:
        """Lets at most so many bytes through the link in each direction, and delivers everything so much later. Lasts
        until the machine ends."""
        limit = f"root tbf rate {bytes_per_second}bps burst 64kb latency 2s"
        self._machines.in_switch(f"tc qdisc add dev {self._port} {limit}")
        self.shell(f"tc qdisc add dev eth0 {limit}")
        if delay_seconds:
            # The port moves to a second switch. Everything between the two switches goes through the script.
            ends = [f"{self._port}-{side}" for side in "ab"]
            script = [sys.executable, "-m", "tests.support.scripts.delay", str(delay_seconds), *ends]
            self._delay = subprocess.Popen(
                [*self._machines.switch, *WITH_ITS_PARENT, *script], stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            assert self._delay.stdout is not None
            assert self._delay.stdout.readline() == "ready\n"
            self._machines.in_switch(
                f"""ip link add name {self._port}-s type bridge
                ip link set {self._port}-s up
                ip link set {self._port} master {self._port}-s
                ip link set {ends[0]} master {self._port}-s up
                ip link set {ends[1]} master switch up"""
            )

    def fill_disk(self, *, free_bytes: int) -> None:
        """Fills the machine's own disk with a file, so that at most ``free_bytes`` are free."""
        with self.path(self.disk / "filler").open("ab") as filler:
            while (excess := self.free_bytes() - free_bytes) > 0:
                os.posix_fallocate(filler.fileno(), filler.seek(0, os.SEEK_END), excess)

    def free_bytes(self) -> int:
        """Returns how many bytes are free on the machine's own disk."""
        state = os.statvfs(self.path(self.disk))
        return state.f_bavail * state.f_frsize

    def shift_clock(self, seconds: int) -> None:
        """Lets the time of day be so many seconds later for all processes that are started from now on.

        The kernel's clock stays as it is, which sets the times of files on the machine's own disk. So does the clock of
        the client of the common file system, until ``remount_common``.
        """
        library = self._machines.directory / "shifted_clock.so"
        if not library.exists():
            command(COMPILER, "-shared", "-fPIC", "-o", library, SHIFTED_CLOCK)
        self._clock = {"LD_PRELOAD": str(library), "CLOCK_SHIFT_SECONDS": str(seconds)}

    @property
    def exported(self) -> Path:
        """The directory that ``export_files`` serves, as a process outside of the machine finds it."""
        return self.path(self.disk / EXPORTED)

    def export_files(self) -> None:
        """Serves a directory on the machine's own disk, which other machines can mount."""
        self.exported.mkdir(exist_ok=True)
        self.popen([sys.executable, "-m", "tests.support.scripts.serve_files", FILES_PORT, SFTP_SERVER])
        wait_until(lambda: f":{FILES_PORT}" in self.shell("ss --listening --tcp --numeric"))

    def mount_common(self, exporter: Machine) -> None:
        """Mounts what another machine exports, at the same path on every machine.

        As with NFS, attributes of files are cached for a while, but a file that is opened is seen as it is. A read or
        write waits as long as the other machine cannot be reached.
        """
        self._exporter = exporter
        options = f"directport={FILES_PORT},dcache_timeout={CACHE_SECONDS},attr_timeout=0"
        self.run(["sshfs", "-o", options, f"{exporter.address}:{exporter.disk / EXPORTED}", self.common])

    def remount_common(self) -> None:
        """Mounts the common file system again, so that nothing of it is cached and its client has a shifted clock."""
        assert self._exporter is not None
        self.shell(f"umount {self.common}")
        self.mount_common(self._exporter)

    def path(self, path: str | os.PathLike[str]) -> Path:
        """Returns the path by which a process outside of the machine finds a file of the machine."""
        return Path(f"/proc/{self.pid}/root/{path}")

    def popen(self, arguments: Sequence[Any], env: Mapping[str, str] | None = None, **options: Any) -> Any:
        """Starts a process on the machine, and returns the ``subprocess.Popen`` of it. ``env`` has more variables for
        its environment. ``options`` are those of ``subprocess.Popen``."""
        enter = ["nsenter", f"--target={self.pid}", *NAMESPACES, "--", *WITH_ITS_PARENT]
        variables = [f"{name}={value}" for name, value in {**self._clock, **(env or {})}.items()]
        process = subprocess.Popen(
            [*enter, "env", f"--chdir={ROOT}", *variables, *map(str, arguments)], stdin=subprocess.DEVNULL, **options
        )
        self._processes.append(process)
        return process

    def run(self, arguments: Sequence[Any], env: Mapping[str, str] | None = None) -> str:
        """Runs a process on the machine and returns what it prints. Fails if its exit status is not 0."""
        process = self.popen(arguments, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            output, errors = process.communicate(timeout=COMMAND_SECONDS)
        finally:
            process.kill()
        text = shlex.join(map(str, arguments))
        assert process.returncode == 0, f"{text} on {self.name}: {process.returncode}\n{output}\n{errors}"
        return str(output)

    def shell(self, script: str) -> str:
        return self.run(["sh", "-ec", script])


class Machines:
    """Machines on one switch. Use it as a context manager, at whose end nothing of them is left."""

    def __init__(self, count: int) -> None:
        """Prepares machines with the names ``node-0``, ``node-1`` and so on, which ``__enter__`` makes."""
        self.count = count
        self.nodes: list[Machine] = []
        self._added = 0
        self._all = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.directory = Path(self._all.enter_context(tempfile.TemporaryDirectory(prefix="zckpt-machines-")))
            self.hosts = self.directory / "hosts"
            self.hosts.write_text("127.0.0.1 localhost\n")
            for mount_point in ("disk", "common"):
                (self.directory / mount_point).mkdir()
            parent, pid = first_process("--net")
            self._all.callback(end, parent, pid)
            self.switch = ("nsenter", f"--target={pid}", "--net", "--")
            self.in_switch("ip link add name switch type bridge; ip link set switch up")
            self.nodes = [self.add(f"node-{number}") for number in range(self.count)]
        except BaseException:
            self._all.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._all.close()

    def add(self, name: str) -> Machine:
        """Makes one more machine and starts it. The others reach a server on it by this name."""
        self._added += 1
        machine = Machine(self, self._added, name)
        with self.hosts.open("a") as hosts:
            hosts.write(f"{machine.address} {name}\n")
        self._all.callback(machine.end)
        machine.start()
        return machine

    def in_switch(self, script: str) -> None:
        """Runs a shell script with the network of the switch."""
        command(*self.switch, "sh", "-ec", script)
