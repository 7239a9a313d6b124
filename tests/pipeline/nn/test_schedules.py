import math

import pytest
from pydantic import ValidationError

from metaloom.pipeline.algorithms.actor_critic.settings import A2C
from metaloom.pipeline.algorithms.maml.settings import MAMLVPG
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.nn.optimization import LearningRate, NaturalSteps, ScheduledSteps
from metaloom.pipeline.nn.torch_optimizers import lr_factor


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"lr_schedule": "linear", "lr_horizon": 2}, [1, 0.5, 0, 0]),
        ({"lr_schedule": "exponential", "lr_decay": 0.5}, [1, 0.5, 0.25, 0.125]),
        ({"lr_schedule": {"name": "StepLR", "options": {"step_size": 2, "gamma": 0.1}}}, [1, 1, 0.1, 0.1]),
        (
            {"lr_schedule": {"name": "CosineAnnealingLR", "options": {"T_max": 3}}},
            [(1 + math.cos(math.pi * n / 3)) / 2 for n in range(4)],
        ),
        ({"lr_schedule": "LinearLR"}, [1 / 3, 1 / 3 + 2 / 15, 1 / 3 + 4 / 15, 1 / 3 + 6 / 15]),
    ],
)
def test_factors_are_those_of_the_schedule(settings, expected):
    for config in (LearningRate(**settings), ScheduledSteps(**settings)):
        factor = lr_factor(config, 1e-3)
        assert [factor(n) for n in range(4)] == pytest.approx(expected)


def test_a_factor_does_not_depend_on_what_was_asked_before():
    schedule = {"name": "CosineAnnealingWarmRestarts", "options": {"T_0": 4}}
    factor = lr_factor(ScheduledSteps(lr_schedule=schedule), 1e-3)
    forward = [factor(n) for n in range(10)]

    assert [factor(n) for n in reversed(range(10))] == forward[::-1]


def test_absolute_step_sizes_of_a_scheduler_are_those_of_the_run():
    options = {"max_lr": 0.1, "total_steps": 20, "cycle_momentum": False}
    factor = lr_factor(ScheduledSteps(lr_schedule={"name": "OneCycleLR", "options": options}), 0.02)

    assert max(0.02 * factor(n) for n in range(20)) == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("ReduceLROnPlateau", "waits for a metric"),
        ({"name": "SequentialLR"}, "combines other schedulers"),
        ("cosine", "of torch.optim.lr_scheduler, such as CosineAnnealingLR or CosineAnnealingWarmRestarts, as in "),
        ("sine", "got 'sine'; expected one of constant, linear, exponential, or a class of torch.optim.lr_scheduler, "),
        ("fast", "such as CosineAnnealingLR, as in "),
        ("linaer", "did you mean linear"),
        ({"name": "StepLR", "option": {}}, "unknown key; did you mean options"),
    ],
)
def test_settings_refuse_what_the_count_of_updates_does_not_decide(schedule, message):
    with pytest.raises(ValidationError, match=message):
        LearningRate(lr_schedule=schedule)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("CosineAnealingLR", "did you mean CosineAnnealingLR"),
        ("CosineAnnealingLR", "missing 1 required positional argument: 'T_max'"),
        ({"name": "CosineAnnealingLR", "options": {"T_max": 0}}, "by zero"),
        ({"name": "CyclicLR", "options": {"base_lr": 0.1, "max_lr": 0.2}}, "cycle_momentum"),
        ({"name": "ExponentialLR", "options": {"gamma": -1.0}}, "step-size factor is -1.0 from update 1 on"),
    ],
)
def test_what_torch_refuses_is_refused_before_the_first_update(schedule, message):
    with pytest.raises(ConfigError, match=message):
        lr_factor(ScheduledSteps(lr_schedule=schedule), 1e-3)


def test_a_schedule_that_ends_says_so():
    options = {"max_lr": 0.1, "total_steps": 3, "cycle_momentum": False}
    factor = lr_factor(ScheduledSteps(lr_schedule={"name": "OneCycleLR", "options": options}), 1e-3)
    assert factor(3) > 0
    with pytest.raises(ConfigError, match=r"OneCycleLR with options .* after 4 updates: Tried to step"):
        factor(4)


def test_a_schedule_left_out_does_not_count_where_version_0_1_had_none():
    assert "lr_schedule" not in MAMLVPG().decisive()
    assert MAMLVPG(lr_schedule="LinearLR").decisive()["lr_schedule"] == {"name": "LinearLR", "options": {}}
    assert A2C().decisive()["lr_schedule"] == "constant"


def test_a_factor_may_reach_zero_and_is_finite():
    options = {"step_size": 1, "gamma": 0.0}
    factor = lr_factor(ScheduledSteps(lr_schedule={"name": "StepLR", "options": options}), 1e-3)
    assert [factor(n) for n in (0, 1, 2)] == [1, 0, 0]
    endless = {"step_size": 1, "gamma": math.inf}
    with pytest.raises(ConfigError, match="the step-size factor is inf from update 1 on"):
        lr_factor(ScheduledSteps(lr_schedule={"name": "StepLR", "options": endless}), 1e-3)


@pytest.mark.parametrize("settings", [LearningRate, ScheduledSteps])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr_schedule": "linear"}, "lr_horizon is not set"),
        ({"lr_schedule": "linear", "lr_horizon": 1}, None),
        ({"lr_schedule": "linear", "lr_horizon": 0}, "greater than or equal to 1"),
        ({"lr_horizon": 2}, "lr_horizon is 2 but lr_schedule is constant"),
        ({"lr_schedule": "LinearLR", "lr_horizon": 2}, "lr_horizon is 2 but lr_schedule is LinearLR"),
        ({"lr_decay": 0.5}, "lr_decay is 0.5 but lr_schedule is constant"),
        ({"lr_schedule": "exponential"}, "which changes nothing"),
        ({"lr_schedule": "exponential", "lr_decay": 0.5}, None),
        ({"lr_schedule": "exponential", "lr_decay": 0}, "greater than 0"),
        ({"lr_schedule": "exponential", "lr_decay": 1.5}, "less than or equal to 1"),
    ],
)
def test_a_schedule_has_the_options_that_it_reads(settings, given, message):
    if message is None:
        settings(**given)
        return
    with pytest.raises(ValidationError, match=message):
        settings(**given)


def test_step_sizes_are_positive():
    assert LearningRate().learning_rate == 5e-4
    with pytest.raises(ValidationError):
        LearningRate(learning_rate=0)


def test_natural_steps_have_the_settings_of_trpo_and_limits():
    assert NaturalSteps().model_dump() == {
        "max_kl": 0.01, "cg_iterations": 10, "cg_tolerance": 1e-10, "cg_damping": 1e-5, "backtrack_ratio": 0.8,
        "line_search_trials": 15, "accept_violation": False,
    }  # fmt: skip
    limits = {"max_kl": (0.5, 0), "cg_iterations": (1, 0), "cg_tolerance": (0, -1), "cg_damping": (0, -1)}
    limits |= {"backtrack_ratio": (0.5, 0), "line_search_trials": (1, 0)}
    NaturalSteps(**{name: allowed for name, (allowed, _) in limits.items()})
    for name, value in (*((name, refused) for name, (_, refused) in limits.items()), ("backtrack_ratio", 1)):
        with pytest.raises(ValidationError, match=name):
            NaturalSteps(**{name: value})
