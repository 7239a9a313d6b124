"""How the stages that collect ask for episodes: at the position that decides their random streams."""

from types import SimpleNamespace

import pytest
from small_runs import SMALL_RUNS

from metaloom.flows.recipes import new_config
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.types import TaskParams
from metaloom.stages.collect_rollouts import collect_rollouts, collect_round
from metaloom.stages.fill_memory import fill_memory, fill_memory_of_all_tasks
from metaloom.stages.memory.replay import plan_of
from metaloom.stages.rollouts.faults import RolloutPosition

AT, PARAMS, TASKS = At(7, 3, 1), TaskParams({}), [0, 1]


@pytest.fixture
def asked() -> list:
    return []


@pytest.fixture
def rollouts(asked):
    """A collector that keeps how many episodes or steps are asked for, how, and where."""

    def collector(*settings):
        def collect(params, tasks, position):
            asked.append((*settings, position))

        return SimpleNamespace(
            collect=collect,
            sampling=lambda episodes, *, deterministic: collector(episodes, deterministic),
            filling=lambda steps, *, actor: collector(steps, actor),
        )

    return collector()


def test_rollouts_are_collected_at_the_position_of_their_stage(rollouts, asked) -> None:
    collect_rollouts(None, rollouts, AT, params=PARAMS, tasks=TASKS)
    assert asked == [(RolloutPosition(7, 3, 1),)]
    # Without shards, the first task and its first episode are 0.
    assert RolloutPosition(7, 3, 1).of_episode(0, 0) == (3, 1, 0, 0)


def test_rounds_and_the_fill_of_task_inference_draw_actions_at_their_position(rollouts, asked) -> None:
    config = new_config(SMALL_RUNS["pearl"][0], SMALL_RUNS["pearl"][1:])
    plan = plan_of(config)
    collect_round(None, config, rollouts, AT, state=PARAMS, tasks=TASKS)
    fill_memory_of_all_tasks(None, config, TASKS, rollouts, At(7, 0), state=PARAMS)
    assert asked == [
        (plan.rounds[1].episodes, False, RolloutPosition(7, 3, 1)),
        (plan.filling.episodes, False, RolloutPosition(7, -1, 0)),
    ]


def test_a_buffer_is_filled_with_uniform_actions_before_the_first_iteration(rollouts, asked) -> None:
    config = new_config(SMALL_RUNS["sac"][0], SMALL_RUNS["sac"][1:])
    fill_memory(None, config, make_env(config.env), rollouts, At(7, 0), state=None)
    assert asked == [(plan_of(config).filling.steps, "uniform", RolloutPosition(7, -1, 0))]
