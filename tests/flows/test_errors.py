"""Failures that a user is told in one line, and those that keep their traceback."""

import pkgutil
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from metaloom import storage
from metaloom.flows import errors
from metaloom.flows.cli import run
from metaloom.pipeline.algorithms.contract import NumericalError
from metaloom.pipeline.baselines.contract import BaselineError

ENVIRONMENT = """
import os
import numpy as np
from gymnasium.envs.classic_control import PendulumEnv

class Breaking(PendulumEnv):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def step(self, action):
        if self.how == "raise":
            raise ValueError("my own bug")
        if self.how == "die":
            os._exit(3)
        return np.full(3, np.nan), 0.0, False, False, {}
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains on an environment that breaks in its first step."""
    (tmp_path / "breaking_env.py").write_text(ENVIRONMENT)
    monkeypatch.delitem(sys.modules, "breaking_env", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    settings = ["env.name=breaking_env:Breaking", "num_tasks=1", "episodes_per_task=1", "max_episode_steps=2"]

    def train(how: str, *options: str) -> int:
        sets = [token for setting in [*settings, f"env.options={{how: {how}}}"] for token in ("--set", setting)]
        return run(["train", "promp-point-corner", "--run", str(tmp_path / "run"), *sets, *options])

    return train


def test_a_bug_in_a_users_environment_ends_with_1_its_place_and_its_own_traceback(train, capsys):
    assert train("raise", "--workers", "0") == 1
    told = capsys.readouterr().err
    assert "breaking_env:Breaking, task 0, episode 0 (reset seed " in told
    assert "step 0: Breaking.step raised ValueError: my own bug\nIts own traceback:" in told
    assert 'raise ValueError("my own bug")' in told


def test_rollouts_that_are_not_finite_end_with_1_and_one_line(train, capsys):
    assert train("nan", "--workers", "0") == 1
    assert (
        capsys.readouterr()
        .err.partition("/run: ")[2]
        .startswith("iteration 0, collect_rollouts k=0: breaking_env:Breaking, task 0")
    )


@pytest.mark.dask
@pytest.mark.slow
def test_an_environment_that_kills_its_workers_ends_with_1_and_where(train, capsys):
    assert train("die", "--workers", "1") == 1
    told = capsys.readouterr().err.rpartition("/run: ")[2]
    assert told.startswith("iteration 0, collect_rollouts k=0: breaking_env:Breaking, task 0, episode 0")
    assert "its process died 4 times at the same point without a message" in told


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("no such step"), 2),
        (NumericalError("NaN"), 1),
        (BaselineError("NaN"), 1),
        (storage.RunLocked("run", found="a writer", required="none", action="Wait"), 1),
        (storage.RunNotFound("run", found="nothing", required="a run", action="Look"), 2),
        (ConnectionResetError("somebody else's"), None),
        (ArithmeticError("somebody else's"), None),
    ],
)
def test_usage_ends_with_2_what_a_message_explains_with_1_and_the_rest_with_a_traceback(error, code):
    assert errors.exit_code(error) == code


def test_an_error_that_no_message_explains_leaves_the_command_with_its_traceback(monkeypatch):
    def fail(folder, progress):
        raise ArithmeticError("somebody else's")

    monkeypatch.setattr("metaloom.flows.operations.verify.verify_run", fail)
    with pytest.raises(ArithmeticError, match="somebody else's"):
        run(["verify", "any"])


def test_a_message_beyond_a_screenful_is_cut_in_the_middle(monkeypatch, capsys):
    def fail(folder, progress):
        raise errors.UsageError(f"found {'x' * 100_000}; remedy: none")

    monkeypatch.setattr("metaloom.flows.operations.verify.verify_run", fail)
    assert run(["verify", "any"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("metaloom: found xxx")
    assert said.endswith("x; remedy: none\n")
    assert "(98,020 more characters)" in said
    assert len(said) < 2100


@pytest.mark.parametrize("name", errors.EXIT_CODES)
def test_every_error_with_an_exit_code_exists(name):
    kind = pkgutil.resolve_name(name)
    assert issubclass(kind, Exception)
    assert f"{kind.__module__}.{kind.__qualname__}" == name


def test_a_missing_module_is_reported_as_it_is_where_metaloom_is_not_installed(monkeypatch):
    def distribution(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(errors, "distribution", distribution)
    missing = ModuleNotFoundError("No module named 'nowhere'", name="nowhere")
    assert errors.explained(missing) is missing
