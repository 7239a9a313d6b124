"""The classes of ML10 as rules for rows, held to the package's own code, class by class."""

import warnings
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("metaworld", reason="needs the package metaworld: `make metaworld`")
pytest.importorskip("scipy", reason="needs scipy, which metaworld imports: `make metaworld`")

from metaworld.policies import ENV_POLICY_MAP
from metaworld.utils import reward_utils
from scipy.spatial.transform import Rotation

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.facts import env_facts
from metaloom.pipeline.envs.metaworld.batch import VectorizedRows
from metaloom.pipeline.envs.metaworld.names import BENCHMARKS
from metaloom.pipeline.envs.metaworld.oracle import INFO, OfficialClass, OracleRows
from metaloom.pipeline.envs.metaworld.rows.scene import (
    beyond,
    fraction_of_box,
    gaussian,
    hamacher,
    long_tail,
    quaternions,
)
from metaloom.pipeline.envs.metaworld.rows.table import ROW_TASKS, TEST_ROWS, TRAIN_ROWS
from metaloom.pipeline.envs.registry import make_env

EXPERT, DISTURBED, RANDOM = 0, 1, 2
"""What a row does, by its number modulo 3."""

UNIT = st.floats(0, 1)


@cache
def official(name):
    return OfficialClass(name, goal_visible=True, reward_version="v2")


def goals(name, num_rows, seed):
    """Goals [N, R] that the class accepts: object and target are not on top of each other."""
    space, rng = official(name).space, np.random.default_rng(seed)
    drawn = rng.uniform(space.low, space.high, (20 * num_rows, len(space.low)))
    if drawn.shape[1] == 6:
        drawn = drawn[np.linalg.norm(drawn[:, :2] - drawn[:, 3:5], axis=1) > 0.16]
    return drawn[:num_rows]


class Acting:
    """The package's scripted policies, half of them disturbed or replaced by chance."""

    def __init__(self, name, num_rows, seed):
        self.experts = [ENV_POLICY_MAP[f"{name}-v3"]() for _ in range(num_rows)]
        self.rng = np.random.default_rng(seed)

    def __call__(self, observations):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of gains that the scripts know to be too high
            wanted = [expert.get_action(obs) for expert, obs in zip(self.experts, observations, strict=True)]
        actions = np.clip(np.array(wanted, np.float64), -1, 1)
        kind = np.arange(len(actions)) % 3
        actions[kind == DISTURBED] += self.rng.normal(0, 0.5, actions[kind == DISTURBED].shape)
        actions[kind == RANDOM] = self.rng.uniform(-1.5, 1.5, actions[kind == RANDOM].shape)
        return actions


def rows_agree(name, num_rows, num_steps, seed):
    """Step both side by side, now and then not all rows; return which rows succeeded and how often rows held."""
    chosen = goals(name, num_rows, seed)
    oracle, rules = (rows(official(name), chosen, 1) for rows in (OracleRows, VectorizedRows))
    acting, observations = Acting(name, num_rows, seed), oracle.observations.copy()
    assert (rules.observations == observations).all()
    success, held = np.zeros(num_rows, np.bool_), 0.0
    for step in range(num_steps):
        actions = acting(observations)
        rows = np.arange(num_rows)[step % 5 == 1 :]
        found, required = rules.step(actions[rows], rows), oracle.step(actions[rows], rows)
        np.testing.assert_allclose(found.observations, required.observations, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found.rewards, required.rewards, rtol=0, atol=1e-10)
        assert (found.success == required.success).all()
        assert (found.truncated == required.truncated).all()
        for fact in INFO:
            np.testing.assert_allclose(found.info[fact], required.info[fact], rtol=0, atol=1e-10, err_msg=fact)
        observations[rows] = required.observations
        success[rows] |= required.success
        held += required.info["grasp_success"].sum()
    return success, held


@pytest.mark.parametrize("name", ROW_TASKS)
def test_rules_for_rows_agree_with_the_official_class(name):
    rows_agree(name, num_rows=3, num_steps=60, seed=3)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ROW_TASKS)
def test_rules_for_rows_agree_over_whole_episodes(name, seed):
    success, held = rows_agree(name, num_rows=9, num_steps=495, seed=seed)
    assert success[[EXPERT, EXPERT + 3, EXPERT + 6]].any()
    assert held


@pytest.mark.parametrize("name", ["push", "sweep", "door-open", "peg-insert-side"])
def test_a_row_has_the_same_bits_alone_and_among_others(name):
    chosen, acting = goals(name, 5, seed=1), Acting(name, 5, seed=1)
    together = VectorizedRows(official(name), chosen, 1)
    alone = [VectorizedRows(official(name), chosen[row : row + 1], 1) for row in range(5)]
    observations = together.observations
    for step in range(40):
        actions = acting(observations)
        rows = np.arange(5) if step % 3 else np.array([0, 2, 4])
        found = together.step(actions[rows], rows)
        observations = observations.copy()
        observations[rows] = found.observations
        for place, row in enumerate(rows.tolist()):
            single = alone[row].step(actions[row : row + 1], np.array([0]))
            assert (single.observations[0] == found.observations[place]).all()
            assert single.rewards[0] == found.rewards[place]
            assert all(single.info[fact][0] == found.info[fact][place] for fact in INFO)


