"""A training that is told to end, or loses its console: everything committed stays, and the run has the same bits."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import metaloom.flows.commands.train
import metaloom.flows.interrupt
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.cli.output import EXIT_OUTPUT_CLOSED
from metaloom.flows.commands.train import Observer, resume, train
from metaloom.flows.errors import EXIT_INTERRUPTED
from metaloom.flows.interrupt import StageAbandoned, abandonable, stop_on_interrupt
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.envs.config import EnvConfig

pytestmark = pytest.mark.usefixtures("warm")

HERE = Backend(workers=0)
SLOW_ONCE = """
import hashlib, os, time
from hostile_envs import Hostile

class SlowOnce(Hostile):
    def reset(self, **options):
        if not os.path.exists(self.mark):
            open(self.mark, "w").close()
            time.sleep(600)
        return super().reset(**options)

class Unending(Hostile):
    def reset(self, **options):
        while True:  # without a moment in which Python could run the handler of a signal
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@pytest.fixture
def slow_once(tiny_config, tmp_path, monkeypatch):
    """A run whose first rollouts hardly come to an end, but only once."""
    (tmp_path / "interrupted_env.py").write_text(SLOW_ONCE)
    for path in (str(Path(__file__).parents[1] / "hostile"), str(tmp_path)):
        monkeypatch.syspath_prepend(path)
    monkeypatch.delitem(sys.modules, "interrupted_env", raising=False)
    monkeypatch.setattr(metaloom.flows.interrupt, "STAGE_SECONDS", 0.5)
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores, as our handlers then do
    # Its rollouts are to be slow, not its rehearsal.
    env = {"name": "interrupted_env:SlowOnce", "options": {"mark": str(tmp_path / "slept")}, "copies": "kept"}
    yield tiny_config(env=env, num_tasks=2, iterations=2)
    signal.signal(signal.SIGHUP, hang_up)


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGHUP, 0),
        pytest.param(signal.SIGTERM, 1, marks=[pytest.mark.dask, pytest.mark.slow]),
    ],
)
def test_a_stage_that_takes_too_long_is_abandoned_and_resumed_with_the_same_bits(
    number, workers, slow_once, tmp_path, digests
):
    def ask_to_end():
        while not (tmp_path / "slept").exists():
            pass
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask_to_end)
    with stop_on_interrupt(str) as should_stop:
        asking.start()
        result = train(
            slow_once, tmp_path / "run", backend=Backend(workers=workers), observer=Observer(should_stop=should_stop)
        )
    asking.join()
    assert (result.stopped, result.iterations_done) == (True, 0)
    assert "sample_tasks" in {ref.stage for ref in storage.open_run(tmp_path / "run").refs()}
    assert storage.verify_run(tmp_path / "run") == []
    resume(tmp_path / "run", backend=HERE)
    train(slow_once, tmp_path / "whole", backend=HERE)
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")


def test_a_run_that_is_complete_when_it_is_told_to_end_leaves_its_report_to_the_next_command(
    command, tmp_path, monkeypatch, capsys
):
    def told_to_end(*args, observer, **options):
        result = train(*args, observer=observer, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        while not observer.should_stop():
            pass
        return result

    monkeypatch.setattr(metaloom.flows.commands.train, "train", told_to_end)
    assert cli.run(command[3:]) == 0
    assert f"complete; for its report: metaloom report {tmp_path}/runs/run" in capsys.readouterr().out
    assert len(storage.open_run(tmp_path / "runs" / "run").iterations) == 3
    assert not (tmp_path / "runs" / "reports").exists()


def test_ctrl_c_lets_the_stage_end_and_other_signals_give_it_ten_seconds(monkeypatch, capfd):
    @abandonable()
    def work():
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            pass

    asked = {
        signal.SIGINT: "press Ctrl-C again to stop at once",
        signal.SIGTERM: "after 10 s it is abandoned, and computed again by `metaloom resume`",
    }
    for number, how in asked.items():
        with stop_on_interrupt(str) as should_stop:
            os.kill(os.getpid(), number)
            while not should_stop():
                pass
            assert (0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 10) == (number != signal.SIGINT)
        assert capfd.readouterr().err == f"\nfinishing the current stage; {how}\n"
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    monkeypatch.setattr(metaloom.flows.interrupt, "STAGE_SECONDS", 0.01)
    with stop_on_interrupt(str):
        with pytest.raises(StageAbandoned):
            work()
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)  # it is abandoned once
    with stop_on_interrupt(str):
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + 0.05
        while time.monotonic() < until:  # what is not in such a block goes on
            pass


def test_hang_ups_are_ignored_under_nohup(monkeypatch):
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_interrupt(str) as should_stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not should_stop()
    finally:
        signal.signal(signal.SIGHUP, ignored)


@pytest.fixture
def command(tiny_config, tmp_path, monkeypatch):
    """A short training from the command line; its runs and reports are kept in a folder of the test."""
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    settings = tmp_path / "settings.json"
    settings.write_text(tiny_config(iterations=3).model_dump_json())
    return [sys.executable, "-m", "metaloom.flows.cli", "train", str(settings), "--run", "run", "--workers", "0"]


