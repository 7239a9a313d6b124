import io
import json
import math
import re
import sys
import threading
from collections import deque
from dataclasses import replace

import pytest
from rich.console import Console

from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.train import train
from metaloom.flows.interrupt import Stop
from metaloom.flows.observer import IterationReport
from metaloom.flows.results.sweep import RunOutcome, SweepObserver
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.sweeps.stored import PlannedRun
from metaloom.flows.views import status
from metaloom.flows.views.progress import TrainingPanel, progress, sparkline, sweep_progress
from metaloom.storage import StageRef


class Terminal(io.StringIO):
    def isatty(self):
        return True


def report(iteration: int, *, before: float = -20.0, after: float = -9.5, elapsed: float = 4.0) -> IterationReport:
    return IterationReport(
        iteration=iteration,
        iterations=20,
        metrics={
            "step_0.average_return": before,
            "step_1.average_return": after,
            "env_steps": 160_000.0 * (iteration + 1),
        },
        stage_seconds={"collect_rollouts.0": 2.0},
        elapsed_seconds=elapsed,
        steps_per_second=39_200.0,
    )


def shown(panel: TrainingPanel) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(panel)
    return out.getvalue()


@pytest.mark.parametrize("mode", ["auto", "plain"])
def test_a_file_gets_one_line_per_iteration(mode):
    out = io.StringIO()
    with progress(mode, out=out) as observer:
        observer.stage_started(StageRef(2, "adapt"))
        observer.iteration_done(report(2, elapsed=4.0))
        observer.iteration_done(report(3, elapsed=10.0))
    assert out.getvalue().splitlines() == [
        "iteration 2 (3 of 20)  return before -20  after -9.5  39.2 k steps/s  4.00 s  0:01:08 left",
        "iteration 3 (4 of 20)  return before -20  after -9.5  39.2 k steps/s  6.00 s  0:01:20 left",
    ]


def test_json_is_one_object_per_line_with_null_for_what_is_no_number():
    out = Terminal()
    with progress("json", out=out) as observer:
        observer.iteration_done(report(0, after=math.nan))
        observer.iteration_done(report(1))
    first, second = [json.loads(line) for line in out.getvalue().splitlines()]
    assert first["metrics"]["step_1.average_return"] is None
    assert (second["iteration"], second["iterations"], second["steps_per_second"]) == (1, 20, 39_200.0)
    assert second["stage_seconds"] == {"collect_rollouts.0": 2.0}


def test_an_evaluation_is_shown_in_lines_json_and_the_panel():
    evaluated = replace(report(9), evaluation_returns=(-20.5, -8.25))
    for mode, found in (("plain", "evaluation 0: -20.50  1: -8.25"), ("json", '"evaluation_returns": [-20.5, -8.25]')):
        out = io.StringIO()
        with progress(mode, out=out) as observer:
            observer.iteration_done(evaluated)
        assert found in out.getvalue()
    panel = TrainingPanel(clock=lambda: 0.0)
    panel.iteration_done(evaluated)
    panel.iteration_done(report(10))
    assert "0: −20.50  1: −8.25   after 10 updates" in shown(panel)


def test_lines_are_readable_before_the_context_ends(tmp_path):
    with (tmp_path / "log").open("w") as out, progress("plain", out=out) as observer:
        observer.iteration_done(report(0))
        assert (tmp_path / "log").read_text().startswith("iteration 0 (1 of 20)")


RUNS = [PlannedRun(name, {}, 1, "") for name in ("lr=1", "lr=2")]


def work_on(observer: SweepObserver) -> None:
    """Complete the first run and let the second one fail."""
    for run, outcome in zip(
        RUNS, (RunOutcome(RUNS[0], "complete"), RunOutcome(RUNS[1], "failed", "no power")), strict=True
    ):
        observer.begun(run)
        if outcome.ending == "complete":
            observer.iteration_done(run, report(19, before=-2.0, after=-1.5))
        observer.ended(outcome)


@pytest.mark.parametrize("mode", ["plain", "json"])
def test_a_file_gets_a_line_when_a_run_of_a_sweep_begins_and_one_when_it_ends_before_the_context_does(mode, tmp_path):
    with (tmp_path / "log").open("w") as out, sweep_progress(4, 2, mode, out=out) as observer:
        work_on(observer)
        lines = (tmp_path / "log").read_text().splitlines()
    if mode == "json":
        first, ended, _, failed = map(json.loads, lines)
        assert first == {"run": "lr=1", "state": "training"}
        assert {**ended, "seconds": 0} == {"run": "lr=1", "state": "complete", "seconds": 0, "message": ""}
        assert 0 <= ended["seconds"] < 60
        assert (failed["state"], failed["message"]) == ("failed", "no power")
        return
    assert [re.sub(r"0:00:\d\d", "t", line) for line in lines] == [
        "lr=1  begins",
        "lr=1  complete  return before -2  after -1.5  t  3 of 4 complete",
        "lr=2  begins",
        "lr=2  failed  t  3 of 4 complete  no power",
    ]


