"""What runs take on the disk, and their removal."""

import errno
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from viewing import Viewer

from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.fork import fork
from metaloom.flows.formatting import program
from metaloom.flows.operations.du import disk_use, in_ranges
from metaloom.flows.operations.ls import _moment
from metaloom.flows.runs import new_run_name
from metaloom.storage.read.committed import bytes_in

KILLED_IN_BETWEEN = """
import os, shutil, signal, sys
from pathlib import Path
from metaloom import storage
shutil.rmtree = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
storage.remove_run(Path(sys.argv[1]))
"""


@pytest.fixture
def runs(copy_tiny_run, tmp_path, monkeypatch):
    """A folder with a run called first."""
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    copy_tiny_run(tmp_path / "runs" / "first")
    return tmp_path / "runs"


def says(words, capsys, code=0):
    assert cli.run(words.split()) == code, capsys.readouterr()
    said = capsys.readouterr()
    return said.out + said.err


def files(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


class TestRemove:
    def test_a_fork_keeps_all_that_it_shares_with_a_removed_parent(self, runs, capsys):
        fork(runs / "first", 2, runs / "second")
        before, own = files(runs / "second"), bytes_in(runs / "first") - disk_use(runs / "first").shared
        told = says("rm first --yes", capsys)
        assert "second is a fork of it and keeps everything they share" in told
        assert f"removed 1 run, {own / 1000:.3g} kB freed" in told
        assert [path.name for path in runs.iterdir()] == ["second"]
        assert files(runs / "second") == before
        assert storage.verify_run(runs / "second") == []

    def test_without_yes_and_without_a_terminal_nothing_goes(self, runs, capsys):
        assert "pass --yes" in says("rm first", capsys, 2)
        assert storage.verify_run(runs / "first") == []

    @pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"\n", 1), (b"y\n", 0)])
    def test_in_a_terminal_it_asks(self, runs, answer, code):
        pid, terminal = pty.fork()
        if pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "metaloom.flows.cli", "rm", "first"])
        screen = b""
        while b"[y/N]" not in screen:
            screen += os.read(terminal, 4096)
        os.write(terminal, answer)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
        os.close(terminal)
        assert (runs / "first").exists() == (code == 1)

    def test_all_runs_are_looked_at_before_the_first_goes(self, runs, capsys):
        assert "no such folder" in says("rm first second --yes", capsys, 2)
        assert (runs / "first" / "run.json").exists()

    def test_a_run_that_is_being_written_is_refused(self, runs, capsys):
        with storage.open_writer(runs / "first"):
            told = says("rm first --yes", capsys, 1)
        assert f"process {os.getpid()} on" in told
        assert f"`metaloom cancel {runs}/first` stops it" in told
        (runs / "first" / "writer.lock").write_text('{"host": "a.b", "pid": 1, "since": "2026", "token": "0"}')
        assert "process 1 on a.b" in says("rm first --yes", capsys, 1)
        assert (runs / "first" / "run.json").exists()

    def test_a_link_is_refused_and_what_links_lead_to_stays(self, runs, tmp_path, capsys):
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "precious").write_text("x")
        (runs / "link").symlink_to("first")
        assert "a symbolic link to first" in says("rm link --yes", capsys, 2)
        (runs / "first" / "_quarantine").symlink_to(outside)
        (runs / "first" / "data.zarr" / "link").symlink_to(outside)
        says("rm first --yes", capsys)
        assert not (runs / "first").exists()
        assert (outside / "precious").read_text() == "x"

    def test_what_is_no_run_or_holds_anything_else_is_refused(self, runs, tmp_path, capsys):
        (tmp_path / "folder").mkdir()
        assert "without run.json" in says(f"rm {tmp_path}/folder --yes", capsys, 2)
        (runs / "first" / "notes.txt").touch()
        assert "first: notes.txt in it; expected" in says("rm first --yes", capsys, 2)
        assert (runs / "first" / "run.json").exists()

    @pytest.mark.parametrize("file", ["_commits/thesis.txt", "data.zarr/mine", "tables/notes/a.parquet", "_sessions/x"])
    def test_a_file_of_the_users_within_its_folders_is_no_part_of_it(self, file, runs, tmp_path, capsys):
        for run in (runs / "first", tmp_path / "thesis"):
            (run / "_commits").mkdir(parents=True, exist_ok=True)
            (run / file).parent.mkdir(parents=True, exist_ok=True)
            (run / file).touch()
            assert f"{file} in it; expected" in says(f"rm {run} --yes", capsys, 2)
            assert (run / file).exists()

    def test_a_damaged_run_goes_too(self, runs, capsys):
        (runs / "first" / "run.json").write_text("{")
        says("rm first --yes", capsys)
        assert [*runs.iterdir()] == []

    def test_a_killed_removal_leaves_no_half_run_and_is_finished_by_the_next(self, runs, capsys):
        killed = subprocess.run([sys.executable, "-c", KILLED_IN_BETWEEN, str(runs / "first")])
        assert killed.returncode == -signal.SIGKILL
        assert storage.find_runs(runs) == []
        assert "1 interrupted removal, " in says("du", capsys)
        (left,) = storage.unfinished_removals(runs)
        assert left.name.startswith("first-")
        assert "finished the removal of" in says("rm", capsys)
        assert [*runs.iterdir()] == []
        assert says("rm", capsys) == "no removal to finish\n"

    def test_what_another_command_removes_meanwhile_is_no_error(self, runs, monkeypatch):
        unlink, first = os.unlink, []

        def meanwhile(path, **options):
            unlink(path, **options)
            if not first:
                first.append(path)
                raise FileNotFoundError(path)

        monkeypatch.setattr(os, "unlink", meanwhile)
        storage.remove_run(runs / "first")
        assert first
        assert [*runs.iterdir()] == []

    def test_a_removal_that_the_system_refuses_is_told(self, runs, monkeypatch, capsys):
        def refuse(path, **options):
            raise PermissionError(errno.EPERM, "Operation not permitted", path)

        monkeypatch.setattr(os, "unlink", refuse)
        assert "Operation not permitted" in says("rm first --yes", capsys, 1)
        monkeypatch.undo()
        monkeypatch.setenv("METALOOM_RUNS", str(runs))
        assert "finished the removal of" in says("rm", capsys)

    def test_a_removal_leaves_no_file_open(self, runs):
        before = os.listdir("/proc/self/fd")
        storage.remove_run(runs / "first")
        assert len(os.listdir("/proc/self/fd")) == len(before)

    def test_a_run_that_others_began_with_is_named(self, runs, tiny_config, capsys):
        from metaloom.flows.commands.train import train
        from metaloom.flows.rollouts.workers import Backend

        warm = tiny_config(iterations=1, init_from={"run": str(runs / "first"), "updates": 1})
        train(warm, runs / "warm", backend=Backend(workers=0))
        assert "warm started from its learner" in says("rm first --yes", capsys)

    def test_runs_under_a_url_are_left_to_the_tools_of_their_store(self, runs, monkeypatch, capsys):
        monkeypatch.setenv("METALOOM_CACHE", str(runs))
        assert "aws s3 rm --recursive s3://bucket/first" in says("rm s3://bucket/first --yes", capsys, 2)