def done(runs: Path) -> bool:
    return len(storage.open_run(runs / "run").iterations) == 3 and any(runs.rglob("learning_curve.png"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize(
    ("redirection", "told"),
    [
        (">/dev/full", "metaloom: standard output cannot be written: No space left on device\n"),
        pytest.param(
            "--json >&-", "metaloom: standard output cannot be written: Bad file descriptor\n", marks=pytest.mark.slow
        ),
        pytest.param(">/dev/full 2>&-", "", marks=pytest.mark.sweep),
    ],
)
def test_output_that_cannot_be_written_costs_no_iteration_and_is_reported_once(redirection, told, command, tmp_path):
    shell = ["sh", "-c", f'"$@" {redirection}', "sh", *command]
    ended = subprocess.run(shell, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr.count("cannot be written")) == (0, bool(told))
    assert told in ended.stderr
    assert done(tmp_path / "runs")


def test_a_closed_stream_is_replaced_before_a_file_gets_its_number():
    code = (
        "import os\nfrom metaloom.flows.streams import keep_streams\nfound = []\n"
        "for number in (0, 1, 2):\n"
        "    os.close(number)\n    keep_streams()\n    found.append(os.readlink(f'/proc/self/fd/{number}'))\n"
        "assert found == ['/dev/null'] * 3"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_command_whose_answer_cannot_be_written_fails(command, tmp_path):
    shell = ["sh", "-c", '"$@" >/dev/full', "sh", *command[:3], "recipes"]
    ended = subprocess.run(shell, stderr=subprocess.PIPE, text=True)
    assert ended.stderr == "metaloom: standard output cannot be written: No space left on device\n"
    assert ended.returncode == EXIT_OUTPUT_CLOSED


def test_a_thread_of_a_plug_in_that_keeps_a_finished_command_from_ending_is_named():
    polling = "from threading import Event, Thread; Thread(target=Event().wait, args=[40], name='poller').start(); "
    command = [sys.executable, "-c", f"{polling} from metaloom.flows.cli import main; main()", "recipes"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = "metaloom: done, but these threads are still running: poller; Ctrl-C ends them\n"
        assert said in iter(process.stderr.readline, "")
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0


def read_until(end: int, words: bytes | None) -> bytes:
    """What a terminal shows up to some words; to the end, when its last process has gone, if there are none."""
    screen = b""
    while words is None or words not in screen:
        try:
            screen += os.read(end, 4096)
        except OSError:
            assert words is None, screen
            break
    return screen


@pytest.mark.parametrize("terminal", ["xterm", pytest.param("dumb", marks=pytest.mark.sweep)])
def test_a_terminal_that_goes_away_costs_no_iteration(terminal, command, tmp_path):
    pid, end = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.execve(command[0], command, {**os.environ, "TERM": terminal})
    read_until(end, b"iteration")
    os.close(end)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert done(tmp_path / "runs")


AT_ONCE = (
    "import sys; from metaloom.flows import cli, interrupt; "
    "interrupt.STAGE_SECONDS, interrupt._CLOSING_SECONDS = 1.0, 0.5; sys.exit(cli.run(sys.argv[1:]))"
)


@pytest.mark.parametrize(
    ("numbers", "workers"),
    [
        ((signal.SIGINT, signal.SIGINT), 0),
        ((signal.SIGTERM,), 0),
        pytest.param((signal.SIGINT, signal.SIGINT), 1, marks=[pytest.mark.dask, pytest.mark.slow]),
    ],
)
def test_the_panel_shows_the_request_and_an_end_at_once_leaves_a_cursor_and_how_to_go_on(
    numbers, workers, slow_once, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    env = {"name": "interrupted_env:Unending", "copies": "kept", "action_scale": 1.0, "witness": False}
    run, settings = tmp_path / "my run", tmp_path / "settings.json"
    settings.write_text(slow_once.model_copy(update={"env": EnvConfig.model_validate(env)}).model_dump_json())
    command = [sys.executable, "-c", AT_ONCE, "train", str(settings), "--run", str(run), "--workers", str(workers)]
    pid, end = pty.fork()
    if pid == 0:
        os.execve(command[0], command, {**os.environ, "TERM": "xterm", "COLUMNS": "300"})
    screen = read_until(end, b"collect_rollouts")
    os.kill(pid, numbers[0])
    screen += read_until(end, b"stopping after this stage; ")
    for number in numbers[1:]:
        os.kill(pid, number)
    screen += read_until(end, None)
    os.close(end)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_INTERRUPTED
    shown = screen.decode()
    how = "press Ctrl-C again to stop at once" if numbers[0] == signal.SIGINT else "after 1 s it is abandoned"
    assert how in shown
    assert "finishing the current stage" not in shown
    assert shown.endswith(f"\x1b[?25h\r\nstopped at once; continue with: metaloom resume {storage.argument(run)}\r\n")
    assert storage.verify_run(run) == []
