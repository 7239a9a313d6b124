"""Inputs of Meta-World rules (read from n simulations), the common observation, and building blocks of rewards.

The building blocks come from the DeepMind Control Suite (Tassa et al. 2018, arXiv:1801.00690, "tolerance"), with
Hamacher's t-norm. All their operations are elementwise, so a row's results do not depend on other rows.
"""

# pyright: reportAttributeAccessIssue=false
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import mujoco
import numpy as np

from metaloom.pipeline.envs.contact_batch import PhysicsBatch
from metaloom.pipeline.types import Array

# Too small to change any other sum. It avoids 0 / 0 and makes the result 1 or 0, as each function requires.
_TINY = float(np.finfo(np.float64).tiny)

_LOG_VALUE_AT_MARGIN = float(np.log(0.1))


def norm(vectors: Array) -> Array:
    """Return the Euclidean norms [...] of vectors [..., 3]."""
    return np.sqrt(np.vecdot(vectors, vectors))


def beyond(values: Array, low: float, high: float) -> Array:
    """Return the distance by which values lie outside [low, high]; it is negative inside."""
    return np.maximum(low - values, values - high)


def long_tail(excess: Array, margin: Array | float) -> Array:
    """Return 1 for an excess up to 0, then 1 / (1 + (3 excess / margin)²), which is 0.1 at the margin.

    With a margin of 0, this is a step function.
    """
    outside = np.maximum(excess, 0)
    square = margin * margin + _TINY
    return square / (9 * (outside * outside) + square)


def gaussian(excess: Array, margin: Array) -> Array:
    """Return 1 for an excess up to 0, then 0.1 to the power of (excess / margin)²."""
    outside = np.maximum(excess, 0)
    return np.exp(_LOG_VALUE_AT_MARGIN * (outside * outside / (margin * margin + _TINY)))


def hamacher(first: Array, second: Array) -> Array:
    """Return the Hamacher product of values in [0, 1]: ab / (a + b - ab), or 0 if both are 0."""
    product = first * second
    return product / (first + second - product + _TINY)


def fraction_of_box(places: Array, empty: Array, full: Array) -> Array:
    """Return the volume fraction [n] of a box between its corner `empty` and points [n, 3]; 1 for points outside.

    `full` is the opposite corner, where the fraction is 1. Both corners are [n, 3].
    """
    inside = (np.minimum(empty, full) <= places) & (places <= np.maximum(empty, full))
    shares = (places - empty) / (full - empty)
    return np.where(inside.all(axis=1), shares[:, 0] * shares[:, 1] * shares[:, 2], 1.0)


FRAME_SIZE = 18
"""Size of one frame: hand 3, gripper opening 1, object 3, object quaternion 4, and 7 zeros for a second object."""

# Bounds of the hand's observation space, to which positions are clipped in observations and rewards.
_HAND_LOW, _HAND_HIGH = np.array([-0.525, 0.348, -0.0525]), np.array([0.525, 1.025, 0.7])
_WIDEST_GRIPPER = 0.1

# Entries of a rotation matrix whose sum or difference is four times the product of the quaternion's largest component
# and each other component. Row i applies if the largest component is x, y, z, w. The diagonal is filled separately.
_FIRST = np.array([[0, 3, 6, 7], [3, 0, 7, 2], [6, 7, 0, 3], [7, 2, 3, 0]])
_SECOND = np.array([[0, 1, 2, 5], [1, 0, 5, 6], [2, 5, 0, 1], [5, 6, 1, 0]])
_SIGNS = np.array([[0, 1, 1, -1], [1, 0, 1, -1], [1, 1, 0, -1], [-1, -1, -1, 0]])


class Source(NamedTuple):
    """A quantity to read from the simulator: an MjData field, for the body, site, geom or joint with this name."""

    field: Literal["xpos", "xquat", "site_xpos", "site_xmat", "geom_xpos", "geom_xmat", "qpos"]
    name: str


_HAND = {
    "hand": Source("xpos", "hand"),
    "left_claw": Source("xpos", "leftclaw"),
    "right_claw": Source("xpos", "rightclaw"),
    "left_finger": Source("site_xpos", "leftEndEffector"),
    "right_finger": Source("site_xpos", "rightEndEffector"),
}


@dataclass(frozen=True)
class Moment:
    """State of n rows after a control step."""

    actions: Array  # [n, 4]
    hand: Array  # position as observed, [n, 3] m
    opened: Array  # gripper opening, [n], from 0 (closed) to 1
    object: Array  # position as observed, [n, 3] m
    fingertips: Array  # midpoint between the fingertips, [n, 3] m
    scene: Mapping[str, Array]  # values of the class's and the hand's sources, keyed by name, [n, ...] each
    start: Mapping[str, Array]  # values from the start of the episode, keyed by name, [n, ...] each