@contextmanager
def somebody_else():
    """Be a user for whom modes count, who is not root."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_new_run_gets_a_name_that_is_free(tmp_path, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    monkeypatch.setattr("metaloom.flows.runs.datetime", SimpleNamespace(now=lambda: datetime(2026, 11, 22, 8, 30, 5)))
    for name in ("sac-20261122-083005", "sac-20261122-083005-2", "sac-20261122-083005-3"):
        assert new_run_name("sac") == name
        (tmp_path / name).mkdir()


def test_a_program_is_named_by_its_path_where_that_leads_into_a_home_that_nobody_else_may_read(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "executable", f"{folder}/bin/python")
        home = Path(folder, "home")
        home.mkdir()
        Path(folder, "bin").mkdir()
        Path(sys.executable).symlink_to(home / "python")
        home.chmod(0)
        try:
            with somebody_else():
                assert program("python") == "bin/python"
        finally:
            home.chmod(0o700)


class TestUnreadableRuns:
    @pytest.fixture
    def shared(self, copy_tiny_run, monkeypatch):
        """A runs folder that everybody can read, with two runs."""
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            monkeypatch.chdir(folder)
            monkeypatch.setenv("METALOOM_RUNS", str(Path(folder, "runs")))
            for name in ("good", "secret"):
                copy_tiny_run(Path(folder, "runs", name))
            yield Path(folder, "runs")

    @pytest.mark.parametrize("hidden", ["", "run.json", "_commits"])
    def test_one_line_is_about_the_run_that_cannot_be_read_and_the_others_are_listed(self, hidden, shared, capsys):
        listing = ("ls", "ls --json", "du")
        refused = ("du secret", "show secret", "verify secret", "rm secret --yes", "diff good secret", "watch secret")
        refused += ("compare *",)
        # What they import, another user may not be able to.
        for words in (*listing, *refused[:3], *refused[4:]):
            cli.run(words.split())
        assert Viewer(shared).api("runs").status_code == 200
        os.chmod(shared / "secret" / hidden, 0)
        with somebody_else():
            capsys.readouterr()
            for words in listing:
                said = says(words, capsys)
                assert "good" in said
                assert "secret" in said
                assert ("Permission denied" if words == "du" else "unreadable") in said
            for words in refused:
                said = says(words, capsys, 0 if words == "du secret" else 1)
                assert "Permission denied" in said
                assert "--repair" not in said
            page = Viewer(shared)
            rows = {row["name"]: row["state"] for row in page.api("runs").json()["runs"]}
            assert rows == {"good": "complete", "secret": "unreadable"}
            assert page.api("run", "secret").status_code == 422
        os.chmod(shared / "secret" / hidden, 0o755)
        assert storage.verify_run(shared / "secret") == []


class TestDiskUse:
    def test_sums_agree_with_the_files_and_with_what_thinning_frees(self, runs, capsys):
        use = disk_use(runs / "first")
        assert use.num_bytes == bytes_in(runs / "first")
        assert use.groups is not None
        assert use.stages is not None
        assert use.ranges is not None
        assert sum(use.groups.values()) == use.num_bytes
        assert sum(use.stages.values()) == sum(use.ranges.values())
        records = [storage.open_run(runs / "first").record(ref) for ref in storage.open_run(runs / "first").refs()]
        assert sum(use.stages.values()) == sum(record.stored_bytes for record in records)
        with storage.open_writer(runs / "first") as writer:
            assert writer.thin([0, 1, 2]).num_bytes == use.thinning
        assert disk_use(runs / "first").thinning == 0

    def test_files_that_a_fork_shares_count_once_and_are_not_freed(self, runs, capsys):
        alone = disk_use(runs / "first")
        made = fork(runs / "first", 3, runs / "second")
        told = json.loads(says("du first second --json", capsys))
        first, second = told["runs"]
        assert (first["shared"], second["shared"]) == (made.shared_bytes, made.shared_bytes)
        assert told["bytes"] == first["num_bytes"] + second["num_bytes"] - made.shared_bytes
        assert (first["num_bytes"], first["thinning"]) == (alone.num_bytes, 0)
        assert alone.thinning > 0

    def test_ranges_cover_every_iteration_once(self):
        assert in_ranges({}) == {}
        assert in_ranges({0: 1, 1: 2, 2: 4}) == {(0, 0): 1, (1, 1): 2, (2, 2): 4}
        sizes = {i: 10**i for i in range(11)}
        assert in_ranges(sizes) == {(i, i + 1): 11 * 10**i for i in range(0, 10, 2)} | {(10, 10): 10**10}

    def test_a_damaged_run_is_listed_with_its_bytes(self, runs, capsys):
        (runs / "first" / "run.json").write_text("{")
        use = disk_use(runs / "first")
        assert (use.num_bytes, use.only_remote, use.shared, use.thinning) == (bytes_in(runs / "first"), 0, 0, 0)
        assert "first" in says("du", capsys)


class TestList:
    @pytest.fixture
    def several(self, runs, copy_tiny_run):
        """Runs of the same settings: first, second (stopped), third (cannot be read)."""
        fork(runs / "first", 2, runs / "second")
        copy_tiny_run(runs / "third")
        (runs / "third" / "run.json").write_text("{}")

    def names(self, words, capsys):
        return [row["name"] for row in json.loads(says(f"ls --json {words}", capsys))]

    @pytest.mark.usefixtures("several")
    def test_filters_and_orders(self, capsys):
        yesterday = (datetime.now() - timedelta(days=1)).strftime("%Y-%m-%d")  # the runs may be from before midnight
        tomorrow = (datetime.now(UTC) + timedelta(days=2)).strftime("%Y-%m-%dT%H:%M")
        expected = {
            "": ["second", "first", "third"],
            "--reverse": ["third", "first", "second"],
            "--sort name": ["first", "second", "third"],
            "--sort name --reverse --limit 2": ["third", "second"],
            "--status stopped": ["second"],
            "--status complete": ["first"],
            "--status damaged": ["third"],
            "--algorithm promp --sort name": ["first", "second"],
            "--algorithm pearl": [],
            "--env point-corner --limit 1": ["second"],
            "--env ant-dir": [],
            "--since 1d --sort name": ["first", "second"],
            f"--since {yesterday} --sort name": ["first", "second"],
            f"--since {tomorrow}": [],
        }
        assert {words: self.names(words, capsys) for words in expected} == expected

    @pytest.mark.usefixtures("several")
    def test_the_highest_return_and_the_largest_come_first(self, capsys):
        rows = json.loads(says("ls --json --sort return", capsys))
        returns = [row.get("last_return") for row in rows]
        assert returns[2] is None
        assert returns[:2] == sorted(returns[:2], reverse=True)
        sizes = [row["bytes"] for row in json.loads(says("ls --json --sort size", capsys))]
        assert sizes == sorted(sizes, reverse=True)

    def test_a_span_counts_back_from_now(self):
        now = datetime.now(UTC)
        spans = {"90m": timedelta(minutes=90), "12h": timedelta(hours=12), "3d": timedelta(3), "2w": timedelta(14)}
        for text, span in spans.items():
            assert abs(now - _moment(text) - span) < timedelta(seconds=9)
        assert _moment("2026-11-22T08:30+02:00") == datetime(2026, 11, 22, 6, 30, tzinfo=UTC)

    def test_nothing_found_is_told_and_a_wrong_moment_refused(self, runs, capsys):
        assert says("ls --env ant-dir", capsys) == f"none of 1 runs in {runs} matches\n"
        assert "expected a span such as 30m" in says("ls --since yesterday", capsys, 2)

    def test_what_is_no_terminal_gets_plain_characters(self, runs, capsys):
        for words in ("ls", "show first", "show first@0", "du first", "--help", "watch first", "logs first"):
            assert says(words, capsys).isascii(), words
