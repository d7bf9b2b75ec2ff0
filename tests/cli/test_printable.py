"""Whatever the names of directories and files are, no command prints anything that a terminal would obey, and none ends
because a stream refuses a name."""

from __future__ import annotations

import ast
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

import zckpt
from tests.support.litter import SHAPES, directory_names
from tests.support.names_in_code import full_names
from tests.support.states import EngineOfAnAdapter, engine_state, write_state, write_through
from zckpt.cli import COMMANDS, main

pytestmark = pytest.mark.linux  # other systems refuse such names

EVIL = "a\x1b]0;owned\x07\x1b[2J\r\x9b\u202e\u2028\nkept  \t\x85" + os.fsdecode(b"\xff\xfe")
SHOWN = r"a\x1b]0;owned\x07\x1b[2J\r\x9b\u202e\u2028\nkept  \t\x85\udcff\udcfe"
TEXT = EVIL.encode(errors="ignore").decode()
"""A text that a checkpoint can contain."""
RUN, CHECKPOINT, BROKEN, GONE = f"{EVIL}run", f"{EVIL}run/{EVIL}2", f"{EVIL}broken/c", f"{EVIL}gone"
CASES: dict[str, list[list[str]]] = {
    "info": [[RUN], [RUN, "--json"], [CHECKPOINT], [CHECKPOINT, "--json"], [BROKEN], [GONE], [EVIL]],
    "ls": [[CHECKPOINT], [CHECKPOINT, "--json"], [CHECKPOINT, "--tree"], [CHECKPOINT, EVIL], [GONE], [BROKEN]],
    "show": [[CHECKPOINT, "master/w"], [CHECKPOINT, "master/w", "--json"], [CHECKPOINT, EVIL], [GONE, "*"]],
    "state": [[CHECKPOINT], [CHECKPOINT, "--json"], [CHECKPOINT, EVIL], [GONE]],
    "diff": [[CHECKPOINT, f"{RUN}/{EVIL}1"], [CHECKPOINT, CHECKPOINT, "--json"], [CHECKPOINT, GONE]],
    "report": [[CHECKPOINT, "-o", f"{EVIL}.html"], [CHECKPOINT, "-o", f"{EVIL}.html"], [BROKEN, "-o", f"{EVIL}2.html"]],
    "cp": [[CHECKPOINT, f"{EVIL}cp"], [CHECKPOINT, f"{EVIL}cp"], [GONE, f"{EVIL}cp"], [BROKEN, f"{EVIL}cp2"]],
    "validate": [[CHECKPOINT], [CHECKPOINT, "--json"], [BROKEN], [BROKEN, "--json"], [GONE], [f"{EVIL}file"]],
    "repair": [[CHECKPOINT], [BROKEN], [BROKEN, "--output", f"{EVIL}rebuilt"], [GONE]],
    "export": [
        [CHECKPOINT, f"{EVIL}export"], [CHECKPOINT, f"{EVIL}export2", "--json"], [CHECKPOINT, f"{EVIL}export"],
        [CHECKPOINT, f"{EVIL}export3", "--config", GONE], [BROKEN, f"{EVIL}export4", "--max-shard-size", EVIL],
    ],
    "convert": [
        [CHECKPOINT, f"{EVIL}stock", "--to", "deepspeed"], [CHECKPOINT, f"{TEXT}stock", "--to", "deepspeed"],
        [f"{TEXT}stock", f"{EVIL}back"], [f"{TEXT}stock", f"{EVIL}back2", "--json"], [CHECKPOINT, f"{EVIL}back"],
        [GONE, f"{EVIL}back"], [CHECKPOINT, f"{EVIL}stock", "--to", "deepspeed", "--tag", "a/b" + EVIL],
    ],
    "gc": [[RUN, "--dry-run"], [RUN, "--json", "--dry-run"], [RUN], [GONE], [RUN, "--discard", EVIL], [EVIL]],
    "prune": [[RUN, "--keep-last", "1", "--dry-run"], [RUN, "--keep-last", "1", "--json"], [GONE, "--keep-last", "1"]],
    "doctor": [[RUN], [RUN, "--json"], [f"{EVIL}file"], [RUN, EVIL]],
    "run": [[GONE], ["-m", EVIL], [f"{EVIL}dir"], [f"{EVIL}.py"], [EVIL, "--full-every", EVIL]],
    "completion": [["bash"], [EVIL]],
}  # fmt: skip
"""The arguments of each command, without the command. They are given one after the other, in a directory of which
``furnish`` makes the content."""


def furnish(path: Path) -> None:
    for step in (1, 2):
        place = path / RUN / f"{EVIL}{step}"
        write_state(
            place, 1, SHAPES, step=step, engine_state=engine_state("w"), client_state={TEXT: TEXT}, latest=False
        )
        os.utime(path / RUN / f"{EVIL}{step}" / "manifest.msgpack", (1e9 + step,) * 2)
    for name in ("rank-00000/master.safetensors", f"{EVIL}/notes"):
        left = path / RUN / f"{EVIL}{len(name)}" / "data-0123456789abcdef" / name
        left.parent.mkdir(parents=True)
        left.write_bytes(b"")
    (path / RUN / f"{EVIL}unreadable").mkdir()
    (path / RUN / f"{EVIL}unreadable" / "manifest.msgpack").write_bytes(EVIL.encode(errors="replace"))
    write_state(path / BROKEN, 1, SHAPES)
    (file,) = (path / BROKEN).glob("data-*/rank-00000/master.safetensors")
    os.truncate(file, 5000)
    for name in (f"{EVIL}file", f"{EVIL}.py"):
        (path / name).touch()
    for name in (EVIL, f"{EVIL}dir"):
        (path / name).mkdir()


