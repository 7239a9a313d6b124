"""Tabular MDPs and the grid with a hidden goal: their rules, and the strategies that are computed to compare with."""

import itertools
from functools import cache

import numpy as np
import pytest
from grid_references import (
    GridTrials,
    bayes_optimal_return,
    nearest_unvisited,
    strategy_return,
    sweep,
)
from gymnasium.spaces import Box
from mdp_references import REFERENCES, Evidence, Tables, earned, plan, random_tables

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.hidden_goal_grid import MOVES, HiddenGoalGrid
from metaloom.pipeline.envs.pictures import table_picture
from metaloom.pipeline.envs.registry import make_batch_env, make_env
from metaloom.pipeline.envs.tabular_mdp import draw_tables

GRID, MDP = EnvConfig(name="hidden-goal-grid"), EnvConfig(name="tabular-mdp")


def test_what_happens_in_an_mdp_is_what_its_tables_say():
    """20,000 steps from state 0 under action 3: next states and rewards as often and as high as they should be."""
    n, tables = 20_000, draw_tables(7, 10, 5)
    batch = make_batch_env(MDP, n)
    assert batch.reset(np.full((n, 1), 7.0), np.arange(n, dtype=np.uint64))[:, 0].all()
    step = batch.step(np.full(n, 3), np.arange(n))
    frequencies = step.observations.mean(0)
    error = np.sqrt(tables.transitions[0, 3] * (1 - tables.transitions[0, 3]) / n)
    assert (np.abs(frequencies - tables.transitions[0, 3]) < 4.5 * error).all()
    assert (step.reward_terms["mean_reward"] == tables.means[0, 3]).all()
    noise = step.reward_terms["noise"]
    assert abs(noise.mean()) < 4 / np.sqrt(n)
    assert noise.std() == pytest.approx(1, abs=0.03)


def test_tasks_of_mdps_are_drawn_from_the_prior():
    drawn = [draw_tables(int(task), 10, 5) for task in make_env(MDP).sample_tasks(400, np.random.default_rng(0))[:, 0]]
    means = np.stack([tables.means for tables in drawn])
    transitions = np.stack([tables.transitions for tables in drawn])
    assert (means.mean(), means.std()) == (pytest.approx(1, abs=0.03), pytest.approx(1, abs=0.03))
    np.testing.assert_allclose(transitions.sum(-1), 1)
    # Of Dirichlet(1, ..., 1) over 10: mean 0.1, variance 0.1 * 0.9 / 11.
    assert transitions.var() == pytest.approx(0.09 / 11, rel=0.03)


def test_chances_of_an_episode_are_drawn_for_32_steps_at_a_time():
    env, rng = make_env(MDP), np.random.Generator(np.random.PCG64(5))
    env.reset(seed=5)
    noise = [env.step(0)[4]["reward_terms"]["noise"] for _ in range(40)]
    drawn = [(rng.random(32), rng.standard_normal(32))[1] for _ in range(2)]
    assert noise == np.concatenate(drawn)[:40].tolist()


def test_sizes_of_mdps_are_options_and_wrong_ones_are_refused():
    small = EnvConfig(name="tabular-mdp", options={"states": 3, "actions": 2})
    assert make_env(small).observation_space.shape == (3,)
    assert make_env(small).action_space.n == 2
    for options in ({"states": 1}, {"actions": 2.5}, {"states": None}):
        with pytest.raises(EnvError, match="must be an integer >= 2"):
            make_env(EnvConfig(name="tabular-mdp", options=options))


@pytest.mark.parametrize(("name", "size"), [("bernoulli-bandit", 1), ("hidden-goal-grid", 25), ("tabular-mdp", 10)])
def test_observations_of_small_worlds_lie_between_zero_and_one(name, size):
    assert make_env(EnvConfig(name=name)).observation_space == Box(0, 1, (size,), np.float64)


@pytest.mark.parametrize(
    ("name", "task", "told"),
    [
        ("tabular-mdp", [0.5], r"got mdp 0\.5; expected an integer"),
        ("tabular-mdp", [1e300], r"got mdp 1e\+300; expected an integer from 0 to 2\^53 - 1"),
        ("bernoulli-bandit", [2.0, -1, 0, 0, 0], r"got \[2\.0, -1\.0, .*; expected probabilities"),
        (
            "hidden-goal-grid",
            [5.0, 0],
            r"got the goal \[5\.0, 0\.0\]; expected the coordinates of a cell, each an integer from 0 to 4",
        ),
        ("hidden-goal-grid", [0.5, 3], "expected the coordinates of a cell"),
    ],
)
def test_tasks_that_the_world_does_not_have_are_refused(name, task, told):
    with pytest.raises(EnvError, match=told):
        make_env(EnvConfig(name=name)).set_task(np.array(task))


