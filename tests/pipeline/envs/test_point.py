from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.pictures import SIDE
from metaloom.pipeline.envs.point import Navigation2D, Point2D, Point2DGoal
from metaloom.pipeline.envs.point_corner import PointCorner, PointMomentum, PointWalls
from metaloom.pipeline.envs.point_pearl import PearlPointRobot, PearlSparsePointRobot
from metaloom.pipeline.envs.registry import make_env

GOLDEN = Path(__file__).parents[2] / "golden"
moves = st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=60)
angles = st.floats(0, 2 * np.pi)
CORNER = np.array([[2.0, 2.0]])


def terms(env: PointCorner, state: list[float], next_state: list[float], goal: list[float]) -> float:
    (term,) = env.reward_terms(np.array([state]), np.array([next_state]), np.array([goal])).values()
    return float(term[0])


@pytest.mark.parametrize("reward", ["sparse", "dense", "dense_squared"])
def test_corner_agrees_with_the_original_to_1e_6(reward: str) -> None:
    golden = np.load(GOLDEN / "env_point_corner_normalized.npz")
    env = make_env(EnvConfig(name="point-corner", options={"reward": reward}))
    env.reset(seed=0)
    point = env.unwrapped
    assert isinstance(point, PointCorner)
    for state, action, goal, next_state, value in zip(
        *(golden[f"{reward}_{name}"] for name in ("state", "policy_action", "goal", "next_state", "reward")),
        strict=True,
    ):
        env.set_task(goal)
        point._row._states[0] = state
        observation, found, *_ = env.step(action)
        np.testing.assert_allclose(observation, next_state, atol=1e-6, rtol=0)
        assert found == pytest.approx(value, abs=1e-6)


def test_a_picture_of_walls_shows_them_whole_but_for_their_gaps() -> None:
    env = PointWalls()
    env.set_task(np.array([2.0, 2.0, 1.0, 0.0, 0.0, 2.0]))
    env.reset(seed=0)
    picture = env.render()
    assert (picture == (130, 90, 60)).all(axis=-1).any()
    for radius, gap in ((1.0, (1.0, 0.0)), (2.0, (0.0, 2.0))):
        for angle in np.arange(0, 2 * np.pi, 0.01):
            place, away = (r * np.array([np.cos(angle), np.sin(angle)]) for r in (radius, radius + 0.05))
            far = np.linalg.norm(place - gap)
            (column, row), (c, r) = (np.rint((p * (1, -1) / 2.5 + 1) / 2 * 319).astype(int) for p in (place, away))
            if abs(far - 1) > 0.1:
                assert (picture[row, column, 0] < 220) == (far > 1)
            assert picture[r, c, 0] >= 228


@pytest.mark.parametrize(("env", "reach"), [(Navigation2D, 0.8), (PearlPointRobot, 1.5)])
def test_a_picture_reaches_a_little_beyond_the_goals(env: type, reach: float) -> None:
    robot = env()
    robot.set_task(np.array([reach / 2, 0.0]))
    robot.reset(seed=0)
    robot._seen = [np.array([0.0, reach / 2])]
    goal = (robot.render() == (60, 160, 75)).all(axis=-1).nonzero()
    assert np.mean(goal, axis=1) == pytest.approx([159.5, 159.5 * 1.5], abs=1)


def test_a_picture_shows_the_way_the_goal_the_other_goals_and_the_wall_where_they_are() -> None:
    env = PointCorner()
    env.set_task(np.array([2.0, -2.0]))
    env.reset(seed=0)
    env._seen = [np.array([0.0, 0.0]), np.array([-1.0, 1.0])]
    picture = env.render()
    assert (picture.shape, picture.dtype) == ((320, 320, 3), np.uint8)

    def at(x: float, y: float) -> tuple[int, ...]:
        """The color at a position in m, of which the second axis points up, in a picture from -2.5 to 2.5."""
        column, row = (round((place + 2.5) / 5 * (SIDE - 1)) for place in (x, -y))
        return tuple(picture[row, column].tolist())

    assert at(2, -2) == (60, 160, 75)
    assert [at(x, y) for x, y in ((2, 2), (-2, 2), (-2, -2))] == [(205, 205, 205)] * 3
    assert (at(-1, 1), at(-0.5, 0.5), at(0, 0)) == ((25, 60, 150), (120, 150, 210), (120, 150, 210))
    # The agent's disk reaches 5 pixels, those of other goals 4, and that of the goal 7.
    assert picture[[92, 35, 292], [91, 291, 293]].tolist() == [[255, 255, 255]] * 3
    # A path is 3 pixels wide, and 5 where a step ended; a meter has 64.
    assert at(-0.468, 0.532) == at(0.05, -0.05) == at(0.5, 1.5) == (255, 255, 255)
    assert {at(line, 0.5) for line in (-2, -1, 0, 1, 2)} == {(228, 228, 228)}


