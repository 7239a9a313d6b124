"""Who draws an environment: OpenGL, our own flat drawing, or the environment itself."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

from collections.abc import Callable
from typing import Any, Protocol

import mujoco
import numpy as np

from metaloom.flows.errors import UsageError
from metaloom.flows.films.flat import FlatPainter
from metaloom.flows.films.opengl import RendererName, choose_renderer
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.shown import error_text
from metaloom.pipeline.types import Array


class Painter(Protocol):
    """Draws the present state of an environment."""

    def draw(self) -> Array:
        """Return a picture [height, width, 3] uint8."""
        ...

    def close(self) -> None:
        """Free what drawing took."""
        ...


def drawable(config: EnvConfig) -> MetaEnv:
    """Make an environment that can be drawn.

    Raises:
        UsageError: it has no pictures of itself, and is no MuJoCo model.
        EnvError: it cannot be made.
    """
    env = make_env(config)
    if _is_robot(env) or _scene(env) or env.render_mode == "rgb_array":
        return env
    modes = env.metadata.get("render_modes") or ()
    env.close()
    if "rgb_array" not in modes:
        raise UsageError(
            f"found the environment {config.name} with the render_modes {[*modes]}; required rgb_array among them in "
            "its `metadata`, the argument `render_mode` and a method `render`; or a MuJoCo model in `model` and `data`"
        )
    return make_env(config.model_copy(update={"options": {**config.options, "render_mode": "rgb_array"}}))


def painter_of(env: MetaEnv, size: tuple[int, int], renderer: RendererName = "auto") -> Painter:
    """Choose who draws an environment.

    Args:
        env: what `drawable` made.
        size: width and height in pixels; environments that draw themselves have their own.
        renderer: of MuJoCo's robots.

    Raises:
        UsageError: the renderer that was asked for does not work here, with the reason.
    """
    if scene := _scene(env):
        return _Scene(scene, size, choose_renderer(renderer))
    if not _is_robot(env):
        return _Own(env)
    robot: Any = env.unwrapped
    return _of_mujoco(robot.model, robot.data, _camera(robot.model), size, choose_renderer(renderer))


def _of_mujoco(model: Any, data: Any, camera: Any, size: tuple[int, int], backend: RendererName) -> Painter:
    if backend == "flat":
        return FlatPainter(model, data, camera, *size)
    return _OpenGL(model, data, camera, *size)


def _scene(env: MetaEnv) -> Callable[[], tuple[Any, Any, Any]] | None:
    """What tells MuJoCo's model and data and a camera, where an environment has a model for each task."""
    return getattr(env.unwrapped, "scene", None)


def _is_robot(env: MetaEnv) -> bool:
    return isinstance(getattr(env.unwrapped, "model", None), mujoco.MjModel)


def _camera(model: Any) -> Any:
    """The model's own camera that follows the robot, or else one that follows its first body from the side."""
    camera = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, camera)
    track = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
    if track >= 0:
        camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, track
    elif model.njnt and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE:
        camera.type, camera.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, model.jnt_bodyid[0]
    return camera


class _OpenGL:
    def __init__(self, model: Any, data: Any, camera: Any, width: int, height: int) -> None:
        room = model.vis.global_
        room.offwidth, room.offheight = max(room.offwidth, width), max(room.offheight, height)
        self._data, self._camera = data, camera
        self._renderer = mujoco.Renderer(model, height, width)
        # They take half of the time where the processor draws.
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._renderer.scene.flags[flag] = False

    def draw(self) -> Array:
        self._renderer.update_scene(self._data, self._camera)
        return self._renderer.render().copy()

    def close(self) -> None:
        self._renderer.close()


class _Scene:
    """An environment that has a model for each task: which one is known once it is reset."""

    def __init__(self, scene: Callable[[], tuple[Any, Any, Any]], size: tuple[int, int], backend: RendererName) -> None:
        self._scene, self._size = scene, size
        self._backend: RendererName = backend
        self._shown: tuple[Any, Painter] | None = None

    def draw(self) -> Array:
        model, data, camera = self._scene()
        if self._shown is None or self._shown[0] is not model:
            self.close()
            self._shown = model, _of_mujoco(model, data, camera, self._size, self._backend)
        return self._shown[1].draw()

    def close(self) -> None:
        if self._shown is not None:
            self._shown[1].close()
            self._shown = None


class _Own:
    """An environment that draws itself."""

    def __init__(self, env: MetaEnv) -> None:
        self._env = env

    def draw(self) -> Array:
        try:
            picture: Any = self._env.render()
        except Exception as error:  # the environment's own, or a package that it misses
            raise UsageError(f"{type(self._env.unwrapped).__name__}.render raised {error_text(error)}") from error
        found = np.asarray(picture)
        if found.ndim != 3 or found.shape[-1] != 3 or found.dtype != np.uint8:
            raise UsageError(
                f"{type(self._env.unwrapped).__name__}.render gave {found.dtype} of shape {found.shape}; required "
                "[height, width, 3] uint8"
            )
        return found

    def close(self) -> None:
        pass