@pytest.fixture
def furnished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Strict(io.TextIOWrapper):
    """A stream that refuses what it cannot encode, as stdout does in most languages."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding, "strict", newline="\n")

    def text(self) -> str:
        self.flush()
        raw = self.buffer
        assert isinstance(raw, io.BytesIO)
        return raw.getvalue().decode(self.encoding)


def call(monkeypatch: pytest.MonkeyPatch, arguments: list[str], encoding: str) -> tuple[int, str, str]:
    """Calls a command with strict streams. `run` is a process, because it changes the process that it runs in."""
    if arguments[0] == "run":
        environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
        ended = subprocess.run(
            [sys.executable, "-m", "zckpt", *arguments], capture_output=True, env=environment, text=True, check=False
        )
        return ended.returncode, ended.stdout, ended.stderr
    out, err = Strict(encoding), Strict(encoding)
    with monkeypatch.context() as streams:
        streams.setattr(sys, "stdout", out)
        streams.setattr(sys, "stderr", err)
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(str(end.code))
    return status, out.text(), err.text()


@pytest.mark.parametrize("encoding", ["utf-8", pytest.param("ascii", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_what_is_not_printable(
    furnished: Path, command: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = []
    named = 0
    for arguments in CASES[command]:
        status, out, err = call(monkeypatch, [command, *arguments], encoding)
        statuses.append(status)
        assert all(line.isprintable() for line in (out + err).split("\n")), ascii((arguments, out, err))
        assert "Traceback" not in err, "an error is a message, and no defect"
        assert "codec can't encode" not in err, "no stream refuses a name"
        if "--json" in arguments:
            assert json.loads(out) is not None
        named += SHOWN in out + err
    assert named > 0 or command == "completion"
    assert 0 in statuses
    assert {*statuses} <= {0, 1, 2}
    assert command == "completion" or 2 in statuses


def test_json_has_the_names_as_they_are(furnished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = json.loads(call(monkeypatch, ["info", RUN, "--json"], "ascii")[1])
    assert f"{EVIL}2" in [checkpoint["path"] for checkpoint in info["checkpoints"]]
    cleanup = json.loads(call(monkeypatch, ["gc", RUN, "--dry-run", "--json"], "ascii")[1])
    assert all(os.path.exists(removed["path"]) for removed in cleanup["removed"])
    assert all(os.path.exists(path) for path in cleanup["foreign"])
    report = json.loads(call(monkeypatch, ["validate", CHECKPOINT, "--json"], "utf-8")[1])
    assert report["path"] == CHECKPOINT


def test_the_page_of_a_report_has_only_printable_text(furnished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    status, _, _ = call(monkeypatch, ["report", CHECKPOINT, "-o", "page.html"], "utf-8")
    assert status == 0
    page = (furnished / "page.html").read_text(encoding="utf-8")
    assert f"{SHOWN}2" in page
    body = page.partition("<body>")[2].partition("<script")[0]
    assert all(line.isprintable() for line in body.split("\n"))


def test_warnings_are_printable_too(tmp_path: Path) -> None:
    """A process, as a user starts it, whose streams are strict. It prunes all that it has to."""
    engine = EngineOfAnAdapter()
    write_through(tmp_path / EVIL / "source", torch.ones(3), latest=False, engine=engine)
    for step in (1, 2):
        write_through(tmp_path / EVIL / f"{EVIL}{step}", torch.ones(3), step=step, latest=False, engine=engine)
    for data in (tmp_path / EVIL).glob("*1/data-*"):
        (data / EVIL).touch()
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            [sys.executable, "-m", "zckpt", *arguments], capture_output=True, env=environment, text=True, check=False
        )
        assert ended.returncode == 0
        assert all(line.isprintable() for line in (ended.stdout + ended.stderr).split("\n"))
        return ended

    path = str(tmp_path / EVIL)
    warned = run("cp", f"{path}/source", f"{path}/{EVIL}1", "--overwrite")
    assert "what is not zckpt's was not removed" in warned.stderr
    assert SHOWN in warned.stderr
    run("prune", path, "--keep-last", "1")
    assert sum((tmp_path / EVIL / name / "manifest.msgpack").exists() for name in directory_names(tmp_path / EVIL)) == 1


def test_a_progress_bar_still_redraws_its_line(tmp_path: Path) -> None:
    """It is the only thing that is not guarded."""
    write_state(tmp_path / "c", 1, SHAPES)
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
    shown = b""
    with subprocess.Popen([sys.executable, "-m", "zckpt", "validate", str(tmp_path / "c")], stderr=theirs) as process:
        os.close(theirs)
        try:
            while part := os.read(terminal, 4096):
                shown += part
        except OSError:  # Linux says so that the other end is closed
            pass
    os.close(terminal)
    assert process.returncode == 0
    lines = shown.decode().replace("\n", "\r").split("\r")
    assert any(re.match("zckpt validate: 100%", line) for line in lines), shown
    assert max(map(len, lines)) in (69, 70), "it is as wide as the terminal"
    assert rb"\r" not in shown


PRINTS = re.compile(r"print|sys\.(__)?std(out|err)(__)?(\.buffer)?\.write(lines)?|os\.write|.*\.print_exc")


def test_only_one_module_prints() -> None:
    for file in Path(zckpt.__file__).parent.glob("cli/*.py"):
        prints = set(filter(PRINTS.fullmatch, full_names(ast.parse(file.read_text()))))
        assert not prints or file.name == "output.py" or prints == {"traceback.print_exc"}, file
    for code in ("print(1)", "say = print", "from sys import stdout as s; s.write(t)", "import os as o; o.write(1, b)"):
        assert any(map(PRINTS.fullmatch, full_names(ast.parse(code)))), code


def test_every_command_has_cases() -> None:
    assert CASES.keys() == COMMANDS.keys()