@given(moves)
def test_a_point_moves_by_its_clipped_action(actions: list[tuple[float, float]]) -> None:
    env = PointCorner()
    start, _ = env.reset(seed=1)
    place = start
    for action in actions:
        place, *_ = env.step(np.array(action))
    np.testing.assert_allclose(place - start, np.clip(actions, -0.2, 0.2).sum(axis=0), atol=1e-12)


@given(moves)
def test_momentum_adds_its_clipped_action_to_the_velocity_that_moves_it(actions: list[tuple[float, float]]) -> None:
    env = PointMomentum()
    start, _ = env.reset(seed=1)
    observations = np.array([start] + [env.step(np.array(action))[0] for action in actions])
    np.testing.assert_allclose(np.diff(observations[:, 2:], axis=0), np.clip(actions, -0.1, 0.1), atol=1e-12)
    np.testing.assert_allclose(np.diff(observations[:, :2], axis=0), observations[1:, 2:], atol=1e-12)


@given(moves, angles, angles)
def test_a_wall_is_only_crossed_outwards_near_its_gap(
    actions: list[tuple[float, float]], inner: float, outer: float
) -> None:
    env = PointWalls()
    gaps = [r * np.array([np.cos(a), np.sin(a)]) for r, a in ((1, inner), (2, outer))]
    env.set_task(np.concatenate([[2.0, 2.0], *gaps]))
    before, _ = env.reset(seed=2)
    for action in actions:
        after, *_ = env.step(np.array(action))
        for wall, gap in zip((1, 2), gaps, strict=True):
            if np.linalg.norm(before) <= wall < np.linalg.norm(after):
                assert np.linalg.norm(after - gap) <= 1
        before = after


def walled(action: list[float], gap_1: list[float]) -> tuple[np.ndarray, float]:
    env = PointWalls()
    env.set_task(np.array([2.0, 2.0, *gap_1, 2.0, 0.0]))
    env.reset(seed=0)
    env._row._states[0] = [0.95, 0.0]
    observation, reward, *_ = env.step(np.array(action))
    return observation, reward


def test_a_blocked_move_ends_just_inside_the_wall_and_is_rewarded_for_the_place_it_ends_at() -> None:
    place, reward = walled([0.2, 0.0], gap_1=[-1.0, 0.0])
    np.testing.assert_allclose(place, [1 / (1 + 1e-6 / 1.15), 0.0], rtol=1e-12)
    assert np.linalg.norm(place) < 1
    assert reward == -np.linalg.norm(place - CORNER[0])


def test_a_move_through_the_gap_and_a_move_inwards_are_free() -> None:
    np.testing.assert_allclose(walled([0.2, 0.0], gap_1=[1.0, 0.0])[0], [1.15, 0.0])
    np.testing.assert_allclose(walled([-0.2, 0.0], gap_1=[-1.0, 0.0])[0], [0.75, 0.0])


def test_a_point_exactly_on_a_wall_is_still_held_by_it() -> None:
    env = PointWalls()
    tasks = np.array([[2.0, 2.0, -1.0, 0.0, -2.0, 0.0]])
    for wall in (1.0, 2.0):
        moved = env.advance(np.array([[wall, 0.0]]), np.array([[0.2, 0.0]]), tasks)
        assert np.linalg.norm(moved) < wall
    # A move that ends on a wall does not cross it, and one that ends 1 m from the gap ends near enough.
    assert env.advance(np.array([[0.875, 0.0]]), np.array([[0.125, 0.0]]), tasks).tolist() == [[1.0, 0.0]]
    tasks[:, 2] = 0.125
    assert env.advance(np.array([[1.0, 0.0]]), np.array([[0.125, 0.0]]), tasks).tolist() == [[1.125, 0.0]]


