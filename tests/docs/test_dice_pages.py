"""The pages on DiCE and on baselines list the settings that the code has, with their defaults."""

import re

import numpy as np
import pytest

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml.settings import DiceMAML, VPGDice
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.diagnostics import NO_MEASURES
from metaloom.pipeline.estimation.processing import process_samples
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.types import EpisodeBatch, Step
from metaloom.stages.initialize import initialize
from metaloom.stages.meta_optimize import meta_optimize

PAGES = {"dice_maml.md": DiceMAML, "vpg_dice.md": VPGDice}


@pytest.fixture
def page(pytestconfig):
    return lambda name: (pytestconfig.rootpath / "docs" / name).read_text(encoding="utf-8")


def table(text, header):
    """The rows of the table whose header line begins with `header`."""
    lines = text[text.index(f"\n| {header} |") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def documented(value):
    """A default as the pages write it, as a value of Python."""
    words = {"true": True, "false": False, "null": None}
    value = value.strip("`")
    if value in words:
        return words[value]
    if value.startswith("["):
        return tuple(int(number) for number in value.strip("[]").split(","))
    return float(value) if re.fullmatch(r"[\d.e+-]+", value) else value


@pytest.mark.parametrize("name", PAGES)
def test_the_options_of_an_algorithm_are_documented_with_their_defaults(page, name):
    found = {row[0].strip("`"): documented(row[1]) for row in table(page(f"algorithms/{name}"), "option")}
    fields = PAGES[name].model_fields
    assert found == {option: about.default for option, about in fields.items() if option != "name"}


def test_the_settings_of_processing_and_baselines_are_documented_with_their_defaults(page):
    found = {row[0].strip("`"): documented(row[1]) for row in table(page("baselines.md"), "setting")}
    assert found.pop("processing.name") == "by algorithm"
    expected = {f"baseline.{option}": about.default for option, about in BaselineConfig.model_fields.items()}
    settings = {option: about.default for option, about in ProcessingConfig.model_fields.items() if option != "name"}
    assert found == expected | {f"processing.{option}": default for option, default in settings.items()}


@pytest.mark.parametrize("name", PAGES)
def test_the_metrics_of_an_algorithm_are_documented(page, name):
    rows = table(page(f"algorithms/{name}"), "name")
    found = {metric for row in rows for metric in re.findall(r"`(\w+)`", row[0])}
    options = {"trainable_inner_lr": True, "lr_schedule": "LinearLR", "gradient_noise": True}
    options |= {"tolerance": 1e-9, "num_epochs": 2} if name == "vpg_dice.md" else {}
    assert found == {metric for metric in metrics(PAGES[name](**options)) if not metric.startswith("step_")}


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
    tools = (learner, At(0, 0), map, NO_MEASURES)
    return meta_optimize(*tools, state=update, episodes=episodes, samples=samples).metrics
