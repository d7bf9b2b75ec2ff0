"""Features of all commands: help, examples, exit statuses, completion, and few imports."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.states import engine_state, write_state
from zckpt.cli import COMMANDS, main, make_parser

SOUND = Path(__file__).parents[1] / "broken" / "sound"
PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def zckpt(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zckpt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def examples(name: str) -> list[str]:
    epilog = subparser(name).epilog
    assert epilog is not None
    first, *lines = epilog.splitlines()
    assert first == "examples:"
    return [line for line in lines if line.strip()]


def subparser(name: str) -> Any:
    commands: Any
    (commands,) = (action for action in make_parser([name])._actions if action.dest == "command")
    return commands.choices[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does_and_its_examples_can_be_parsed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert subparser(name).description in shown
    lines = examples(name)
    assert len(lines) >= 2
    for line in lines:
        assert line in shown
        words = shlex.split(re.split(r" [|>] ", line)[0])
        arguments = make_parser(words).parse_args(words[words.index("zckpt") + 1 :])
        assert arguments.command == name


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = """
import sys
from zckpt.cli import COMMANDS, main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert not {"torch", "rich", "deepspeed"} & {*sys.modules}
assert not {f"zckpt.cli.{name}" for name in COMMANDS} & {*sys.modules}
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {*COMMANDS} <= {*shown.split()}


def test_the_exit_status_says_whether_a_command_found_damage_or_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first command is a process, as a user starts it. The others are calls, because a process imports torch."""
    damaged = zckpt("validate", str(SOUND.parent / "D002-flip"))
    assert (damaged.returncode, damaged.stderr) == (1, "")
    assert "D002" in damaged.stdout
    assert main(["validate", str(SOUND)]) == 0
    capsys.readouterr()
    for wrong in (["validate"], ["no-such-command"], ["validate", str(SOUND), "--level", "none"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        shown = capsys.readouterr()
        assert (ended.value.code, shown.out) == (2, "")
        assert "usage: zckpt" in shown.err
    absent = str(tmp_path / "absent")
    for command in (["validate", absent], ["info", absent], ["convert", absent, "new", "--to", "dcp"]):
        assert main(command) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith(f"zckpt: the path does not exist (file {absent})")
        assert "give the directory of a checkpoint or run" in shown.err


@pytest.mark.parametrize(
    "command", [["export", "a", "b", "--format", "pt", "--config", "c"], ["convert", "a", "b", "--stage", "3"]]
)
def test_arguments_that_contradict_each_other_are_an_error_and_no_answer(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"zckpt {command[0]}: ")
    assert "may be given only with" in shown.err


def test_an_error_of_a_script_keeps_its_traceback_and_exit_status(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('of the script')")
    ended = zckpt("run", str(tmp_path / "train.py"))
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr


@pytest.mark.parametrize("option", ["--re", "--copy=1", "--keep"])
def test_run_leaves_the_options_of_the_script_alone(option: str) -> None:
    """argparse would take them for the beginning of ``--replace-deepspeed``, ``--copy-to`` or ``--keep-last``."""
    arguments = make_parser(["run"]).parse_args(["run", "train.py", option])
    assert arguments.arguments == [option]


def test_run_refuses_options_that_do_not_go_together_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    assert main(["run", "--copy-keep-every", "3", str(tmp_path / "train.py")]) == 2
    assert "copy_keep_last" in capsys.readouterr().err


def test_only_arguments_that_are_required_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for command, missing in ((["diff", "a"], "b"), (["cp", "a"], "destination"), (["ls"], "path")):
        with pytest.raises(SystemExit):
            main(command)
        assert f"are required: {missing}\n" in capsys.readouterr().err


DASHES: dict[str, tuple[list[str], list[str]]] = {
    "info": ([], ["-run"]),
    "ls": (["--long"], ["-run", "master/*"]),
    "show": ([], ["-run", "master/w"]),
    "state": ([], ["-run", "client_state"]),
    "diff": (["--json"], ["-run", "-run/-1"]),
    "report": (["--out=-page.html"], ["-run"]),
    "cp": ([], ["-run", "-copy"]),
    "validate": ([], ["-run"]),
    "repair": ([], ["-run/-1"]),
    "gc": ([], ["-run"]),
    "prune": (["--keep-last", "1"], ["-run"]),
    "export": ([], ["-run", "-export"]),
    "convert": (["--to", "deepspeed"], ["-run", "-stock"]),
    "doctor": ([], ["-run"]),
    "completion": ([], ["bash"]),
}
"""The options of each command, and positional arguments that begin with a dash."""


@pytest.mark.parametrize("command", DASHES)
def test_what_follows_two_dashes_is_no_option(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_state(tmp_path / "-run" / "-1", 1, {"w": (3,)}, engine_state=engine_state("w"), client_state={"a": 1})
    options, positional = DASHES[command]
    assert main([command, *options, "--", *positional]) == 0
    capsys.readouterr()
    for wrong in ([*options, "--no-such", "--", *positional], [*options, "--", *positional, *positional, "-more"]):
        if command in ("ls", "show", "diff", "cp", "report") and wrong[-1] == "-more":
            continue  # it takes any number of them
        with pytest.raises(SystemExit):
            main([command, *wrong])
        assert f"unrecognized arguments: {'--no-such' if '--no-such' in wrong else ''}" in capsys.readouterr().err


def test_a_script_whose_name_begins_with_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-script.py").write_text("import sys; print(sys.argv)")
    ended = zckpt("run", "--", "-script.py", "--json", "--")
    assert ended.returncode == 0
    assert ended.stdout.endswith("['-script.py', '--json', '--']\n")
    assert {*DASHES} == {*COMMANDS} - {"run"}


@pytest.mark.parametrize(
    ("words", "script", "passed"),
    [
        (["train.py", "--", "-a"], "train.py", ["--", "-a"]),
        (["-m", "train", "--", "--", "-m"], "train", ["--", "--", "-m"]),
        (["--", "-train.py", "--", "a", "--"], "-train.py", ["--", "a", "--"]),
    ],
)
def test_two_dashes_behind_a_script_are_the_script_s(words: list[str], script: str, passed: list[str]) -> None:
    arguments = make_parser(["run"]).parse_args(["run", *words])
    assert (arguments.script, arguments.arguments) == (script, passed)


def test_other_formats_are_named_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    formats = {
        "a checkpoint in DeepSpeed's own format": "mp_rank_00_model_states.pt",
        "a Hugging Face model": "config.json model.safetensors",
        "an adapter of PEFT": "adapter_config.json adapter_model.safetensors",
        "a DCP checkpoint": ".metadata __0_0.distcp",
        "a checkpoint of Orbax": "_CHECKPOINT_METADATA",
        "a checkpoint of Megatron-LM": "latest_checkpointed_iteration.txt",
    }
    for number, (what, files) in enumerate(formats.items()):
        source = tmp_path / str(number)
        source.mkdir()
        for name in files.split():
            (source / name).touch()
        for command in ("info", "ls", "state", "validate", "cp", "export"):
            out = ["out"] if command in ("cp", "export") else []
            assert main([command, str(source), *out]) == 2
            shown = capsys.readouterr()
            assert shown.out == ""
            assert f"this is {what}" in shown.err
            assert ("zckpt convert" in shown.err) == (what != "an adapter of PEFT")
    assert not (tmp_path / "out").exists()


def test_a_run_with_checkpoints_of_zckpt_and_of_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error says how to name a checkpoint of the other format than that which `latest` names."""
    run = tmp_path / "run"
    shutil.copytree(SOUND, run / "global_step7")
    (run / "global_step9").mkdir()
    (run / "global_step9" / "mp_rank_00_model_states.pt").touch()

    def error(*arguments: str) -> str:
        assert main([*arguments]) == 2
        return capsys.readouterr().err

    (run / "latest").write_text("global_step9")
    new = str(tmp_path / "new")
    for command in (["ls", str(run)], ["convert", str(run), new, "--to", "deepspeed"]):
        assert "or give one of the checkpoints that are here, newest first: global_step7" in error(*command)
    (run / "latest").write_text("global_step7")
    for tag in ([], ["--tag", "global_step7"], ["--tag", "absent"]):
        said = error("convert", str(run), new, *tag)
        assert f"give one of the checkpoints in {run}, by its path or as tag (--tag): global_step9" in said


