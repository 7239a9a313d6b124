"""Meta-World's benchmarks as meta-environments: ML1 of each class, ML10, ML45, MT10 and MT50."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar, Literal

import gymnasium
import mujoco
import numpy as np
from gymnasium.spaces import Box

from metaloom.pipeline.envs.contract import EnvError, Fact, MetaEnv, TaskField, check_task
from metaloom.pipeline.envs.metaworld.batch import (
    ACTION_SIZE,
    FACTS,
    OBSERVATION_SIZE,
    Computation,
    MetaWorldBatch,
    check_computation,
    computed_by,
)
from metaloom.pipeline.envs.metaworld.names import BENCHMARKS, CLASSES, Split, class_name
from metaloom.pipeline.envs.metaworld.oracle import OfficialClass
from metaloom.pipeline.envs.metaworld.package import GOAL_SIZE, Tasks, benchmark_tasks
from metaloom.pipeline.envs.task_classes import Classes, nearest
from metaloom.pipeline.envs.task_sets import FixedTasks
from metaloom.pipeline.types import Array

RewardVersion = Literal["v1", "v2"]

_TABLE = (0.0, 0.55, 0.15)  # point at the center of videos, in m


class MetaWorld(FixedTasks, MetaEnv):
    """A Sawyer arm with a gripper at a table, and an object to move, such as a door, a puck or a button.

    | observation | content                                                                  | unit |
    | ----------- | ------------------------------------------------------------------------ | ---- |
    | 0-2         | position of the hand                                                     | m    |
    | 3           | gripper, from 0 closed to 1 open                                         | 1    |
    | 4-6, 7-10   | position and quaternion of the object, where the class has them          | m, 1 |
    | 11-13, 14-17| the same for a second object, otherwise zeros                            | m, 1 |
    | 18-35       | entries 0-17 one step earlier                                            |      |
    | 36-38       | the goal in MT benchmarks, zeros in ML benchmarks                        | m    |
    | 39-         | only in MT benchmarks: the class, one-hot                                | 1    |

    | action | content                                             | range  | unit   |
    | ------ | --------------------------------------------------- | ------ | ------ |
    | 0-2    | displacement of the point that the hand follows     | [-1,1] | 0.01 m |
    | 3      | force that closes the gripper                       | [-1,1] | 1      |

    | task field    | unit | distribution                                                                    |
    | ------------- | ---- | ------------------------------------------------------------------------------- |
    | class         | 1    | one of the benchmark's classes, by its number in names.CLASSES                  |
    | goal_1-goal_6 | 1    | the package's `rand_vec`, one of 50 per class: positions of object and goal, m  |

    | reward term | value                                             | unit |
    | ----------- | ------------------------------------------------- | ---- |
    | reward      | the package's, from 0 to 10 in version v2         | 1    |

    All episodes of a task start in the same state. They never terminate and are truncated after 500 steps. A control
    step is 0.0125 s (five physics steps). A new task takes effect at the next reset.

    Args:
        benchmark_seed: Seed from which the package draws a benchmark's goals.
        reward_version: v2, or v1 for the rewards of the benchmark's first publication.
        computation: Implementation of observations and rewards, see Computation.
        render_mode: None or rgb_array.

    Raises:
        EnvError: the package is missing, or an option is invalid.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 80}
    split: ClassVar[Split]
    goal_visible: ClassVar[bool] = False
    test_seed_offset: ClassVar[int] = 0  # offset that the package adds to the seed for test goals

    task_fields: tuple[TaskField, *tuple[TaskField, ...]] = (
        TaskField("class", "1", "number of the class of tasks, in the package's order"),
        *(TaskField(f"goal_{i}", "1", "value that the class draws for each goal") for i in range(1, GOAL_SIZE + 1)),
    )
    facts: tuple[Fact, ...] = FACTS

    def __init__(
        self,
        benchmark_seed: int = 0,
        reward_version: RewardVersion = "v2",
        render_mode: str | None = None,
        computation: Computation = "auto",
    ) -> None:
        split, where = self.split, type(self).__name__
        seed = benchmark_seed
        is_whole = isinstance(seed, int) and not isinstance(seed, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_whole or not 0 <= seed < 2**32 - 1:
            raise EnvError(f"{where}: benchmark_seed is {seed!r}; expected an integer from 0 to 2**32 - 2")
        if reward_version not in ("v1", "v2"):
            raise EnvError(f"{where}: reward_version is {reward_version!r}; expected v1 or v2")
        if render_mode not in (None, "rgb_array"):
            raise EnvError(f"{where}: render_mode is {render_mode!r}; expected None or 'rgb_array'")
        names = tuple(dict.fromkeys((*split.train, *split.test)))
        check_computation(where, computation, reward_version, names)
        self.reward_version, self.render_mode = reward_version, render_mode
        self.computation: Computation = computation
        self.recorded: dict[str, Any] = {
            "computed_by": {name: computed_by(name, computation, reward_version) for name in names}
        }
        self.task_set: Tasks = benchmark_tasks(split.train, benchmark_seed)
        self.test_task_set: Tasks | None = None
        if split.test:
            self.test_task_set = benchmark_tasks(split.test, benchmark_seed + self.test_seed_offset)
        self._numbers = [CLASSES.index(name) for name in names]
        centers = dict(zip(names, self._numbers, strict=True))
        self.task_classes: Classes | None = nearest("class", centers, split.test) if len(names) > 1 else None
        self._one_hot = {number: i for i, number in enumerate(self._numbers)} if self.goal_visible else {}
        size = OBSERVATION_SIZE + len(self._one_hot)
        self.observation_space: gymnasium.Space[Any] = Box(-np.inf, np.inf, (size,), np.float64)
        self.action_space: gymnasium.Space[Any] = Box(-1, 1, (ACTION_SIZE,), np.float32)
        self.observation_components: tuple[tuple[str, str], ...] = _components(self._one_hot)
        self.action_components: tuple[tuple[str, str], ...] = (
            *((f"hand_{axis}", "0.01 m") for axis in "xyz"),
            ("gripper", "1"),
        )
        self._episode: tuple[Array, list[Array]] | None = None
        self._renderer: mujoco.Renderer | None = None

    @cached_property
    def _row(self) -> MetaWorldBatch:
        return self.row_batch(1, 1)

    def set_task(self, task: Array) -> None:
        task = check_task(self, task)
        if task[0] not in self._numbers:
            known = ", ".join(f"{number} ({CLASSES[number]})" for number in self._numbers)
            raise EnvError(f"{type(self).__name__}.set_task: got the class {task[0]:g}; expected one of {known}")
        self._row.official(int(task[0])).goal_of(task[1:])
        super().set_task(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self._episode = self.task, []
        return super().reset(seed=seed)

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if self._episode is None:
            raise EnvError(f"{type(self).__name__}.step: there is no episode yet; call reset first")
        self._episode[1].append(np.array(action))
        return super().step(action)

    def row_batch(self, num_rows: int, num_threads: int) -> MetaWorldBatch:
        return MetaWorldBatch(self._official, self._one_hot, num_rows, num_threads, self.computation)

    def batch(self, num_rows: int, num_threads: int) -> MetaWorldBatch:
        return self.row_batch(num_rows, num_threads)

    def _official(self, number: int) -> OfficialClass:
        return OfficialClass(CLASSES[number], goal_visible=self.goal_visible, reward_version=self.reward_version)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without simulators. A copy replays the episode's actions to reach the same state."""
        state = {**vars(self), "_taken": None, "_renderer": None}
        state.pop("_row", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._episode is not None:
            task, actions = self._episode
            self._row.reset(task[None], np.zeros(1, np.uint64))
            for action in actions:
                self._row.step(action[None], np.zeros(1, np.int64))

    def render(self) -> Any:
        """Return an image as an array [height, width, 3] of uint8, or None without render_mode="rgb_array"."""
        if self.render_mode is None:
            return None
        model, data, camera = self.scene()
        if self._renderer is None or self._renderer.model is not model:
            self._close_renderer()
            self._renderer = mujoco.Renderer(model)
        self._renderer.update_scene(data, camera=camera)
        return self._renderer.render()

    def scene(self) -> tuple[Any, Any, Any]:
        """Return MuJoCo's model and data in the current state, and the camera for videos."""
        # Look at the table from in front of the robot. The package's own cameras at this position are upside down.
        camera = mujoco.MjvCamera()
        camera.lookat[:] = _TABLE
        camera.azimuth, camera.elevation, camera.distance = -45, -25, 1.4
        return *self._row.show(0), camera

    def close(self) -> None:
        self._close_renderer()
        self._row.close()

    def _close_renderer(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


class ML1(MetaWorld):
    """One task class with 50 training goals and 50 test goals. Goals are hidden; see MetaWorld."""

    test_seed_offset = 1


class ML10(MetaWorld):
    """Ten training classes and five test classes, with 50 goals each. Goals are hidden; see MetaWorld."""

    split: Split = BENCHMARKS["ml10"]


class ML45(MetaWorld):
    """Forty-five training classes and five test classes, with 50 goals each. Goals are hidden; see MetaWorld."""

    split: Split = BENCHMARKS["ml45"]


class MT10(MetaWorld):
    """Ten classes with 50 goals each. Observations include the goal and the class; see MetaWorld."""

    split: Split = BENCHMARKS["mt10"]
    goal_visible = True


class MT50(MetaWorld):
    """All 50 classes with 50 goals each. Observations include the goal and the class; see MetaWorld."""

    split: Split = BENCHMARKS["mt50"]
    goal_visible = True


for _task in CLASSES:
    _about = {"split": Split((_task,), (_task,)), "__doc__": f"ML1 of {_task}; see ML1.", "__module__": __name__}
    globals()[class_name(_task)] = type(class_name(_task), (ML1,), _about)


def _components(numbers: Iterable[int]) -> tuple[tuple[str, str], ...]:
    axes, turns = [("x", "m"), ("y", "m"), ("z", "m")], [(f"turn_{i}", "1") for i in range(4)]
    objects = [(f"{what}_{axis}", unit) for what in ("object", "object_2") for axis, unit in (*axes, *turns)]
    frame = [*((f"hand_{axis}", unit) for axis, unit in axes), ("gripper", "1"), *objects]
    return (
        *frame,
        *((f"previous_{name}", unit) for name, unit in frame),
        *((f"goal_{axis}", unit) for axis, unit in axes),
        *((f"is_{CLASSES[number]}", "1") for number in numbers),
    )
