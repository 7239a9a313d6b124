"""Watching, cancelling and reading the log of a run that another process trains."""

import io
import json
import logging
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

import metaloom
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands import train as training
from metaloom.flows.errors import EXIT_INTERRUPTED, UsageError
from metaloom.flows.formatting import size
from metaloom.flows.operations.cancel import ask_to_stop, wait_for_end
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.run_log import LEVELS, LogReader, kept_log
from metaloom.flows.views.watching import Watch, WatchPanel, watch_run
from metaloom.storage.write.holder import owner_document

pytestmark = pytest.mark.usefixtures("warm")

SERIAL = Backend(workers=0)
LONG = ("--set", "iterations=100000", "--set", "num_tasks=2", "--set", "episodes_per_task=2", "--set",
        "max_episode_steps=4", "--set", "policy.hidden_sizes=[4]")  # fmt: skip


def lines(path):
    return LogReader(path).new_lines()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_config):
    """A run that is complete; not to be changed."""
    path = tmp_path_factory.mktemp("complete") / "run"
    training.train(tiny_config(), path, backend=SERIAL)
    return path


@pytest.fixture
def trainer(tmp_path):
    """Another process that trains a run that does not end by itself, once its first iteration is complete."""
    path = tmp_path / "run"
    command = [sys.executable, "-m", "metaloom.flows.cli", "train", "promp-point-corner", "--run", str(path)]
    process = subprocess.Popen(
        [*command, "--workers", "0", *LONG], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("iteration 0"), process.stdout.read()
    yield process, path
    process.kill()
    process.communicate()


class TestAnotherProcess:
    def test_cancel_stops_it_behind_a_whole_stage_as_ctrl_c_does_and_tells(self, trainer, capsys):
        process, path = trainer
        watched, watch = io.StringIO(), Watch(path)
        watch.look()
        assert watch.writer is not None
        assert (watch.writer.pid, watch.workers) == (process.pid, "this process, 1 physics thread")
        assert watch.stage is not None
        assert watch.stage[0].stage in [stage.name for stage in watch.run.stages.stages]
        assert cli.run(["cancel", str(path)]) == 0
        told = capsys.readouterr().out
        assert f"asked process {process.pid} on {socket.gethostname()}" in told
        assert process.wait() == EXIT_INTERRUPTED
        done = len(storage.open_run(path).iterations)
        assert f"stopped after {done} of 100,000 iterations; continue with: metaloom resume {path}" in told
        assert "stops at the request of `metaloom cancel`" in [line.message for line in lines(path)]
        assert [*(path / "_operator").glob("stop-*")] == []
        assert storage.verify_run(path) == []
        assert watch_run(path, mode="plain", out=watched, wait=time.sleep).how == "stopped"
        assert watched.getvalue().startswith(f"iteration {done - 1} ({done} of 100000)")
        assert len(watched.getvalue().splitlines()) == 1

    def test_watch_shows_a_line_for_each_iteration_until_it_is_killed(self, trainer):
        process, path = trainer
        out = io.StringIO()

        def wait(seconds):
            time.sleep(seconds / 10)
            if len(out.getvalue().splitlines()) >= 3:
                process.kill()
                process.wait()

        ending = watch_run(path, mode="json", out=out, wait=wait)
        assert (ending.how, ending.went_well) == ("killed", False)
        found = [json.loads(line)["iteration"] for line in out.getvalue().splitlines()]
        assert found == [*range(found[0], found[0] + len(found))]
        assert len(found) >= 3
        assert cli.run(["cancel", str(path)]) == 0  # nobody writes it

    def test_the_panel_is_drawn_in_a_terminal_and_ctrl_c_leaves_the_run_alone(self, trainer):
        process, path = trainer
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(
                sys.executable,
                [sys.executable, "-m", "metaloom.flows.cli", "watch", str(path)],
                {**os.environ, "TERM": "xterm", "COLUMNS": "100"},
            )
        screen = b""
        while not all(word in screen for word in (b"iteration", b"return", b"disk", b"writer", b"workers")):
            screen += os.read(terminal, 4096)
        os.write(terminal, b"\x03")
        status = None
        while status is None:
            try:
                screen += os.read(terminal, 4096)
            except OSError:  # the terminal is closed
                status = os.waitpid(pid, 0)[1]
        os.close(terminal)
        assert os.waitstatus_to_exitcode(status) == 0
        assert b"this process, 1 physics thread" in screen
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait() == EXIT_INTERRUPTED
        assert "stops at the request of this process" in [line.message for line in lines(path)]


class TestWriter:
    def test_a_process_that_got_the_number_of_a_dead_writer_is_not_taken_for_it(self, tmp_path, tiny_config, trained):
        owner = owner_document("0" * 16)
        (tmp_path / "writer.lock").write_text(json.dumps(owner))
        assert storage.current_writer(tmp_path) is not None
        (tmp_path / "writer.lock").write_text(json.dumps(owner | {"process_started": owner["process_started"] - 1}))
        assert storage.current_writer(tmp_path) is None

    def test_after_a_reboot_a_process_of_the_same_number_and_moment_is_not_taken_for_the_dead_writer(self, tmp_path):
        owner = owner_document("0" * 16)
        (tmp_path / "writer.lock").write_text(json.dumps(owner | {"boot": "00000000-0000-0000-0000-000000000000"}))
        assert storage.current_writer(tmp_path) is None
        (tmp_path / "writer.lock").write_text(json.dumps({n: v for n, v in owner.items() if n != "boot"}))
        assert storage.current_writer(tmp_path) is not None  # of an earlier version, which did not say

    def test_a_run_whose_writer_was_killed_is_told_from_one_that_is_written_stopped_or_complete(
        self, copy_tiny_run, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
        path = copy_tiny_run(tmp_path / "run")

        def state():
            assert cli.run(["ls", "--json"]) == 0
            (row,) = json.loads(capsys.readouterr().out)
            assert cli.run(["ls", "--json", "--status", row["state"]]) == 0
            assert len(json.loads(capsys.readouterr().out)) == 1
            return row["state"]

        assert state() == "complete"
        (path / "_commits" / "00000000.meta_optimize.0.json").unlink()
        assert state() == "stopped"
        pid = os.fork()
        if pid == 0:
            storage.open_writer(path)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert state() == "killed"
        # Another process has the number of the killed one by now, here and after a reboot.
        owner = json.loads((path / "writer.lock").read_text())
        here = owner_document(owner["token"])
        for reused in (
            {"pid": os.getpid()},
            {"pid": os.getpid(), "process_started": here["process_started"], "boot": "an earlier one"},
        ):
            (path / "writer.lock").write_text(json.dumps(owner | reused))
            assert state() == "killed"
        with storage.open_writer(path):
            assert state() == "training"
        assert state() == "stopped"

    def test_a_zombie_is_not_writing(self, tmp_path):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        (tmp_path / "writer.lock").write_text(json.dumps({**owner_document("0" * 16), "pid": pid}))
        try:
            assert storage.current_writer(tmp_path) is None
        finally:
            os.waitpid(pid, 0)

    def test_a_writer_of_an_earlier_version_is_named_with_what_stops_it(self, copy_tiny_run, tmp_path):
        path = copy_tiny_run(tmp_path / "run")
        owner = {name: value for name, value in owner_document("0" * 16).items() if name != "process_started"}
        (path / "writer.lock").write_text(json.dumps(owner))
        with pytest.raises(UsageError, match=f"kill -INT {os.getpid()}"):
            ask_to_stop(path)

    def test_a_request_is_for_one_session_alone(self, copy_tiny_run, tmp_path):
        path = copy_tiny_run(tmp_path / "run")
        with storage.open_writer(path) as writer:
            asked = ask_to_stop(path)
            assert asked is not None
            assert writer.is_asked_to_stop()
        wait_for_end(path, asked, wait=lambda seconds: pytest.fail("nobody writes it any more"))
        with storage.open_writer(path) as writer:
            assert not writer.is_asked_to_stop()
            ask_to_stop(path)
            assert len([*(path / "_operator").glob("stop-*")]) == 1  # the earlier one is gone

    def test_the_folder_of_requests_is_not_followed_where_it_is_a_link(self, copy_tiny_run, tmp_path):
        path = copy_tiny_run(tmp_path / "run")
        shutil.rmtree(path / "_operator")
        (tmp_path / "elsewhere").mkdir()
        (path / "_operator").symlink_to(tmp_path / "elsewhere")
        with storage.open_writer(path), pytest.raises(storage.DamagedRun, match="symbolic link"):
            ask_to_stop(path)
        assert [*(tmp_path / "elsewhere").iterdir()] == []


def test_the_panel_has_rows_for_what_is_known_of_a_run(copy_tiny_run, tmp_path):
    path = copy_tiny_run(tmp_path / "run")
    watch = Watch(path)
    panel = WatchPanel(watch)
    panel.update(watch.look())
    rows = dict(panel.rows())
    assert [*rows] == ["run", "iteration", "return", "by class", "speed", "disk"]
    assert rows["disk"] == size(watch.run.files.num_bytes())
    (path / "_commits" / "00000002.meta_optimize.0.json").unlink()
    (path / "_operator" / "log.jsonl").unlink()
    watch = Watch(path)
    with storage.open_writer(path), (path / "_operator" / "log.jsonl").open("w") as log:
        warning = {"time": "2026-01-02T03:04:05.678", "level": "warning", "message": "HOT\nmore"}
        log.write(json.dumps(warning) + "\n")
        log.flush()
        panel = WatchPanel(watch)
        panel.update(watch.look())
        rows, held = dict(panel.rows()), watch.num_bytes
        before = ["run", "iteration", "return", "by class", "speed", "time"]
        assert [*rows] == [*before, "stage", "writer", "workers", "disk", "warning"]
        assert rows["stage"] == "process_samples k=1 is stored"
        assert str(rows["workers"]) == "unknown: the log is not here"
        assert str(rows["warning"]) == "03:04:05 HOT"
        log.write("x" * 1000 + "\n")
    watch.look()
    assert watch.num_bytes == watch.run.files.num_bytes() != held


class TestLog:
    def test_it_has_sessions_iterations_stages_warnings_and_other_loggers(self, tmp_path, tiny_config, capsys):
        path, own = tmp_path / "run", logging.getLogger("my_envs")

        def say(report):
            own.warning("\x1b[2J%s is hot", "motor")
            warnings.warn("deprecated\x07", stacklevel=1)
            own.error("torn", exc_info=ValueError("because"))
            own.error("last")

        with pytest.warns(UserWarning, match="deprecated"):
            training.train(
                tiny_config(iterations=1), path, backend=SERIAL, observer=training.Observer(iteration_done=say)
            )
        found = lines(path)
        first = found[0]
        assert first.fields | {"time": ""} == {
            "time": "", "level": "info", "run": "run", "session": 0, "logger": "metaloom.trainer",
            "message": "session 0 begins; rollouts in this process, 1 physics thread",
            "workers": "this process, 1 physics thread",
        }  # fmt: skip
        by_level = {level: [line for line in found if line.level == level] for level in LEVELS}
        run = storage.open_run(path)
        assert [line.ref for line in by_level["debug"]] == sorted(run.refs(), key=lambda ref: run.record(ref).sequence)
        assert [line.message.split(" (")[0] for line in by_level["warning"]] == [
            "\N{REPLACEMENT CHARACTER}[2Jmotor is hot",
            "UserWarning: deprecated\N{REPLACEMENT CHARACTER}",
        ]
        assert by_level["error"][0].message == "torn\nValueError: because"
        assert "iteration 0 (1 of 1) done" in [line.message for line in by_level["info"]]
        assert by_level["error"][0].ref == run.last_ref(0)
        assert storage.verify_run(path) == []
        watch = Watch(path)
        watch.look()
        assert [*watch.warnings] == [line for line in found if line.level in ("warning", "error")][1:]
        assert len(watch.warnings) == 3
        capsys.readouterr()
        assert cli.run(["logs", str(path), "--level", "warning"]) == 0
        assert (
            capsys.readouterr()
            .out.splitlines()[0]
            .endswith("warning 0 meta_optimize k=0  \N{REPLACEMENT CHARACTER}[2Jmotor is hot")
        )

    def test_what_ends_a_run_is_there_before_its_writer_is_gone(self, tmp_path, tiny_config):
        path = tmp_path / "run"

        def fail(report):
            raise RuntimeError("power")

        with pytest.raises(RuntimeError):
            training.train(tiny_config(), path, backend=SERIAL, observer=training.Observer(iteration_done=fail))
        (error,) = (line for line in lines(path) if line.level == "error")
        assert error.message == "ends with RuntimeError: power"
        with (tmp_path / "watched").open("w") as out:
            ending = watch_run(path, mode="plain", out=out, wait=time.sleep)
            assert (tmp_path / "watched").read_text().startswith("iteration 0 (1 of 3)")  # by now
        assert (ending.how, ending.went_well) == ("failed", False)
        assert "failed after 1 of 3 iterations: ends with RuntimeError: power; continue with: " in ending.message

    def test_a_line_that_a_kill_tore_is_left_out_and_the_next_session_begins_a_new_one(self, copy_tiny_run, tmp_path):
        path = copy_tiny_run(tmp_path / "run")
        with (path / "_operator" / "log.jsonl").open("a") as file:
            file.write('{"time": "2026')
        before = lines(path)
        training.resume(path, iterations=4, backend=SERIAL)
        after = lines(path)
        assert after[: len(before)] == before
        assert after[len(before)].message.startswith("session 1 begins")

    def test_it_stays_within_its_bounds_and_a_reader_misses_nothing(self, copy_tiny_run, tmp_path, monkeypatch):
        path = copy_tiny_run(tmp_path / "run")
        monkeypatch.setattr("metaloom.flows.run_log.MOST_BYTES", 2000)
        reader = LogReader(path)
        count = before = len(reader.new_lines())
        with kept_log() as log, storage.open_writer(path) as writer, log.of(writer, "x"):
            for n in range(10):
                log.log_event(logging.INFO, f"{n} {'x' * 500}")
                count += len(reader.new_lines())
            for n in range(20):
                log.log_event(logging.INFO, f"{n:02}{'y' * 20_000}")
        assert count == before + 11
        assert [line.message for line in lines(path)] == [f"{n}{'y' * 9_998}" for n in range(15, 20)]
        sizes = [file.stat().st_size for file in (path / "_operator").glob("log.jsonl*")]
        assert len(sizes) == 5
        assert max(sizes) < 11_000  # a file that holds but one message, which is cut

    def test_it_begins_with_the_newest_lines_of_before_it_had_a_run(self, copy_tiny_run, tmp_path):
        path = copy_tiny_run(tmp_path / "run")
        before = len(lines(path))
        with kept_log() as log:
            for n in range(102):
                logging.getLogger("early").warning("line %d: \N{DEGREE SIGN}C", n)
            with storage.open_writer(path) as writer, log.of(writer, "x"):
                pass
        found = [line.message for line in lines(path)[before : before + 100]]
        assert found == [f"line {n}: \N{DEGREE SIGN}C" for n in range(2, 102)]
        assert lines(path)[before + 100].message.startswith("session 1 begins")
        raw = (path / "_operator" / "log.jsonl").read_text("utf-8")
        assert (found[0] in raw, "\n\n" in raw) == (True, False)

    def test_of_libraries_that_log_every_connection_it_has_warnings_alone(self, copy_tiny_run, tmp_path):
        path = copy_tiny_run(tmp_path / "run")
        before, level = len(lines(path)), logging.getLogger().level
        with kept_log() as log, storage.open_writer(path) as writer, log.of(writer, "x"):
            assert logging.getLogger().level == level  # that of who has configured logging
            for name in ("distributed.core", "own"):
                for number in (logging.INFO, logging.WARNING):
                    log.emit(logging.LogRecord(name, number, "", 0, f"{name} {number}", None, None))
        assert [line.message for line in lines(path)[before + 1 :]] == ["distributed.core 30", "own 20", "own 30"]

    def test_a_log_that_cannot_be_written_stops_nothing(self, tmp_path, tiny_config, caplog):
        path = tmp_path / "run"
        training.train(tiny_config(iterations=1), path, backend=SERIAL)
        for file in (path / "_operator").iterdir():
            file.unlink()
        (path / "_operator").rmdir()
        (path / "_operator").write_text("a file")
        training.resume(path, iterations=2, backend=SERIAL)
        assert "cannot write a log" in caplog.text
        assert len(storage.open_run(path).iterations) == 2

    def test_a_log_that_is_a_link_is_not_written(self, copy_tiny_run, tmp_path, caplog):
        path = copy_tiny_run(tmp_path / "run")
        place = path / "_operator" / "log.jsonl"
        before = place.rename(tmp_path / "elsewhere").read_text()
        place.symlink_to(tmp_path / "elsewhere")
        with kept_log() as log, storage.open_writer(path) as writer, log.of(writer, "x"):
            pass
        assert f"{place} is a symbolic link" in caplog.text
        assert (tmp_path / "elsewhere").read_text() == before

    def test_warnings_reach_the_console_of_who_has_configured_no_logging(self, tmp_path):
        code = (
            "import logging, metaloom\nfrom metaloom.flows.run_log import kept_log\n"
            "with kept_log(), kept_log():\n"
            "    logging.getLogger('a.b').warning('seen')\n    logging.getLogger('a').info('quiet')\n"
            "    print(logging.getLevelName(logging.getLogger().level))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert (done.stderr, done.stdout, done.returncode) == ("seen\n", "INFO\n", 0)


def test_a_run_on_dask_workers_logs_what_its_environments_say(tmp_path, monkeypatch):
    (tmp_path / "noisy_env.py").write_text(
        "import logging\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Noisy(CartPoleEnv):\n"
        "    def reset(self, **options):\n"
        "        logging.getLogger('noisy').warning('reset')\n        return super().reset(**options)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    small = ("--set", "env=noisy_env:Noisy", "--set", "iterations=1", "--set", "min_steps=10",
             "--set", "episodes_per_task=2", "--set", "max_episode_steps=5")  # fmt: skip
    assert cli.run(["train", "ppo", "--run", str(tmp_path / "run"), "--workers", "1", *small]) == 0
    assert ("warning", "noisy", "reset") in {
        (line.level, line.fields["logger"], line.message) for line in lines(tmp_path / "run")
    }


def test_a_complete_run_is_told_at_once(trained, tmp_path, capsys):
    with (tmp_path / "told").open("w") as out:
        assert watch_run(trained, mode="plain", out=out, wait=time.sleep).how == "complete"
        assert (tmp_path / "told").read_text().startswith("iteration 2 (3 of 3)")
    assert cli.run(["watch", str(trained)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("iteration 2 (3 of 3)")
    assert told[-1] == "complete: 3 of 3 iterations"
    assert cli.run(["cancel", str(trained)]) == 0
    assert capsys.readouterr().out == "no process is writing it: complete: 3 of 3 iterations\n"


def test_what_is_watched_of_the_store_agrees_with_what_the_trainer_told(tmp_path, tiny_config):
    told: list[training.IterationReport] = []
    config = tiny_config(evaluation={"every": 1, "num_tasks": 2, "episodes": 2, "test_episodes": 1})
    training.train(config, tmp_path / "run", backend=SERIAL, observer=training.Observer(iteration_done=told.append))
    seen = Watch(tmp_path / "run").look()
    assert [(r.iteration, r.iterations, dict(r.metrics), [*r.evaluation_returns]) for r in seen] == [
        (r.iteration, r.iterations, dict(r.metrics), [*r.evaluation_returns]) for r in told
    ]


def test_the_speed_that_is_watched_counts_the_time_between_the_stages_and_not_that_of_evaluating(
    tmp_path, tiny_config, monkeypatch
):
    config = tiny_config(evaluation={"every": 1, "num_tasks": 2, "episodes": 2, "test_episodes": 1})
    training.train(config, tmp_path / "run", backend=SERIAL)
    run, record = storage.open_run(tmp_path / "run"), storage.Run.record

    def timed(run, ref):  # a stage begins every 100 ms and takes 10 ms
        found = record(run, ref)
        return replace(found, started=f"2026-01-01T00:00:{found.sequence / 10:06.3f}Z", seconds=0.01)

    monkeypatch.setattr(storage.Run, "record", timed)
    for i, report in enumerate(Watch(tmp_path / "run").look()):
        assert set(report.stage_seconds.values()) == {0.01}
        num_stages = len(report.stage_seconds)
        assert report.elapsed_seconds == pytest.approx(0.1 * ((i + 1) * num_stages - 1) + 0.01, abs=1e-5)
        num_steps = sum(run.episodes(i)["length"].to_pylist())
        assert report.steps_per_second == pytest.approx(num_steps / (0.1 * (num_stages - 1)), rel=1e-4)
    monkeypatch.setattr(storage.Run, "record", lambda *of: replace(record(*of), started="never", seconds=0.0))
    assert {(r.elapsed_seconds, r.steps_per_second) for r in Watch(tmp_path / "run").look()} == {(0.0, None)}


def test_ctrl_c_while_waiting_leaves_the_request(copy_tiny_run, tmp_path, monkeypatch, capsys):
    path = copy_tiny_run(tmp_path / "run")

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    with storage.open_writer(path) as writer:
        assert cli.run(["cancel", str(path)]) == 0
        assert writer.is_asked_to_stop()
    assert "the request stands" in capsys.readouterr().out


def test_a_run_that_another_process_continues_at_once_was_stopped_all_the_same(copy_tiny_run, tmp_path, monkeypatch):
    path = copy_tiny_run(tmp_path / "run")
    waited = []
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(storage.open_writer(path))

        def taken_over(seconds):
            waited.append(seconds)
            first.close()
            second.enter_context(storage.open_writer(path))

        monkeypatch.setattr(time, "sleep", taken_over)
        done = metaloom.cancel(path)
        assert len(waited) == 1
        assert (done.went_well, str(done)) == (
            True,
            f"it stopped; {storage.current_writer(path)} has since continued the run",
        )


def test_a_writer_that_is_stopped_is_told_of_with_what_helps(copy_tiny_run, tmp_path, monkeypatch, capsys):
    path = copy_tiny_run(tmp_path / "run")
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            owner = owner_document("0" * 16)
            (path / "writer.lock").write_text(json.dumps({**owner, "pid": process.pid, "process_started": None}))
            monkeypatch.setattr(time, "sleep", lambda seconds: process.kill())
            cli.run(["cancel", str(path)])
        finally:
            process.kill()
    assert f"`kill -CONT {process.pid}` lets it continue, `kill -9 {process.pid}` ends it" in capsys.readouterr().out


def test_a_writer_on_another_machine_that_shares_the_folder_is_asked(copy_tiny_run, tmp_path, monkeypatch):
    path: Path = copy_tiny_run(tmp_path / "run")
    (path / "writer.lock").write_text(json.dumps({**owner_document("a" * 16), "host": "elsewhere.example"}))
    assert str(ask_to_stop(path)).startswith(f"process {os.getpid()} on elsewhere.example")
    assert (path / "_operator" / f"stop-{'a' * 16}").exists()
    monkeypatch.setenv("METALOOM_CACHE", str(tmp_path))
    monkeypatch.setattr("metaloom.storage.url_of", lambda folder: "s3://bucket/run")
    with pytest.raises(UsageError, match=r"Run `metaloom cancel .*` on elsewhere\.example"):
        ask_to_stop(path)