def test_walls_sparse_reward_is_progress_near_the_goal_and_nothing_elsewhere() -> None:
    env = PointWalls(reward="sparse")
    gaps = [1.0, 0.0, 2.0, 0.0]
    assert terms(env, [1.0, 1.0], [1.1, 1.1], [2.0, 2.0, *gaps]) == pytest.approx(0.1 * np.sqrt(2))
    assert terms(env, [-1.0, 0.0], [-0.9, 0.0], [2.0, 2.0, *gaps]) == 0
    assert terms(env, [-0.1, 2.0], [0.0, 2.0], [2.0, 2.0, *gaps]) == 0


@pytest.mark.parametrize(
    ("state", "next_state", "expected"),
    [
        ([0.3, 0.3], [0.4, 0.3], np.hypot(1.7, 1.7) - np.hypot(1.6, 1.7)),  # progress in the goal's quadrant
        ([0.1, 0.1], [0.2, 0.2], 0.0),  # too near the start: 0.4 < 0.5
        ([0.25, 0.0], [0.25, 0.25], np.hypot(1.75, 2) - np.hypot(1.75, 1.75)),  # 0.5 is far enough
        ([-0.4, 0.4], [-0.3, 0.4], 0.0),  # another corner is nearer
        ([0.2, 0.5], [0.0, 0.6], np.hypot(1.8, 1.5) - np.hypot(2.0, 1.4)),  # two corners equally near count
    ],
)
def test_corner_sparse_reward_cases(state: list[float], next_state: list[float], expected: float) -> None:
    assert terms(PointCorner(), state, next_state, [2.0, 2.0]) == pytest.approx(expected, abs=1e-12)


def test_momentum_rewards_by_hand() -> None:
    state, next_state = [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.5, 0.5]
    goal = [2.0, 2.0]
    assert terms(PointMomentum(), state, next_state, goal) == pytest.approx(2 - np.sqrt(2))
    assert terms(PointMomentum(), state, [-1.0, 0.0, 0.0, 0.0], goal) == 0
    assert terms(PointMomentum("dense"), state, next_state, goal) == pytest.approx(-np.sqrt(2))
    assert terms(PointMomentum("dense_squared"), state, next_state, goal) == pytest.approx(-2)


def test_the_goal_point_ends_at_its_goal_and_not_at_the_origin() -> None:
    env = Point2DGoal()
    env.set_task(np.array([0.25, -0.1]))
    observation, _ = env.reset(seed=0)
    assert np.array_equal(observation, [0.0, 0.0])
    _, _, terminated, _, _ = env.step(np.zeros(2))
    assert not terminated
    tasks = np.array([[0.5, 0.5]])
    near = [env.terminal(tasks + np.array([[x, 0.0]]), tasks)[0] for x in (0.0099, 0.0101)]
    assert near == [True, False]
    for action in ([0.1, -0.1], [0.1, 0.0], [0.045, 0.005]):
        _, reward, terminated, _, _ = env.step(np.array(action))
    assert terminated
    assert reward == pytest.approx(-np.hypot(0.005, 0.005))


def test_the_plain_point_ends_at_the_origin() -> None:
    env = Point2D()
    env.reset(seed=0)
    env._row._states[0] = [0.1, 0.1]
    assert not env.step(np.array([-0.1, -0.08]))[2]
    _, reward, terminated, _, _ = env.step(np.array([0.0, -0.02]))
    assert terminated
    assert reward == pytest.approx(0, abs=1e-12)
    near = [env.terminal(np.array([[0.0, y]]), np.zeros((1, 0)))[0] for y in (0.0099, 0.01)]
    assert near == [True, False]
    assert env.action_space.high.tolist() == PearlPointRobot().action_space.high.tolist() == [0.1, 0.1]


@pytest.mark.parametrize(
    ("env", "low", "high"),
    [
        (Point2D, -2, 2),
        (PointCorner, -0.2, 0.2),
        (PointWalls, -0.2, 0.2),
        (PointMomentum, [-0.2, -0.2, -0.1, -0.1], [0.2, 0.2, 0.1, 0.1]),
        (PearlPointRobot, -1, 1),
    ],
)
def test_starts_are_uniform_over_their_box(env: type, low: float | list[float], high: float | list[float]) -> None:
    robot, low, high = env(), np.array(low), np.array(high)
    starts = np.array([robot.reset(seed=s)[0] for s in range(400)])
    # 400 draws: the mean of U(low, high) has a standard error of (high - low) / sqrt(12 * 400).
    assert ((low <= starts.min(axis=0)) & (starts.min(axis=0) < low * 0.9)).all()
    assert ((high * 0.9 < starts.max(axis=0)) & (starts.max(axis=0) <= high)).all()
    assert (np.abs(starts.mean(axis=0)) < 5 * (high - low) / np.sqrt(12 * 400)).all()