class RowsEvaluation(NamedTuple):
    """Outcome of a control step, named as in the package's `info`; each field is an array [n] or a scalar."""

    rewards: Array  # rewards from 0 to 10
    success: Array  # True where the task is solved
    obj_to_target: Array | float  # distance between object and target in most classes
    in_place_reward: Array  # part of the reward for reaching the target
    grasp_reward: Array | float  # part of the reward for grasping
    near_object: Array | float  # True near the object in most classes, a number in others
    grasp_success: Array | float = 1.0  # True for a grasp; with `RowTask.touched`, before contacts are checked


@dataclass(frozen=True)
class RowTask:
    """Rules of a Meta-World class for n rows."""

    evaluate: Callable[[Moment], RowsEvaluation]  # computes rewards and success
    object: Source  # the object's observed position
    turn: Source | None  # the object's observed orientation, a quaternion or rotation matrix; None for zeros
    offset: tuple[float, float, float] | None = None  # added to the position, in m
    sources: Mapping[str, Source] = field(default_factory=dict[str, Source])  # other quantities that the rewards need
    # Attributes of the official environment with values from the episode's start, keyed by the name of the value.
    start: Mapping[str, str] = field(default_factory=dict[str, str])
    touched: bool = False  # a grasp requires both pads to press on the object


class Scene:
    """Live views of the quantities that a class reads from its simulations."""

    def __init__(self, task: RowTask, model: mujoco.MjModel, batch: PhysicsBatch) -> None:
        sources = {**_HAND, **task.sources, "object": task.object}
        if task.turn is not None:
            sources["turn"] = task.turn
        self._live = {name: _live(model, batch, source) for name, source in sources.items()}
        # y of the gripper's left and right pads, [N, 2], as a view regardless of the order of the bodies.
        left, right = (model.body(name).id for name in ("leftpad", "rightpad"))
        apart = right - left
        self._live["pads_y"] = batch.bind("xpos")[:, left : right + (1 if apart > 0 else -1) : apart, 1]
        self._offset = None if task.offset is None else np.array(task.offset)

    def of(self, rows: Array | slice) -> dict[str, Array]:
        """Return the source values of some rows, keyed by name, [n, ...] each."""
        return {name: live[rows] for name, live in self._live.items()}

    def write_frames(self, scene: Mapping[str, Array], frames: Array) -> None:
        """Write the observation into zero-initialized frames [n, FRAME_SIZE]."""
        frames[:, :3] = scene["hand"]
        clip_hand(frames)
        frames[:, 3] = np.minimum(norm(scene["right_claw"] - scene["left_claw"]) / _WIDEST_GRIPPER, 1)
        frames[:, 4:7] = scene["object"] if self._offset is None else scene["object"] + self._offset
        if "turn" in scene:
            # As in the official classes, w comes first for bodies but last for geoms and sites.
            turns = scene["turn"]
            frames[:, 7:11] = turns if turns.shape[1] == 4 else quaternions(turns)


def clip_hand(frames: Array) -> None:
    """Clip the hand position in frames [n, FRAME_SIZE] to the observation space, in place."""
    hand = frames[:, :3]
    np.minimum(np.maximum(hand, _HAND_LOW, out=hand), _HAND_HIGH, out=hand)


def quaternions(turns: Array) -> Array:
    """Convert rotation matrices [n, 9] in C order to quaternions [n, 4], with w last and the largest entry positive.

    Shepperd's method (1978), with the sign convention of `scipy.spatial.transform.Rotation`. The official classes use
    Rotation itself, which takes half as long as the physics of twenty rows.
    """
    trace = turns[:, 0] + turns[:, 4] + turns[:, 8]
    squares = np.concatenate([turns[:, ::4], trace[:, None]], axis=1)
    rows, greatest = np.arange(len(turns)), squares.argmax(axis=1)
    found = turns[rows[:, None], _FIRST[greatest]] + _SIGNS[greatest] * turns[rows[:, None], _SECOND[greatest]]
    found[rows, greatest] = 1 - trace + 2 * squares[rows, greatest]
    return found / np.sqrt(np.vecdot(found, found))[:, None]


def _live(model: mujoco.MjModel, batch: PhysicsBatch, source: Source) -> Array:
    """Return a live view [N, ...] of a source, which every call of the batch updates."""
    values = batch.bind(source.field)
    if source.field == "qpos":
        return values[:, int(model.joint(source.name).qposadr[0])]
    kind = {"site_xpos": model.site, "site_xmat": model.site, "geom_xpos": model.geom, "geom_xmat": model.geom}
    return values[:, kind.get(source.field, model.body)(source.name).id]