@pytest.mark.parametrize("name", ["push", "drawer-close", "door-open", "basketball"])
def test_actions_in_float32_move_rows_alike_and_rewards_differ_by_that_precision(name):
    """The package then computes parts of its rewards in float32."""
    chosen, acting = goals(name, 3, seed=2), Acting(name, 3, seed=2)
    oracle, rules = (rows(official(name), chosen, 1) for rows in (OracleRows, VectorizedRows))
    observations, rows = oracle.observations, np.arange(3)
    for _ in range(60):
        actions = acting(observations).astype(np.float32)
        found, required = rules.step(actions, rows), oracle.step(actions, rows)
        observations = required.observations
        np.testing.assert_allclose(found.observations, observations, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found.rewards, required.rewards, rtol=0, atol=10 * np.finfo(np.float32).eps)


def test_a_hidden_goal_is_shown_as_zeros():
    hidden = OfficialClass("push", goal_visible=False, reward_version="v2")
    rows = VectorizedRows(hidden, goals("push", 2, seed=0), 1)
    found = rows.step(np.zeros((2, 4)), np.arange(2))
    assert (rows.observations[:, -3:] == 0).all()
    assert (found.observations[:, -3:] == 0).all()


def test_the_table_has_the_classes_of_ml10_in_order():
    assert (tuple(TRAIN_ROWS), tuple(TEST_ROWS)) == BENCHMARKS["ml10"]


def made(name, **options):
    return make_env(EnvConfig(name=f"metaworld-ml1-{name}", options=options))


def rewards_of(env, actions):
    """Observations and rewards of an episode from the first task on, through the adapter."""
    batch = env.unwrapped.batch(1, 1)
    batch.reset(np.array(env.task_set)[:1], np.zeros(1, np.uint64))
    steps = [batch.step(action[None], np.arange(1)) for action in actions]
    return [(step.observations, step.reward_terms["reward"], *step.facts.values()) for step in steps]


def test_an_option_chooses_who_computes_and_the_run_records_who_did():
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 4)).astype(np.float32)
    found = {how: rewards_of(made("reach", computation=how), actions) for how in ("auto", "vectorized", "oracle")}
    np.testing.assert_equal(found["auto"], found["vectorized"])
    for rules, package in zip(found["auto"], found["oracle"], strict=True):
        for a, b in zip(rules, package, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)
    recorded = [
        env_facts(EnvConfig(name=f"metaworld-ml1-{name}", options=options), made(name, **options))["computed_by"]
        for name, options in (
            ("reach", {}),
            ("hammer", {}),
            ("reach", {"computation": "oracle"}),
            ("reach", {"reward_version": "v1"}),
        )
    ]
    assert recorded == [{"reach": "vectorized"}, {"hammer": "oracle"}, {"reach": "oracle"}, {"reach": "oracle"}]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reach", {"computation": "fast"}, "computation is 'fast'; expected one of auto, vectorized, oracle"),
        (
            "hammer",
            {"computation": "vectorized"},
            "hammer has no rules for it; use 'auto' or 'oracle', or classes among",
        ),
        ("reach", {"computation": "vectorized", "reward_version": "v1"}, "reward_version is 'v1'; use version 'v2'"),
    ],
)
def test_a_computation_that_there_is_not_is_refused(name, options, message):
    with pytest.raises(EnvError, match=message):
        made(name, **options)


def test_values_at_the_margin_are_a_tenth_and_inside_one():
    margin = np.array([0.5, 2.0])
    for shape in (long_tail, gaussian):
        assert shape(margin, margin) == pytest.approx([0.1, 0.1])
        assert (shape(np.array([-1.0, 0.0]), margin) == 1).all()


def test_a_margin_of_zero_is_a_step():
    assert long_tail(np.array([-0.1, 0.0, 1e-9]), np.zeros(3)) == pytest.approx([1, 1, 0])


@given(st.floats(-2, 2), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(1e-3, 2))
def test_shapes_are_the_packages_tolerance(value, low, width, margin):
    bounds, excess = (low, low + width), beyond(np.array([value]), low, low + width)
    for shape, sigmoid in ((long_tail, "long_tail"), (gaussian, "gaussian")):
        required = reward_utils.tolerance(value, bounds=bounds, margin=margin, sigmoid=sigmoid)
        assert shape(excess, np.array([margin]))[0] == pytest.approx(required, abs=1e-12)


@given(UNIT, UNIT)
def test_hamacher_is_a_conjunction(first, second):
    a, b = np.array([first]), np.array([second])
    found = hamacher(a, b)[0]
    assert found == pytest.approx(reward_utils.hamacher_product(first, second), abs=1e-12)
    assert found == hamacher(b, a)[0]
    assert hamacher(a, np.ones(1))[0] == pytest.approx(first, abs=1e-12)
    assert found <= min(first, second) + 1e-12


def test_share_of_a_box_is_its_volume_up_to_a_place():
    empty, full = np.array([[0.0, 1.0, 0.0]]), np.array([[1.0, 0.0, 2.0]])
    assert fraction_of_box(np.array([[0.5, 0.5, 1.0]]), empty, full) == pytest.approx([0.125])
    assert fraction_of_box(np.array([[1.5, 0.5, 1.0]]), empty, full) == [1]


@settings(max_examples=50)
@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4).filter(lambda q: np.linalg.norm(q) > 0.1))
def test_quaternions_are_those_of_scipy(quaternion):
    turn = Rotation.from_quat(quaternion).as_matrix()
    assert quaternions(turn.reshape(1, 9))[0] == pytest.approx(Rotation.from_matrix(turn).as_quat(), abs=1e-12)


def test_quaternions_of_quarter_turns_have_scipys_signs():
    # Where two entries are equally great, the first decides.
    turns = Rotation.create_group("O").as_matrix()
    np.testing.assert_allclose(quaternions(turns.reshape(-1, 9)), Rotation.from_matrix(turns).as_quat(), atol=1e-12)
