"""The ant: a four-legged robot that walks in a given direction or to a goal."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from metaloom.pipeline.envs.contract import EnvError, MetaEnv
from metaloom.pipeline.envs.mujoco_robot import Motion, MujocoRobot, ObsStyle, PearlRobot, check_obs_style, squared_norm
from metaloom.pipeline.envs.point import GOAL
from metaloom.pipeline.envs.task_classes import Classes, nearest
from metaloom.pipeline.envs.task_sets import AlongX, AnyDirection, draw_on_disk
from metaloom.pipeline.types import Array

TORSO = 1  # body index of the torso; body 0 is the world


class Ant(MujocoRobot, MetaEnv):
    """The ant without a task: model, physics and initial states of gymnasium's Ant-v5.

    | observation | content                                                                        | unit   |
    | ----------- | ------------------------------------------------------------------------------ | ------ |
    | 0           | height of the torso                                                            | m      |
    | 1-4         | orientation of the torso, quaternion w x y z                                   | 1      |
    | 5-12        | hip, ankle of the legs front left, front right, back left, back right          | rad    |
    | 13-15       | velocity of the torso, x y z                                                   | m/s    |
    | 16-18       | angular velocity of the torso, x y z                                           | rad/s  |
    | 19-26       | angular velocities in the order of 5-12                                        | rad/s  |
    | 27-110      | contact torque and force on each body, six values each, clipped to [-1, 1]     | N m, N |

    | action | content                                                                           | range   |
    | ------ | --------------------------------------------------------------------------------- | ------- |
    | 0-7    | torque at hip, ankle of back right, front left, front right, back left leg, 150 N m | [-1, 1] |

    The table describes obs_style promp. Its first six contact forces act on the world and are always 0; v5 omits them
    (size 105). PEARL's style omits all contact forces (size 27).

    Start: joint positions U(-0.1, 0.1) around the rest pose, velocities 0.1 N(0, 1). A control step is 0.05 s (five
    physics steps). Rewards use the position of MuJoCo's body frame, which the Runge-Kutta integrator leaves at its last
    stage. It differs from the joint positions by millimeters at most, as in both originals and in gymnasium.
    """

    frame_skip = 5
    derived: tuple[str, ...] = ("xpos", "cfrc_ext")
    derived_before: tuple[str, ...] = ("xpos",)
    reset_noise: float = 0.1
    normal_start = True
    control_cost: float = 0.5
    contact_cost: float = 5e-4
    shows_place = False  # True if observations start with the torso's x and y, which are optional in v5
    shows_contacts_to_pearl = False

    def __init__(self, obs_style: ObsStyle = "promp", render_mode: str | None = None) -> None:
        self.obs_style = check_obs_style(self, obs_style, ("promp", "pearl", "v5"))
        super().__init__("ant.xml", render_mode)

    def observe(self, qpos: Array, qvel: Array) -> Array:
        return np.concatenate([qpos[:, 0 if self.shows_place else 2 :], qvel], axis=1)

    def sense(self, derived: Mapping[str, Array]) -> Sequence[Array]:
        if self.obs_style == "pearl" and not self.shows_contacts_to_pearl:
            return []
        first = 1 if self.obs_style == "v5" else 0
        return [np.clip(derived["cfrc_ext"][:, first:], -1, 1)]

    def reward_terms(self, motion: Motion, tasks: Array) -> dict[str, Array]:
        before, place = motion.derived_before["xpos"][:, TORSO, :2], motion.derived["xpos"][:, TORSO, :2]
        return {
            **self.task_terms(place, (place - before) / motion.dt, tasks),
            "control": -self.control_cost * squared_norm(motion.actions),
            "contact": -self.contact_cost * squared_norm(np.clip(motion.derived["cfrc_ext"], -1, 1)),
        }

    @abstractmethod
    def task_terms(self, place: Array, velocity: Array, tasks: Array) -> dict[str, Array]:
        """Return reward terms, [n] each, given the torso's position [n, 2] in m and velocity [n, 2] in m/s."""


class AntWalk:
    """Mixin for ants that walk in a direction and can fall. List it before Ant.

    | reward term | value                                                              | unit  |
    | ----------- | ------------------------------------------------------------------ | ----- |
    | run         | direction · v, mean over the step                                  | m/s   |
    | survive     | 1 at each step                                                     | 1     |
    | control     | -0.5 * ‖action‖²                                                   | 1     |
    | contact     | -5e-4 * sum of squares of the contact forces, each clipped to ±1   | 1     |

    Terminates when the torso's height leaves a range, or when a joint's position or velocity is not finite.
    """

    heights: tuple[float, float] = (0.0, 1.0)

    def task_terms(self, place: Array, velocity: Array, tasks: Array) -> dict[str, Array]:
        run: Array = self.run_reward(velocity, tasks)  # pyright: ignore[reportAttributeAccessIssue]
        return {"run": run, "survive": np.ones(len(place))}

    def terminal(self, motion: Motion, tasks: Array) -> Array:
        finite = np.isfinite(motion.qpos).all(axis=1) & np.isfinite(motion.qvel).all(axis=1)
        height = motion.qpos[:, 2]
        return ~(finite & (height >= self.heights[0]) & (height <= self.heights[1]))