def test_gaps_lie_on_their_walls() -> None:
    tasks = PointWalls().sample_tasks(100, np.random.default_rng(0))
    np.testing.assert_allclose(np.linalg.norm(tasks[:, 2:4], axis=1), 1)
    np.testing.assert_allclose(np.linalg.norm(tasks[:, 4:6], axis=1), 2)
    assert {tuple(goal) for goal in tasks[:, :2].tolist()} == set(PointCorner.task_set)


@pytest.mark.parametrize(("env", "reward"), [(PointCorner, "dens"), (PointWalls, "dense_squared")])
def test_an_unknown_reward_is_refused_with_the_ones_there_are(env: type, reward: str) -> None:
    with pytest.raises(EnvError, match=f"{env.__name__}: reward is '{reward}'; expected one of dense, "):
        env(reward=reward)


@pytest.mark.parametrize(("env", "limit"), [(Point2DGoal, 2), (Navigation2D, 0.5)])
def test_goals_are_uniform_over_their_square(env: type, limit: float) -> None:
    goals = env().sample_tasks(400, np.random.default_rng(0))
    assert -limit <= goals.min() < -0.9 * limit
    assert 0.9 * limit < goals.max() <= limit
    assert np.abs(goals.mean(axis=0)).max() < 5 * 2 * limit / np.sqrt(12 * 400)


def test_navigation_moves_at_most_a_tenth_of_a_metre_per_axis_and_ends_at_its_goal() -> None:
    env = Navigation2D()
    env.set_task(np.array([0.15, 0.0]))
    assert np.array_equal(env.reset(seed=3)[0], [0.0, 0.0])
    place, reward, terminated, *_ = env.step(np.array([7.0, 0.0]))
    assert place.tolist() == [0.1, 0.0]
    assert reward == pytest.approx(-0.05)
    assert not terminated
    assert env.step(np.array([0.045, 0.005]))[2]


def test_pearls_goals_lie_in_a_square_80_to_train_on_and_20_to_test_with() -> None:
    train, test = np.array(PearlPointRobot().task_set), np.array(PearlPointRobot().test_task_set)
    assert (train.shape, test.shape) == ((80, 2), (20, 2))
    assert np.abs(np.concatenate([train, test])).max() <= 1
    assert np.abs(train).max() > 0.9


def test_pearls_sparse_goals_are_the_even_points_of_a_half_circle() -> None:
    goals = np.concatenate([PearlSparsePointRobot().task_set, PearlSparsePointRobot().test_task_set])
    np.testing.assert_allclose(np.linalg.norm(goals, axis=1), 1)
    angles = np.sort(np.arctan2(goals[:, 1], goals[:, 0]))
    np.testing.assert_allclose(angles, np.linspace(0, np.pi, 100), atol=1e-12)
    # Shuffled: tasks to test with are not all at one end.
    assert np.ptp(np.array(PearlSparsePointRobot().test_task_set)[:, 0]) > 1


@pytest.mark.parametrize(("place", "sparse"), [([1.0, 0.0], 1.0), ([0.9, 0.0], 0.9), ([0.75, 0.0], 0.0)])
def test_pearls_sparse_reward_is_seen_near_the_goal_only(place: list[float], sparse: float) -> None:
    goal, state = np.array([[1.0, 0.0]]), np.array([place])
    (dense,) = PearlSparsePointRobot().reward_terms(state, state, goal).values()
    (nearness,) = PearlSparsePointRobot("sparse").reward_terms(state, state, goal).values()
    assert dense == pytest.approx([place[0] - 1.0])
    assert nearness == pytest.approx([sparse])


def test_pearls_rewards_share_their_episodes() -> None:
    dense, sparse = PearlSparsePointRobot("dense"), PearlSparsePointRobot("sparse")
    for env in (dense, sparse):
        env.set_task(np.array(PearlSparsePointRobot().task_set[3]))
        env.reset(seed=1)
    for action in np.random.default_rng(0).uniform(-0.1, 0.1, (20, 2)):
        assert np.array_equal(dense.step(action)[0], sparse.step(action)[0])


def test_pearls_unknown_reward_is_refused() -> None:
    with pytest.raises(EnvError, match="PearlSparsePointRobot: reward is 'both'; expected one of dense, sparse"):
        PearlSparsePointRobot("both")  # pyright: ignore[reportArgumentType]
