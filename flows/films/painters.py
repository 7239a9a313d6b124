"""Renderers of environments: OpenGL, flat shapes, or the `render` method of the environment."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import mujoco
import numpy as np
from PIL import Image, ImageDraw

from metaloom.flows.errors import UsageError
from metaloom.flows.films.opengl import RendererName, choose_renderer
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.envs.point import PointRobot
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.shown import error_text
from metaloom.pipeline.types import Array

_SKY, _GROUND, _LINE = (214, 228, 240), (176, 190, 176), (150, 165, 150)
_GOAL = np.array([60, 160, 75, 255], np.float32) / 255  # color of goals, which is also used for point robots
_SMOOTH = 2  # supersampling factor, which smooths edges
_FAR = 25  # maximum distance from the camera of lines on the ground, in meters
_CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)
_FACES = ((0, 1, 3, 2), (4, 5, 7, 6), (0, 1, 5, 4), (2, 3, 7, 6), (0, 2, 6, 4), (1, 3, 7, 5))

_WIDEST, _LOWEST = 18.0, 3.0
"""Maximum width and minimum height of the visible area in meters. On longer paths, the camera follows the robot."""
_AROUND = 1.0  # margin in meters around a robot's path
_ABOVE, _HIGHEST = 0.6, 1.35  # a goal's height above the torso, and above the ground, in meters

Point = tuple[float, float]
Goal = Callable[[], Array]  # function that returns the current position of a goal in meters, [3]


class Painter(Protocol):
    """Renderer of the current state of an environment. Subclasses without resources may omit `close`."""

    def draw(self) -> Array:
        """Return a picture of the current state, [height, width, 3] uint8."""
        ...

    def close(self) -> None:
        """Release the renderer's resources."""


def drawable(config: EnvConfig) -> MetaEnv:
    """Build an environment that can be drawn, or raise UsageError."""
    env = make_env(config)
    if _is_robot(env) or _scene(env) or env.render_mode == "rgb_array":
        return env
    modes = env.metadata.get("render_modes") or ()
    env.close()
    if "rgb_array" not in modes:
        raise UsageError(
            f"the environment {config.name} has the render_modes {[*modes]}. For a video, it needs rgb_array among "
            "them, a `render_mode` argument and a `render` method, or else a MuJoCo model in `model` and `data`"
        )
    return make_env(config.model_copy(update={"options": {**config.options, "render_mode": "rgb_array"}}))


def painter_of(
    env: MetaEnv,
    size: tuple[int, int],
    renderer: RendererName = "auto",
    way: Array | None = None,
    goal: Goal | None = None,
) -> Painter:
    """Return a painter for an environment; `size` is the width and height of its pictures in pixels.

    `way` contains the positions that must stay visible: [n, 3] for a moving robot, [n, 2] for a point. If it is None,
    the camera follows the robot. `goal` is the goal of a robot, which is drawn as a green ball.
    """
    if scene := _scene(env):
        return _Scene(scene, size, choose_renderer(renderer))
    if not _is_robot(env):
        if way is not None:
            point: Any = env.unwrapped
            point.reach = max(point.reach, float(np.abs(way).max()) + 0.2)
        return _Own(env)
    robot: Any = env.unwrapped
    camera = _camera(robot.model) if way is None else camera_of_way(robot.model, way, size)
    return _of_mujoco(robot.model, robot.data, camera, size, choose_renderer(renderer), goal)


