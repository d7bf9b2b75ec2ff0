"""What ``zckpt doctor`` says about this machine is what other programs say."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.cli import main


def doctor(capsys: pytest.CaptureFixture[str], path: Path, status: int = 0) -> dict[str, Any]:
    assert main(["doctor", str(path), "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def shell(command: str) -> str:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.strip()


def succeeds(*command: object) -> bool:
    return subprocess.run([*map(str, command)], capture_output=True, check=False).returncode == 0


@pytest.mark.linux
@pytest.mark.parametrize("disk", ["disk", "memory"])
def test_a_directory_can_do_what_other_programs_do_there(
    tmp_path: Path, disk: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if disk == "memory" and not Path("/dev/shm").is_dir():
        pytest.skip("needs /dev/shm")
    directory = tmp_path if disk == "disk" else Path("/dev/shm")
    new = directory / f"zckpt-{tmp_path.parent.name}" / "run"
    found = doctor(capsys, new)
    assert not new.parent.exists()
    assert found["problems"] == []
    kind, available = shell(f"df --block-size=1 --output=fstype,avail '{directory}' | tail -1").split()
    assert found["file_system"] == kind
    assert abs(found["free_bytes"] - int(available)) < int(available) // 2  # others write at the same time
    new.mkdir(parents=True)
    try:
        file = new / "file"
        is_direct = succeeds("dd", "if=/dev/zero", f"of={file}", "bs=1M", "count=1", "oflag=direct")
        assert found["direct_io"] == ("yes" if is_direct else "no")
        file.write_bytes(bytes(1 << 20))
        is_cloned = succeeds("cp", "--reflink=always", file, new / "clone")
        is_linked = succeeds("ln", file, new / "link")
        assert found["shared_by"] == ("reflinks" if is_cloned else "hard links" if is_linked else "no")
    finally:
        for left in [*new.iterdir()]:
            left.unlink()
        new.rmdir()
        new.parent.rmdir()


@pytest.mark.linux
def test_versions_and_limits_are_those_of_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    found = doctor(capsys, tmp_path)
    assert [found[name] for name in ("zckpt", "torch", "python")] == [
        zckpt.__version__, metadata.version("torch"), platform.python_version()
    ]  # fmt: skip
    assert str(found["open_files"]) == shell("ulimit -n")
    assert str((found["locked_memory_bytes"] or 0) // 1024) in (shell("ulimit -l"), "0")
    assert found["processors"] == int(shell("nproc"))
    assert found["huge_pages"] in shell("cat /sys/kernel/mm/transparent_hugepage/enabled || echo unknown")
    assert sorted(found["interfaces"]) == sorted(shell("ls /sys/class/net").split())
    assert "GLOO_SOCKET_IFNAME=eth7" in found["settings"]
    assert "hidden" not in str(found)


def test_people_get_the_names_of_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [name.removesuffix("_bytes").replace("_", " ") for name in doctor(capsys, tmp_path)]
    assert main(["doctor", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == names
    assert lines[-1].split() == ["problems", "none"]


def test_what_is_wrong_is_said_beside_everything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    found = doctor(capsys, tmp_path / "file" / "run", status=1)
    assert "Not a directory" in found["problems"][0]
    assert found["zckpt"] == zckpt.__version__
    code = "import sys; sys.modules['torch'] = None; from zckpt.cli import main; sys.exit(main(['doctor']))"
    broken = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (broken.returncode, broken.stderr) == (1, "")
    assert "import of torch halted" in broken.stdout
    assert "direct io" in broken.stdout