class AntDir(AlongX, AntWalk, Ant):
    """Walk forward or backward along x; only the reward reveals which (ProMP's AntRandDirec).

    Observation, action, start: see Ant. Task: see OneWayOrTheOther. Reward terms: see AntWalk. Terminates unless the
    torso is 0 to 1 m high.
    """


class AntDir2D(AnyDirection, AntWalk, Ant):
    """Walk in a direction that only the reward reveals (ProMP's AntRandDirec2D).

    Observation, action, start: see Ant. Task: see AnyDirection. Reward terms: see AntWalk. Terminates unless the torso
    is 0 to 1 m high.
    """


class ToGoal:
    """Mixin for ants that go to a goal. List it before Ant.

    | task field     | unit | distribution                                                        |
    | -------------- | ---- | ------------------------------------------------------------------- |
    | goal_x, goal_y | m    | uniform on a disk of radius 3 around the start                      |

    | reward term | value                                                              | unit  |
    | ----------- | ------------------------------------------------------------------ | ----- |
    | distance    | -(abs(x - goal_x) + abs(y - goal_y)), of the torso                 | m     |
    | control     | -0.1 * ‖action‖²                                                   | 1     |
    | contact     | -5e-4 * sum of squares of the contact forces, each clipped to ±1   | 1     |
    """

    task_fields = GOAL
    control_cost: float = 0.1
    shows_place = True
    shows_contacts_to_pearl = True

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        return draw_on_disk(num_tasks, rng, radius=3)

    def task_terms(self, place: Array, velocity: Array, tasks: Array) -> dict[str, Array]:
        return {"distance": -(np.abs(place[:, 0] - tasks[:, 0]) + np.abs(place[:, 1] - tasks[:, 1]))}


class AntGoal(ToGoal, Ant):
    """Go to a goal that only the reward reveals (ProMP's AntRandGoal). Never terminates.

    Observation, action, start: see Ant. In every style, observations start with the torso's x and y (2 more entries),
    without which a robot could not find its goal. Task and reward: see ToGoal.
    """


class PearlAntDir(PearlRobot, AnyDirection, AntWalk, Ant):
    """Walk in one of 100 directions (PEARL's ant-dir): AntDir2D without contact forces in the observation (size 27).

    Terminates unless the torso is 0.2 to 1 m high. Task: see AnyDirection and PearlRobot. With the option
    `forward_backward`, (1, 0) and (-1, 0) are the only two tasks, and none is held out.

    The original tests on its two training directions, and its contact cost was 0 in the MuJoCo version of its time.
    """

    heights: tuple[float, float] = (0.2, 1.0)

    def __init__(
        self,
        forward_backward: bool = False,
        obs_style: ObsStyle = "pearl",
        render_mode: str | None = None,
        *,
        num_train_tasks: int = 100,
        num_test_tasks: int = 30,
    ) -> None:
        super().__init__(obs_style, render_mode, num_train_tasks=num_train_tasks, num_test_tasks=num_test_tasks)
        if not isinstance(forward_backward, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise EnvError(f"{type(self).__name__}: forward_backward is {forward_backward!r}; expected true or false")
        if forward_backward:
            if (num_train_tasks, num_test_tasks) != (100, 30):
                raise EnvError(
                    f"{type(self).__name__}: num_train_tasks or num_test_tasks is set but forward_backward is on, "
                    "which has exactly two tasks; remove one of them"
                )
            self.task_set: tuple[tuple[float, ...], ...] | None = ((-1.0, 0.0), (1.0, 0.0))
            self.test_task_set: tuple[tuple[float, ...], ...] | None = None
            self.task_classes: Classes | None = nearest(
                ("direction_x", "direction_y"), {"forward": (1, 0), "backward": (-1, 0)}
            )


class PearlAntGoal(PearlRobot, ToGoal, Ant):
    """Go to one of 150 goals (PEARL's ant-goal): AntGoal with fixed goals. Task: see ToGoal and PearlRobot."""

    def __init__(
        self,
        obs_style: ObsStyle = "pearl",
        render_mode: str | None = None,
        *,
        num_train_tasks: int = 150,
        num_test_tasks: int = 30,
    ) -> None:
        super().__init__(obs_style, render_mode, num_train_tasks=num_train_tasks, num_test_tasks=num_test_tasks)