def test_a_plan_is_the_best_of_all_policies():
    """Two states, two actions, three steps: against every one of the 2^6 policies."""
    rng = np.random.default_rng(0)
    tables = Tables(rng.normal(size=(1, 2, 2)), rng.dirichlet(np.ones(2), (1, 2, 2)))
    best = -np.inf
    for policy in itertools.product(range(2), repeat=6):
        chosen = np.array(policy).reshape(3, 2)
        values = np.zeros(2)
        for h in reversed(range(3)):
            s = np.arange(2)
            values = tables.means[0, s, chosen[h]] + tables.transitions[0, s, chosen[h]] @ values
        best = max(best, values[0])
    assert plan(tables, 3)[0, 0, 0].max() == pytest.approx(best, abs=1e-12)


def test_the_posterior_is_that_of_the_prior_and_what_was_seen():
    rewards, counts = np.full((1, 1, 2), 6.0), np.zeros((1, 1, 2, 1))
    counts[0, 0, 0] = 4
    evidence = Evidence(rewards * [1, 0], counts)
    # N(1, 1), four observations of noise 1 that sum to 6: N(7/5, 1/5); untouched: N(1, 1).
    draws = np.stack([evidence.draw(np.random.default_rng(n)).means[0, 0] for n in range(4000)])
    np.testing.assert_allclose(evidence.mean().means[0, 0], [7 / 5, 1])
    np.testing.assert_allclose(draws.mean(0), [7 / 5, 1], atol=0.07)
    np.testing.assert_allclose(draws.var(0), [1 / 5, 1], rtol=0.1)


def test_strategies_explore_and_learn_within_what_can_be_earned():
    rng = np.random.default_rng(0)
    tables = random_tables(600, rng)
    found = {name: earned(REFERENCES[name], tables, episodes=10, horizon=10, rng=rng) for name in REFERENCES}
    error = 4 * np.sqrt(20 / 600)  # a return's variance is about 2 per step, that of the noise and of the means
    # A plan that nothing was seen for, and any action, earn the mean reward: 1 per step.
    assert found["random"].mean(0) == pytest.approx(np.full(10, 10.0), abs=error)
    for name in ("psrl", "opsrl", "greedy", "epsilon-greedy"):
        assert found[name][:, 0].mean() == pytest.approx(10, abs=error), name
        assert found[name][:, -1].mean() > 14, name
        assert found[name].sum(1).mean() < found["known"].sum(1).mean(), name
    # Who knows the process earns in every episode what its plan says.
    assert found["known"].mean() == pytest.approx(plan(tables, 10)[:, 0, 0].max(-1).mean(), abs=error)


def test_planning_at_every_step_uses_what_the_episode_has_shown():
    tables = random_tables(400, np.random.default_rng(0))

    def found(name, **settings):
        rng = np.random.default_rng(1)
        return earned(REFERENCES[name], tables, episodes=5, horizon=10, rng=rng, **settings).sum(1)

    # Nothing is left to find out: the rest of a plan is the plan of the rest.
    assert np.array_equal(found("known", replan=True), found("known"))
    gain = found("greedy", replan=True) - found("greedy")
    assert gain.mean() > 3 * gain.std() / np.sqrt(len(gain))


def test_a_move_on_the_grid_goes_where_it_says_and_not_off_it():
    env = make_env(GRID)
    env.set_task(np.array([1.0, 3.0]))
    env.reset(seed=0)
    cells, rewards, successes = [], [], []
    for move in ((-1, 0), (1, 0), (0, 1), (0, 1), (0, 1), (0, 0), (0, -1)):
        observation, reward, _, _, info = env.step(int(np.flatnonzero((move == MOVES).all(1))[0]))
        cells.append(divmod(int(observation.argmax()), 5))
        rewards.append(reward)
        successes.append(info["facts"]["success"])
    assert cells == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (1, 3), (1, 2)]
    assert rewards == [-0.1, -0.1, -0.1, -0.1, 1, 1, -0.1]
    assert successes == [reward == 1 for reward in rewards]
    assert (len(env.task_set), min(map(max, env.task_set))) == (21, 2)
    options = {"size": 3, "excluded": "start"}
    assert len(make_env(EnvConfig(name="hidden-goal-grid", options=options)).task_set) == 8
    with pytest.raises(EnvError, match="excluded is corner; expected one of block, start"):
        make_env(EnvConfig(name="hidden-goal-grid", options={"excluded": "corner"}))


