"""The examples run to their end, in this process."""

import importlib
import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from metaloom import storage

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.slow


def output_of(name: str, *arguments: Path) -> str:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown:
        patch.syspath_prepend(EXAMPLES)
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return shown.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small-run"
    return folder, output_of("train_and_inspect.py", folder)


def test_train_and_inspect_answers_its_questions_from_the_stored_run(trained):
    folder, output = trained
    run = storage.open_run(folder)
    returns = run.episodes().to_pandas().groupby(["iteration", "step"])["return"].mean().unstack()
    assert f"{returns.loc[7, 1]:.4f}" in output
    assert f"(0, 0, 100, {returns.loc[0, 0]:.2f})" in output  # DuckDB
    assert "task 2: mean final position [" in output
    assert (folder.parent / "reports" / "small-run" / "report.html").exists()


def test_pixels_tells_how_often_the_ball_was_caught_in_every_iteration(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    pixels = importlib.import_module("pixels")
    pixels.main(tmp_path / "run", iterations=2)
    assert re.fullmatch(r"(iteration \d: caught \d+%\n){2}", capsys.readouterr().out)


def test_adapt_my_robot_does_better_after_adaptation(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    importlib.import_module("adapt_my_robot").main(tmp_path, iterations=14)
    before, after = re.search(r"(\S+) before, (\S+) after", capsys.readouterr().out).groups()
    assert float(after) > float(before) + 10


def test_training_raises_the_return_after_adaptation_above_the_one_before(trained):
    metrics = storage.open_run(trained[0]).metrics(slice(-3, None)).to_pandas()
    gain = metrics["step_1.average_return"] - metrics["step_0.average_return"]
    assert gain.mean() > 0


def test_change_one_stage_repeats_the_stored_digest_and_shows_what_a_setting_changes(trained):
    output = output_of("change_one_stage.py", trained[0])
    assert "unchanged settings give the stored digest: True" in output
    moved = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("algorithm.")]
    assert moved[2] > moved[0] > 0  # four times as many epochs go further
