import numpy as np
import pytest

from metaloom.pipeline.envs.hopper import HopperRandParams
from metaloom.pipeline.envs.mujoco_robot import Motion


def motion(*, forward: float = 0.0, qvel: float = 0.0, **state: float) -> Motion:
    qpos = np.zeros((1, 6))
    qpos[0, :4] = forward, state.get("height", 1.25), state.get("angle", 0.0), state.get("thigh", 0.0)
    return Motion(np.zeros((1, 6)), qpos, np.full((1, 6), qvel), np.array([[1.0, -1.0, 0.5]]), dt=0.008)


def test_rewards_by_hand() -> None:
    hopper = HopperRandParams()
    terms = hopper.reward_terms(motion(forward=0.016), hopper.task[None])
    assert {name: float(term[0]) for name, term in terms.items()} == pytest.approx(
        {"run": 2.0, "alive": 1.0, "control": -0.00225}
    )
    assert hopper.dt == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("state", "fallen"),
    [
        ({}, False),
        ({"height": 0.7}, True),
        ({"height": 9.0}, False),
        ({"height": np.inf}, True),
        ({"angle": 0.2}, True),
        ({"angle": -0.19}, False),
        ({"thigh": -100.0}, True),
        ({"qvel": 100.0}, True),
        ({"qvel": 99.0}, False),
        ({"qvel": np.nan}, True),
        ({"forward": 1e6}, False),
        ({"forward": np.nan}, True),
    ],
)
def test_ends_by_height_angle_or_a_state_out_of_bounds(state: dict[str, float], fallen: bool) -> None:
    hopper = HopperRandParams()
    assert hopper.terminal(motion(**state), hopper.task[None]).tolist() == [fallen]
