"""The metrics that the pages of the MAML family list are those of its meta-updates."""

import re

import numpy as np
import pytest

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml.settings import DiceMAML, VPGDice
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.diagnostics import Measures
from metaloom.pipeline.estimation.processing import process_samples
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.types import EpisodeBatch, Step
from metaloom.stages.initialize import initialize
from metaloom.stages.meta_optimize import meta_optimize


@pytest.mark.parametrize("algorithm", [DiceMAML, VPGDice])
def test_the_metrics_of_a_meta_update_are_documented(pytestconfig, algorithm):
    page = (pytestconfig.rootpath / "docs/algorithms/README.md").read_text(encoding="utf-8")
    table = page.split("\n### Metrics\n")[1].split("\n| name | meaning |\n")[1].split("\n\n")[0]
    found = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    options = {"trainable_inner_lr": True, "lr_schedule": "LinearLR", "gradient_noise": True, "max_grad_norm": 1.0}
    if algorithm is DiceMAML:  # whose loss has nothing to tolerate
        found -= {"epochs"}
    else:
        options |= {"tolerance": 1e-9, "num_epochs": 2}
    assert found == {metric for metric in metrics(algorithm(**options)) if not metric.startswith("step_")}


def metrics(algorithm):
    rng = np.random.default_rng(0)
    zeros = np.zeros((2, 2, 4), np.float32)
    episodes = EpisodeBatch(
        observations=rng.standard_normal((2, 2, 5, 3), np.float32),
        actions=rng.standard_normal((2, 2, 4, 2), np.float32),
        rewards=rng.standard_normal((2, 2, 4), np.float32),
        terminated=np.zeros((2, 2), bool),
        truncated=np.ones((2, 2), bool),
        lengths=np.full((2, 2), 4, np.int32),
        behavior={"mean": np.zeros((2, 2, 4, 2), np.float32), "log_std": np.zeros((2, 2), np.float32)},
        reward_terms={"all": zeros},
        initial_state=np.zeros((2, 2, 0)),
    )
    samples = process_samples(episodes, BaselineConfig(name="zero").build(), ProcessingConfig(name="dice"))
    setup = Setup((3,), 1.0, 2, 0, "toy", 4, PolicyConfig(), BaselineConfig(), ProcessingConfig(), "cpu", np.negative)
    learner = algorithm.build(setup)
    update = initialize(learner, At(0, 0), lambda: None)
    steps = [Step(episodes, samples, k) for k in range(2)]
    episodes, samples = zip(*((step.episodes, step.samples) for step in steps), strict=True)
    tools = (learner, At(0, 0), map, Measures({}, {}))
    return meta_optimize(*tools, state=update, episodes=episodes, samples=samples).metrics