def test_the_hints_of_conversions_name_options_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "new")
    assert main(["convert", str(SOUND), path]) == 2
    assert "--to deepspeed" in capsys.readouterr().err
    assert main(["cp", str(SOUND), path]) == 0
    assert main(["cp", str(SOUND), path]) == 2
    assert "overwrite=True (--overwrite)" in capsys.readouterr().err


def test_a_defect_of_a_command_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zckpt.diff", lambda *_, **__: {"": 0}["no such key"])
    assert main(["diff", "a", "b"]) == 2
    assert "KeyError: 'no such key'" in capsys.readouterr().err


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.linux
def test_output_that_nobody_takes_is_an_error_of_one_line() -> None:
    info, usage = (f"{sys.executable} -m zckpt {arguments}" for arguments in (f"info {SOUND}", "--help"))
    full = "zckpt: cannot write the output: No space left on device\n"
    closed = "zckpt: cannot write the output: it is closed\n"
    for command, error in ((f"{info} > /dev/full", full), (f"{usage} > /dev/full", full), (f"{info} >&-", closed)):
        ended = shell(command)
        assert (ended.returncode, ended.stderr) == (2, error), command
    gone = shell(f"{info} | true; exit ${{PIPESTATUS[0]}}")
    assert (gone.returncode, gone.stderr) == (141, ""), "the reader has ended"
    for nobody in ("2>&-", "2> /dev/full"):
        assert shell(f"{info}/absent {nobody}").returncode == 2
        assert shell(f"{info} {nobody}").stdout


def test_shells_complete_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    scripts = {}
    for shell in ("bash", "zsh", "tcsh"):
        assert main(["completion", shell]) == 0
        script = scripts[shell] = capsys.readouterr().out
        assert all(name in script for name in COMMANDS)
        assert "level" in script
    script = scripts["bash"]
    ask = f"{script}\nCOMP_WORDS=(zckpt val); COMP_CWORD=1; _shtab_zckpt; echo ${{COMPREPLY[@]}}"
    assert subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout == "validate\n"


def test_the_error_of_a_senseless_argument_explains_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("nan", "-1", "x"):
        with pytest.raises(SystemExit):
            main(["diff", str(SOUND), str(SOUND), "--rtol", wrong])
        assert f"must be a number of 0 or more, got '{wrong}'" in capsys.readouterr().err
    assert main(["convert", "", str(tmp_path / "out")]) == 2
    assert "the path is empty" in capsys.readouterr().err