def goal_of(env: MetaEnv, way: Array) -> Goal | None:
    """Return a function that returns the current position of a robot's goal, [3]; None if the task has no goal to draw.

    The goal for a target velocity is where the robot should be now; for a direction, it is as far away as `way` leads.
    """
    if way.shape[1] == 2 or not env.task_fields:
        return None
    name, robot, (x, y, z) = env.task_fields[0].name, cast("Any", env.unwrapped), way[0]
    # Above low robots, which would hide it, but not above the heads of walkers.
    z = max(z, min(z + _ABOVE, _HIGHEST))
    if name == "goal_x":
        return lambda: np.array([*env.task[:2], z])
    if name == "velocity":
        return lambda: np.array([x + env.task[0] * robot.data.time, y, z])
    if name not in ("direction", "direction_x"):
        return None
    far = np.linalg.norm((way - way[0])[:, :2], axis=1).max()
    return lambda: np.array([x, y, z]) + far * np.array([*env.task, 0, 0][:3])


def position_of(env: MetaEnv) -> Callable[[], Array] | None:
    """Return a function that returns the position of a moving robot, [3], or point, [2], in meters; None for others."""
    if isinstance(env.unwrapped, PointRobot):
        return env.unwrapped.whereabouts
    if _scene(env) or not _is_robot(env):
        return None
    robot: Any = env.unwrapped
    if _camera(robot.model).type == mujoco.mjtCamera.mjCAMERA_FREE:
        return None
    return lambda: robot.data.xpos[robot.model.jnt_bodyid[0]].copy()


def _of_mujoco(
    model: Any, data: Any, camera: Any, size: tuple[int, int], backend: RendererName, goal: Goal | None = None
) -> Painter:
    return (FlatPainter if backend == "flat" else _OpenGL)(model, data, camera, size, goal)


def _mark(scene: Any, goal: Goal | None) -> None:
    """Add a green ball to a scene at the goal, if there is one."""
    if goal is not None:
        ball, size = mujoco.mjtGeom.mjGEOM_SPHERE, np.full(3, 0.15)
        mujoco.mjv_initGeom(scene.geoms[scene.ngeom], ball, size, goal(), np.eye(3).ravel(), _GOAL)
        scene.ngeom += 1


def _scene(env: MetaEnv) -> Callable[[], tuple[Any, Any, Any]] | None:
    """Return a function that returns MuJoCo's model, data and camera if each task has its own model, else None."""
    return getattr(env.unwrapped, "scene", None)


def _is_robot(env: MetaEnv) -> bool:
    return isinstance(getattr(env.unwrapped, "model", None), mujoco.MjModel)


def _camera(model: Any) -> Any:
    """Return the model's own tracking camera, or one that follows a free first body, or the default free camera."""
    camera = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, camera)
    track = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
    if track >= 0:
        camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, track
    elif model.njnt and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE:
        camera.type, camera.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, model.jnt_bodyid[0]
    return camera


def camera_of_way(model: Any, way: Array, size: tuple[int, int]) -> Any:
    """Return a fixed camera that sees all robot positions, [n, 3], or one that follows the robot on long paths."""
    low, high = way.min(axis=0), way.max(axis=0)
    along, across = high[:2] - low[:2] + 2 * _AROUND
    if max(along, across) > _WIDEST:
        return _camera(model)
    camera = mujoco.MjvCamera()
    camera.type, camera.lookat[:] = mujoco.mjtCamera.mjCAMERA_FREE, (low + high) / 2
    # View robots that move in a plane from the side, and robots that can turn from above.
    turns = model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
    camera.azimuth, camera.elevation = 90, -40 if turns else -8
    tangent = np.tan(np.radians(model.vis.global_.fovy) / 2)
    camera.distance = max(along * size[1] / size[0], across * turns, _LOWEST) / (2 * tangent)
    return camera


class _OpenGL:
    def __init__(self, model: Any, data: Any, camera: Any, size: tuple[int, int], goal: Goal | None) -> None:
        (width, height), room = size, model.vis.global_
        room.offwidth, room.offheight = max(room.offwidth, width), max(room.offheight, height)
        self._data, self._camera, self._goal = data, camera, goal
        self._renderer = mujoco.Renderer(model, height, width)
        # Shadows and reflections take half of the time in software rendering.
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._renderer.scene.flags[flag] = False

    def draw(self) -> Array:
        self._renderer.update_scene(self._data, self._camera)
        _mark(self._renderer.scene, self._goal)
        return self._renderer.render().copy()

    def close(self) -> None:
        self._renderer.close()