def test_a_terminal_gets_a_bar_for_a_sweep_and_one_for_each_run_that_trains(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    with sweep_progress(4, 2, out=out) as observer:
        work_on(observer)
        observer.begun(PlannedRun("sizes=[a]", {}, 1, ""))
        observer.begun(RUNS[0])
        observer.iteration_done(RUNS[0], report(4, after=-1.5))
    shown = re.sub(r"\x1b\[[?\d;]*\w", "", out.getvalue())
    *_, all_runs, bracketed, one = (line for line in shown.splitlines() if "/" in line)
    assert bracketed.startswith("sizes=[a] ")
    assert re.search(r"runs .* 3/4 ", all_runs)
    assert re.search(r"lr=1 .* 5/20 .* return \N{MINUS SIGN}1.5", one)
    assert "lr=2  failed  no power" in out.getvalue()


def test_a_terminal_gets_a_panel_that_stays_when_training_ends(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    with progress(out=out) as observer:
        observer.stage_started(StageRef(0, "initialize"))
        observer.iteration_done(report(18))
        observer.iteration_done(report(19))
    assert "\x1b[" in out.getvalue()
    # Above the panel stays what a file would get, as far as it fits.
    for counted in ("iteration 18 (19 of 20)", "iteration 19 (20 of 20)"):
        assert f"{counted}  return before −20  after" in out.getvalue()
    assert "20 of 20 done" in out.getvalue()
    final = out.getvalue().rpartition("20 of 20 done")[2]
    assert "elapsed" in final
    assert "left" not in final
    assert "stage" not in final


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    with progress(out=out) as observer:
        observer.iteration_done(report(0))
    assert out.getvalue().startswith("iteration 0 (1 of 20)")


def test_the_panel_shows_stage_returns_speed_and_time_left():
    now = [100.0]
    panel = TrainingPanel(clock=lambda: now[0])
    assert "starting" in shown(panel)
    panel.stage_started(StageRef(12, "collect_rollouts", 1))
    now[0] = 102.5
    assert "collect_rollouts k=1  2.5 s" in shown(panel)
    panel.iteration_done(report(12, elapsed=4.0))
    panel.iteration_done(report(13, after=3.25, elapsed=8.0))
    assert [line.rstrip() for line in shown(panel).splitlines()] == [
        f"iteration  14 of 20 done  {'━' * 21}{' ' * 9}  70%",
        "stage      collect_rollouts k=1  2.5 s",
        "return     before −20  after 3.25   ▁█",
        "speed      39.2 k steps/s   4.00 s per iteration   2.24 M env steps so far",
        "time       0:00:02 elapsed   0:00:24 left",
    ]
    panel.iteration_done(report(14, after=math.nan))
    assert shown(panel).splitlines()[2].rstrip() == "return     before −20  after nan   ▁█"
    for iteration in range(15, 39):
        panel.iteration_done(report(iteration, after=3.25))
    assert shown(panel).splitlines()[1].rstrip() == f"return     before −20  after 3.25   {'▁' * 24}"


def test_the_first_iteration_which_also_starts_workers_does_not_decide_the_time_left():
    out = io.StringIO()
    with progress("plain", out=out) as observer:
        for iteration, elapsed in enumerate([60.0, 62.0, 64.0]):
            observer.iteration_done(report(iteration, elapsed=elapsed))
        assert out.getvalue().splitlines()[-1].endswith("0:00:34 left")
        # Fifteen iterations decide: here, seven of 100 seconds and eight of one.
        for iteration, elapsed in enumerate([164.0 + 100 * n for n in range(8)] + [865.0 + n for n in range(8)], 3):
            observer.iteration_done(report(iteration, elapsed=elapsed))
    assert out.getvalue().splitlines()[-1].endswith("0:00:01 left")


def test_a_run_without_adaptation_has_one_return():
    out = io.StringIO()
    single = IterationReport(0, 1, {"step_0.average_return": -3.0}, {}, 1.0, 10.0)
    with progress("plain", out=out) as observer:
        observer.iteration_done(single)
    assert out.getvalue() == "iteration 0 (1 of 1)  return -3  10 steps/s  1.00 s\n"


def test_sparklines_span_their_values():
    assert sparkline(deque([0.0, 7.0, 3.5])) == "▁█▅"
    assert sparkline(deque([2.0, 2.0])) == "▁▁"
    assert sparkline(deque([2.0])) == ""


def test_the_observer_asks_before_every_stage_whether_to_stop(tmp_path, tiny_config):
    calls = []

    class AtTheTenthStage(Stop):
        def __call__(self) -> bool:
            calls.append(None)
            return len(calls) > 9

    out = io.StringIO()
    with progress("plain", stop=AtTheTenthStage(), out=out) as observer:
        result = train(tiny_config(), tmp_path / "run", backend=Backend(workers=0), observer=observer)
    assert result.stopped
    assert len(out.getvalue().splitlines()) == result.iterations_done == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_command_says_on_a_terminal_what_it_does_and_how_far_it_is(options, tmp_path, copy_tiny_run, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "300")
    run = copy_tiny_run(tmp_path / "first")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.run(["verify", "first", *options]) == 0
    text = terminal.getvalue()
    if options:
        assert json.loads(text) == []
        return
    before, result, after = text.partition(f"{run}: every file is intact")
    assert before.startswith("\x1b[?25l\x1b[2mverify first")
    assert result
    assert f" of {len(storage.open_run(run).refs())} outputs" in after
    assert after.endswith("\x1b[2K")  # the status is cleared
    assert cli.STATUS.console is None


@pytest.mark.parametrize(
    ("command", "all_of_it"),
    [
        ("verify first", "{outputs} outputs"),
        ("du", "{outputs} outputs of run 1 of 1"),
        ("fork first --run second", "{outputs} outputs"),
        ("report first", "{read} tables and records"),
        ("resume first", "{read} tables and records"),
        ("export first --to parquet --out made", "{iterations} iterations"),
        ("export first --to histories --out made", "{iterations} iterations"),
        ("export first --to tensorboard --out made", "{iterations} iterations"),
        ("export first --to minari --out made", "{iterations} iterations"),
        ("export first --to delta --out made", "{iterations} iterations"),
        ("thin first --keep-last 1", "{older} iterations"),
        ("pack first", "{older} iterations"),
    ],
)
def test_a_command_that_reads_or_writes_a_whole_run_says_how_far_it_is(
    command, all_of_it, tmp_path, copy_tiny_run, monkeypatch
):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = storage.open_run(copy_tiny_run(tmp_path / "first"))
    iterations, outputs = len(run.iterations), len(run.refs())
    said = []
    monkeypatch.setattr(status.Status, "far", lambda _, how_far: said.append(how_far))
    assert cli.run(command.split()) == 0
    numbers = {"iterations": iterations, "older": iterations - 1, "outputs": outputs, "read": iterations + outputs}
    total, what = all_of_it.format(**numbers).split(" ", 1)
    done = [int(line.removesuffix(f" of {total} {what}")) for line in said]
    assert done[0] == 0
    assert max(done) < int(total)


def test_removing_runs_says_which_one_it_is_at(tmp_path, copy_tiny_run, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    for name in ("first", "second"):
        copy_tiny_run(tmp_path / name)
    said = []
    monkeypatch.setattr(status.Status, "far", lambda _, how_far: said.append(how_far))
    assert cli.run(["rm", "first", "second", "--yes"]) == 0
    assert said == ["run 1 of 2", "run 2 of 2"]


def test_without_a_terminal_a_long_command_says_so_again_and_again_on_standard_error(monkeypatch):
    said = threading.Event()

    class Errors(io.StringIO):
        def write(self, text):
            if text == "metaloom: evaluate first, tested after 1 step\n":
                said.set()
            return len(text)

    monkeypatch.setattr(status, "EVERY_SECONDS", 0.001)
    monkeypatch.setattr(sys, "stderr", Errors())
    out, shown = io.StringIO(), status.Status()
    with shown.shown("evaluate first", Console(file=out)):
        shown.far("tested after 1 step")
        assert said.wait(timeout=60)
    assert out.getvalue() == ""


def test_a_status_stays_on_one_line_however_long_it_is():
    shown = status.Status()
    shown.far("tested after many steps")
    (line,) = Console(file=io.StringIO(), width=12).render_lines(shown)
    assert "".join(segment.text for segment in line) == "tested afte…"
