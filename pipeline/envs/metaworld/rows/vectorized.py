"""Rows of one class of tasks with vectorized observations and rewards."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

import numpy as np

from metaloom.pipeline.envs.metaworld.oracle import INFO, MAX_STEPS, ClassRows, OfficialClass, RowsStep
from metaloom.pipeline.envs.metaworld.rows.scene import FRAME_SIZE, Moment, RowsEvaluation, Scene, clip_hand, norm
from metaloom.pipeline.envs.metaworld.rows.table import ROW_TASKS
from metaloom.pipeline.types import Array


class VectorizedRows(ClassRows):
    """Rows stepped by MuJoCo's batch and evaluated together by the class's rules.

    Results agree with OracleRows up to rounding, and no bit depends on the other rows.
    """

    def __init__(self, official: OfficialClass, goals: Array, num_threads: int) -> None:
        super().__init__(official, goals, num_threads)
        self._task = ROW_TASKS[official.name]
        self._scene = Scene(self._task, official.model, self.physics.batch)
        if self._task.touched:
            geoms = [official.model.geom(name) for name in ("objGeom", "leftpad_geom", "rightpad_geom")]
            places = self.physics.batch.bind("geom_xpos")
            self._object, *self._pads = (places[:, geom.id] for geom in geoms)
            reaches = [float(geom.rbound[0] + geom.margin[0]) for geom in geoms]
            self._reaches = [reaches[0] + reach for reach in reaches[1:]]
        self._start = {
            name: np.array([start.attributes[attribute] for start in self._starts], np.float64)
            for name, attribute in self._task.start.items()
        }
        self._steps = np.zeros(len(goals), np.int64)
        # The first observation is not clipped, but its copy in the second is.
        self._frames = self.observations[:, :FRAME_SIZE].copy()
        clip_hand(self._frames)
        space, shown = official.env.sawyer_observation_space, slice(2 * FRAME_SIZE, None)
        self._goals = np.clip(self.observations[:, shown], space.low[shown], space.high[shown])

    def step(self, actions: Array, rows: Array) -> RowsStep:
        """Step n of the rows (sorted, unique) with actions [n, 4].

        Rewards are computed in float64; the package computes parts of them in float32, the dtype of actions.
        """
        self.physics.step(actions, rows)
        self.physics.place(rows)
        some = self.physics.some(rows)
        scene = self._scene.of(some)
        # The current frame, the previous frame, the goal.
        frames = np.zeros((len(scene["hand"]), FRAME_SIZE))
        self._scene.write_frames(scene, frames)
        observations = np.concatenate([frames, self._frames[some], self._goals[some]], axis=1)
        self._frames[some] = frames
        moment = Moment(
            actions.astype(np.float64),
            hand=observations[:, :3],
            opened=observations[:, 3],
            object=observations[:, 4:7],
            fingertips=(scene["right_finger"] + scene["left_finger"]) / 2,
            scene=scene,
            start={name: values[some] for name, values in self._start.items()},
        )
        found = self._task.evaluate(moment)
        self._steps[some] += 1
        return RowsStep(
            observations, found.rewards, found.success, self._info(found, rows), self._steps[some] >= MAX_STEPS
        )

    def _info(self, found: RowsEvaluation, rows: Array) -> dict[str, Array]:
        grasped = self._touching(found.grasp_success, rows) if self._task.touched else found.grasp_success
        info = np.empty((len(INFO), len(rows)))
        parts = (found.near_object, grasped, found.grasp_reward, found.in_place_reward, found.obj_to_target)
        for place, values in enumerate((*parts, found.rewards)):
            info[place] = values
        return dict(zip(INFO, info, strict=True))

    def _touching(self, asked: Array | float, rows: Array) -> Array:
        """Return True where `asked` is True and both pads press on the object, [n].

        The package checks contacts row by row, only for rows where the bounding spheres of both pads meet the object's.
        """
        touching = np.array(asked, np.bool_)
        candidates = np.flatnonzero(touching)
        for pad, reach in zip(self._pads, self._reaches, strict=True):
            near = norm(pad[rows[candidates]] - self._object[rows[candidates]]) <= reach
            candidates = candidates[near]
        touching[:] = False
        for place in candidates.tolist():
            self.physics.show(int(rows[place]))
            touching[place] = self._official.env.touching_main_object
        return touching