class _Scene:
    """Painter for an environment with a model per task, which is known only after a reset."""

    def __init__(self, scene: Callable[[], tuple[Any, Any, Any]], size: tuple[int, int], backend: RendererName) -> None:
        self._scene, self._size = scene, size
        self._backend: RendererName = backend
        self._shown: tuple[Any, Painter] | None = None

    def draw(self) -> Array:
        model, data, camera = self._scene()
        for site in (model.site(n) for n in range(model.nsite)):
            if site.name.startswith("goal"):
                site.rgba = _GOAL
        if self._shown is None or self._shown[0] is not model:
            self.close()
            self._shown = model, _of_mujoco(model, data, camera, self._size, self._backend)
        return self._shown[1].draw()

    def close(self) -> None:
        if self._shown is not None:
            self._shown[1].close()
            self._shown = None


class _Own(Painter):
    """Painter for an environment with its own `render`."""

    def __init__(self, env: MetaEnv) -> None:
        self._env = env

    def draw(self) -> Array:
        try:
            picture: Any = self._env.render()
        except Exception as error:  # from the environment, or a missing package
            raise UsageError(f"{type(self._env.unwrapped).__name__}.render raised {error_text(error)}") from error
        found = np.asarray(picture)
        if found.ndim != 3 or found.shape[-1] != 3 or found.dtype != np.uint8:
            raise UsageError(
                f"{type(self._env.unwrapped).__name__}.render returned {found.dtype} of shape {found.shape}; expected "
                "[height, width, 3] uint8"
            )
        return found


class _View:
    """Projection of points, [n, 3] in meters, onto the pixels of a picture, as seen by a camera."""

    def __init__(self, eyes: Any, width: int, height: int) -> None:
        camera = eyes[0]
        self.pos = np.mean([np.array(eye.pos, np.float64) for eye in eyes], axis=0)
        self.forward, up = np.array(camera.forward, np.float64), np.array(camera.up, np.float64)
        self._axes = np.stack([np.cross(self.forward, up), up, self.forward])
        self._center = np.array([width / 2, height / 2])
        self.focal = height / 2 * camera.frustum_near / camera.frustum_top

    def depth(self, points: Array) -> Array:
        """Return the distance of each point along the line of sight in meters, [n]."""
        return (points - self.pos) @ self.forward

    def pixels(self, points: Array) -> list[Point]:
        """Return the pixel positions of points in front of the camera."""
        across, up, ahead = self._axes @ (points - self.pos).T
        ahead = np.maximum(ahead, 1e-3)
        places = self._center[:, None] + self.focal * np.stack([across, -up]) / ahead
        return [(float(x), float(y)) for x, y in places.T]


