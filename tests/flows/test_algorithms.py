"""Every algorithm of the meta family trains, is stored, and is computed again to the bit, through the same stages."""

import ast
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import train
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.recipes import RECIPES
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline import algorithms
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.plugins import load

pytestmark = pytest.mark.usefixtures("warm")

ALGORITHMS = sorted(
    name.removesuffix("-point-corner")
    for name in RECIPES
    if name.endswith("-point-corner") and "inner_steps" in type(RECIPES[name]().algorithm).model_fields
)
SMALL = [
    "env.options={reward: dense}",
    "policy.hidden_sizes=[8, 8]",
    "iterations=2",
    "num_tasks=3",
    "episodes_per_task=3",
    "max_episode_steps=8",
]


@pytest.mark.parametrize("inner_steps", [1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_trains_and_replays_bit_for_bit(tmp_path, algorithm, inner_steps):
    settings = RECIPES[f"{algorithm}-point-corner"]().model_dump(mode="json")
    config = build_config(override(settings, [*SMALL, f"algorithm.inner_steps={inner_steps}"]))
    path = tmp_path / "run"
    train(config, path, backend=Backend(workers=0))
    run = storage.open_run(path)
    start, end = run[0].learner(), run[1].update().learner
    assert any(not np.array_equal(start.params[name], end.params[name]) for name in start.params)
    assert storage.verify_run(path) == []
    assert all(outcome.identical for outcome in replay(path))
    outcome = evaluate(path, adaptation_steps=2, backend=Backend(workers=0))
    assert len(outcome.summary()) == 3


@pytest.mark.parametrize(("changes", "warned"), [([], 0), (["num_epochs=1"], 0), (["num_epochs=5"], 1)])
def test_training_warns_of_a_clipped_inner_loss_with_several_epochs(tmp_path, caplog, changes, warned):
    settings = RECIPES["maml-ppo-point-corner"]().model_dump(mode="json")
    clipped = [f"algorithm.{change}" for change in ("inner_loss=clipped", *changes)] if changes else []
    config = build_config(override(settings, [*SMALL, "iterations=1", *clipped]))
    train(config, tmp_path / "run", backend=Backend(workers=0))
    assert sum("drifts without bound" in record.getMessage() for record in caplog.records) == warned


@cache
def words_of_sources() -> dict[str, set[str]]:
    """Every name and string of every source file; environments have styles of observations named for algorithms."""
    root = Path(__file__).parents[2]
    files = [path for room in ("pipeline", "stages", "storage", "flows") for path in (root / room).rglob("*.py")]
    found: dict[str, set[str]] = {}
    for file in (path for path in files if path.parent.name != "envs"):
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        words = (getattr(node, part, None) for node in nodes for part in ("id", "name", "value"))
        found[file.relative_to(root).with_suffix("").as_posix()] = {word for word in words if isinstance(word, str)}
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_its_settings_and_learner_and_one_line_know_an_algorithm(algorithm):
    places = [algorithms.ALGORITHMS.builtin[algorithm]]
    settings = load(places[0])
    places += [settings.learner, f"{algorithms.__name__}.__init__"]
    names = {algorithm, settings.__name__, settings.learner.partition(":")[2]}
    known = {file for file, words in words_of_sources().items() if words & names}
    assert known == {place.partition(":")[0].removeprefix("metaloom.").replace(".", "/") for place in places}
