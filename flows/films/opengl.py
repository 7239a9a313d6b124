"""Choice of an OpenGL platform. This module does not import MuJoCo, which chooses a platform on import."""

import os
import subprocess
import sys
from functools import cache
from typing import Literal

from metaloom.flows.errors import UsageError
from metaloom.pipeline.shown import printable

RendererName = Literal["auto", "egl", "osmesa", "glfw", "flat"]
"""auto: the platform in MUJOCO_GL, or the first of egl, glfw and osmesa that works; otherwise flat shapes."""
_PLATFORMS: tuple[RendererName, ...] = ("egl", "glfw", "osmesa")
_DRAWS = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 8, 8).render()"


def choose_renderer(asked: RendererName) -> RendererName:
    """Return a working renderer, and set MUJOCO_GL to an OpenGL one; raise UsageError if the requested one fails."""
    named = os.environ.get("MUJOCO_GL", "").lower()
    is_late = "mujoco" in sys.modules
    wanted = named if asked == "auto" and named else asked
    for name in _PLATFORMS:
        may_be = name == named and asked in ("auto", name) if is_late else wanted in ("auto", name)
        if may_be and problem_with(name) is None:
            os.environ["MUJOCO_GL"] = name
            return name
    if is_late and asked not in ("auto", "flat", named):
        raise UsageError(
            f"cannot use the {asked} renderer: MuJoCo was imported with MUJOCO_GL={named!r}. Set "
            f"MUJOCO_GL={asked} before Python starts, or use the flat renderer, which needs no OpenGL"
        )
    if asked in ("auto", "flat"):
        return "flat"
    raise UsageError(
        f"cannot use OpenGL through {asked}: {problem_with(asked)}. Install its libraries (on Debian, libegl1 and "
        "libgl1-mesa-dri for egl, libosmesa6 for osmesa), use glfw with a display, or use the flat renderer"
    )


@cache
def problem_with(name: str) -> str | None:
    """Return why an OpenGL platform does not work, in one line; None if it works."""
    if name == "glfw" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return "there is no display (DISPLAY and WAYLAND_DISPLAY are not set)"
    # In a separate process, since a failure leaves PyOpenGL unable to try another platform or ends the process.
    environment = {key: value for key, value in os.environ.items() if key != "PYOPENGL_PLATFORM"}
    command, environment = [sys.executable, "-c", _DRAWS], {**environment, "MUJOCO_GL": name}
    tried = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if tried.returncode == 0:
        return None
    lines = tried.stderr.strip().splitlines()
    return printable(lines[-1]) if lines else f"its process ended with exit code {tried.returncode}"