class FlatPainter(Painter):
    """Painter of a MuJoCo scene as flat shapes, projected by its camera.

    It draws capsules, cylinders, spheres, ellipsoids and boxes; a mesh is drawn as its bounding box.
    """

    def __init__(self, model: Any, data: Any, camera: Any, size: tuple[int, int], goal: Goal | None = None) -> None:
        self._model, self._data, self._camera, self._goal = model, data, camera, goal
        self._size = (size[0] * _SMOOTH, size[1] * _SMOOTH)
        self._scene = mujoco.MjvScene(model=model, maxgeom=10_000)

    def draw(self) -> Array:
        every, option = mujoco.mjtCatBit.mjCAT_ALL, mujoco.MjvOption()
        mujoco.mjv_updateScene(self._model, self._data, option, None, self._camera, every, self._scene)
        _mark(self._scene, self._goal)
        view = _View(self._scene.camera, *self._size)
        image = Image.new("RGB", self._size, _SKY)
        canvas = ImageDraw.Draw(image)
        geoms = [self._scene.geoms[i] for i in range(self._scene.ngeom)]
        self._draw_ground(canvas, view)
        solid = [geom for geom in geoms if geom.type != mujoco.mjtGeom.mjGEOM_PLANE]
        for geom in sorted(solid, key=lambda geom: -float(view.depth(np.array(geom.pos)))):
            if view.depth(np.array(geom.pos)) > 0.05:
                _draw_geom(canvas, view, geom)
        width, height = (side // _SMOOTH for side in self._size)
        return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS))

    def _draw_ground(self, canvas: ImageDraw.ImageDraw, view: _View) -> None:
        width, height = self._size
        # The horizon: a distant point at ground height.
        ahead = view.forward * [1, 1, 0]
        if np.linalg.norm(ahead) < 1e-6:
            canvas.rectangle((0, 0, width, height), fill=_GROUND)
        else:
            far = view.pos * [1, 1, 0] + 1e4 * ahead / np.linalg.norm(ahead)
            horizon = min(view.pixels(far[None])[0][1], height)  # below the picture if the camera looks up
            canvas.rectangle((0, horizon, width, height), fill=_GROUND)
        for line in _lines_around(view):
            canvas.line(view.pixels(line), fill=_LINE, width=_SMOOTH)


def _lines_around(view: _View) -> Iterator[Array]:
    """Yield the ends of ground lines 1 m apart, [2, 3] each, clipped to the part in front of the camera."""
    x, y = np.round(view.pos[:2])
    for offset in range(-_FAR, _FAR + 1):
        for ends in (
            [[x + offset, y - _FAR, 0], [x + offset, y + _FAR, 0]],
            [[x - _FAR, y + offset, 0], [x + _FAR, y + offset, 0]],
        ):
            line = np.array(ends, np.float64)
            near, far = sorted(line, key=lambda point: float(view.depth(point)))
            depths = view.depth(np.array([near, far]))
            if depths[1] <= 0.2:
                continue
            if depths[0] < 0.2:
                near = near + (far - near) * (0.2 - depths[0]) / (depths[1] - depths[0])
            yield np.array([near, far])


def _draw_geom(canvas: ImageDraw.ImageDraw, view: _View, geom: Any) -> None:
    color = tuple(round(255 * float(part)) for part in geom.rgba[:3])
    edge = tuple(part * 55 // 100 for part in color)
    pos, mat, size = np.array(geom.pos, np.float64), np.array(geom.mat, np.float64), np.array(geom.size, np.float64)
    if geom.type in (mujoco.mjtGeom.mjGEOM_CAPSULE, mujoco.mjtGeom.mjGEOM_CYLINDER):
        ends = np.stack([pos - mat[:, 2] * size[2], pos + mat[:, 2] * size[2]])
        _draw_rod(canvas, view, ends, float(size[0]), color, edge)
    elif geom.type in (mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_ELLIPSOID):
        _draw_rod(canvas, view, np.stack([pos, pos]), float(size.mean()), color, edge)
    else:
        corners = pos + (_CORNERS * size) @ mat.T
        places = view.pixels(corners)
        for face in sorted(_FACES, key=lambda face: -float(view.depth(corners[[*face]]).mean())):
            canvas.polygon([places[i] for i in face], fill=color, outline=edge)


def _draw_rod(
    canvas: ImageDraw.ImageDraw, view: _View, ends: Array, radius: float, color: tuple[int, ...], edge: tuple[int, ...]
) -> None:
    """Draw a rod with round ends, or a ball if both ends coincide."""
    places = view.pixels(ends)
    r = radius * view.focal / max(float(view.depth(ends).mean()), 0.05)
    for wider, fill in ((_SMOOTH, edge), (0, color)):
        canvas.line(places, fill=fill, width=max(round(2 * (r + wider)), 1))
        for x, y in places:
            canvas.ellipse((x - r - wider, y - r - wider, x + r + wider, y + r + wider), fill=fill)
