"""The code in docs/analysis.md does what the page says, on a run that it was not written for."""

import re
from pathlib import Path

import duckdb
import numpy as np
import pytest

from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_config

PAGE = (Path(__file__).parents[2] / "docs" / "analysis.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.slow


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory):
    """A half-cheetah run of 13 iterations at runs/first, as small as can be."""
    folder = tmp_path_factory.mktemp("docs")
    config = {
        "env": "half-cheetah-dir",
        "algorithm": {"name": "promp", "num_epochs": 1},
        "policy": {"hidden_sizes": [4]},
        "iterations": 13,
        "num_tasks": 4,
        "episodes_per_task": 2,
        "max_episode_steps": 5,
    }
    train(build_config(config), folder / "runs" / "first", backend=Backend(workers=0))
    return folder


def test_every_python_block_runs_in_the_order_of_the_page(runs_folder, monkeypatch):
    monkeypatch.chdir(runs_folder)
    names: dict[str, object] = {}
    python = blocks("python")
    assert len(python) > 8
    for block in python:
        exec(compile(block, "docs/analysis.md", "exec"), names)
    rewards = names["run"][12].rollouts(1).rewards
    np.testing.assert_allclose(names["data"]["rewards"].values, rewards)
    control = [it.rollouts(1).reward_terms["control"].mean() for it in names["run"]]
    np.testing.assert_allclose(names["total"] / names["count"], np.mean(control), rtol=1e-5)
    assert names["observations"].shape == (4 * 2 * 5, 17)


def test_the_sql_gives_the_returns_of_every_round(runs_folder, monkeypatch):
    monkeypatch.chdir(runs_folder)
    (query,) = blocks("sql")
    rows = duckdb.sql(query).fetchall()
    assert [row[:2] for row in rows] == [(i, k) for i in range(13) for k in range(2)]