@pytest.mark.parametrize(
    ("excluded", "optimal", "nearest", "columns"),
    [
        ("block", 37.214, 36.900, 35.486),
        pytest.param("start", 38.367, 37.725, 37.725, marks=pytest.mark.slow),
    ],
)
def test_searches_earn_what_was_computed_for_them_elsewhere(excluded, optimal, nearest, columns):
    trials = GridTrials(excluded=excluded)
    assert bayes_optimal_return(trials) == pytest.approx(optimal, abs=5e-4)
    assert strategy_return(trials, nearest_unvisited) == pytest.approx(nearest, abs=5e-4)
    assert strategy_return(trials, sweep) == pytest.approx(columns, abs=5e-4)


def test_the_best_search_is_the_best_of_all_ways():
    """A 3x3 grid and two episodes of four steps: against every sequence of moves."""
    trials = GridTrials(size=3, excluded="start", horizon=4, episodes=2)
    best = -np.inf
    for moves in itertools.product(MOVES.tolist(), repeat=4):
        first = walk(moves, 3)
        left = set(trials.goals) - set(first)
        off = sum(first.index(goal) for goal in set(first) & set(trials.goals))
        off += sum(trials.later_steps(goal, 0) for goal in set(first) & set(trials.goals))
        off += 4 * len(left) + fewest(frozenset(left), trials)
        best = max(best, trials.return_of(off))
    assert bayes_optimal_return(trials) == pytest.approx(best, abs=1e-9)


def walk(moves, size):
    cell, cells = np.zeros(2, np.int64), []
    for move in moves:
        cell = np.clip(cell + move, 0, size - 1)
        cells.append(tuple(cell.tolist()))
    return cells


@cache
def fewest(left, trials):
    """Steps off the goals that are left, in a last episode that is walked as well as can be."""
    ways = (walk(moves, trials.size) for moves in itertools.product(MOVES.tolist(), repeat=4))
    return min(sum(way.index(goal) if goal in way else 4 for goal in left) for way in ways)


WHITE, GRAY, GREEN, BLUE = (255, 255, 255), (205, 205, 205), (60, 160, 75), (25, 60, 150)


def test_a_picture_of_the_grid_shows_its_cells_the_goal_the_other_goals_and_the_way() -> None:
    env = HiddenGoalGrid()
    env.set_task(np.array([4.0, 0.0]))
    env.reset(seed=0)
    env.step(2)
    picture = env.render()

    def at(x: float, y: float) -> tuple[int, ...]:
        """The color at a position in cells from the middle one."""
        column, row = (round((place + 2.5) / 5 * (len(picture) - 1)) for place in (x, -y))
        return tuple(picture[row, column].tolist())

    assert (at(2, -2), at(2, 2), at(0, 0), at(-2, -1), at(-2, -2)) == (GREEN, GRAY, GRAY, BLUE, (120, 150, 210))
    assert at(1.7, -2) == GREEN  # a goal is 20 pixels wide to each side, a cell 64
    assert at(1.665, -2) == at(1.6, -2) == at(0.25, 0.25) == WHITE
    assert {at(line, 0.25) for line in (-2.5, -1.5, -0.5, 0.5, 1.5, 2.5)} == {(228, 228, 228)}
    assert {at(0.25, line) for line in (-2.5, -1.5, -0.5, 0.5, 1.5, 2.5)} == {(228, 228, 228)}


def test_a_chart_of_states_has_a_panel_for_each_in_rows_and_bars_from_zero() -> None:
    # Five states in two rows of three panels of 160 x 106 pixels. In the last one, bars reach from the mean of -1 at
    # the bottom to 0, and from there to 3 of 10 of the way to 1 at the top.
    means, taken = np.zeros((5, 1)), np.zeros((5, 1), np.int64)
    means[4], taken[4] = -1, 3
    picture = table_picture(means, taken)
    panel = picture[160:, 106:212]
    column = [tuple(color) for color in panel[:, 53].tolist()]
    assert [column.index(color) for color in (BLUE, GREEN)] == [58, 81]
    assert (column[57], column[80], column[154], column[155]) == (WHITE, BLUE, GREEN, WHITE)
    rows = [[tuple(color) for color in panel[row].tolist()] for row in (60, 100)]
    assert [(row.index(color), row.count(color)) for row, color in zip(rows, (BLUE, GREEN), strict=True)] == [
        (38, 30),
        (9, 88),
    ]
    assert (picture[160:, 212:] == 255).all()  # there is no sixth state
    assert (picture[80, 20], picture[80, 232]) == pytest.approx(np.array([GREEN, GREEN]))
