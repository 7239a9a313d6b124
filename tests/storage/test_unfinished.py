"""Work that is killed leaves folders that the next work beside it removes; work that lives keeps its own."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from metaloom.storage.export import export_folder
from metaloom.storage.unfinished import SUFFIX, unfinished_folder

EXPORT = """
import sys
from pathlib import Path
from metaloom.storage.export import export_folder
with export_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("of it")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def exporting(tmp_path):
    """A process in the middle of an export to tmp_path / "killed", and its folder."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", EXPORT, str(tmp_path / "killed")], **pipes, text=True) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


def hidden(folder):
    return sorted(str(path) for path in folder.glob(f".*{SUFFIX}"))


def test_what_a_killed_export_left_is_removed_by_the_next_one_and_nothing_that_lives(exporting, tmp_path, caplog):
    process, left = exporting
    with unfinished_folder(tmp_path, "living") as living:
        with export_folder(tmp_path / "first"):
            assert left in hidden(tmp_path)
        assert hidden(tmp_path) == sorted([left, str(living)])
        process.send_signal(signal.SIGKILL)
        process.wait()
        with export_folder(tmp_path / "second"):
            pass
        assert hidden(tmp_path) == [str(living)]
    assert [record.getMessage() for record in caplog.records] == [f"removed {left}, left by a killed process"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_links_and_files_that_are_called_so_stay(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f".link{SUFFIX}").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f".file{SUFFIX}").write_text("a file of somebody's")
    with unfinished_folder(tmp_path, "next"):
        pass
    assert len([*tmp_path.iterdir()]) == 3


def test_folders_of_somebody_else_and_of_other_machines_stay(tmp_path):
    with unfinished_folder(tmp_path, "next") as folder:
        name = folder.name
    for other in (f".thesis{SUFFIX}", name.replace(socket.gethostname(), "another-machine")):
        (tmp_path / other).mkdir()
        (tmp_path / other / "kept").write_text("mine")
    with unfinished_folder(tmp_path, "next"):
        pass
    assert len([*tmp_path.glob(".*/kept")]) == 2


def test_a_new_folder_that_another_process_takes_for_a_dead_one_is_made_again(tmp_path, monkeypatch):
    made, make = [], Path.mkdir

    def taken_once(path, *how):
        make(path, *how)
        made.append(path)
        if len(made) == 1:
            os.rmdir(path)

    monkeypatch.setattr(Path, "mkdir", taken_once)
    with unfinished_folder(tmp_path, "new") as folder:
        assert folder.is_dir()
    assert len(made) == 2
