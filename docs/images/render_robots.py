"""Pictures of the built-in MuJoCo robots for their pages: `MUJOCO_GL=egl python docs/images/render_robots.py hopper`.

Without names, all robots are drawn. A robot is named after its file in pipeline/envs/, and so is its picture.
"""

import sys
from pathlib import Path

from matplotlib import image

from metaloom.pipeline.envs import ENVS
from metaloom.pipeline.envs.config import DISCRETE, EnvConfig
from metaloom.pipeline.envs.registry import make_env

FOLDER = Path(__file__).parent


def robots() -> dict[str, str]:
    """Robot -> the name of one of its environments."""
    modules = {path.partition(":")[0].rpartition(".")[2]: name for name, path in ENVS.items()}
    return {robot: name for robot, name in modules.items() if not robot.startswith("point") and name not in DISCRETE}


def draw(robot: str, env_name: str) -> Path:
    """Save the robot at the start of an episode; the file."""
    options = {"render_mode": "rgb_array"}
    env = make_env(EnvConfig(name=env_name, options=options))
    env.reset(seed=0)
    path = FOLDER / f"robot_{robot}.png"
    image.imsave(path, env.render())
    env.close()
    return path


if __name__ == "__main__":
    available = robots()
    for robot in sys.argv[1:] or available:
        draw(robot, available[robot])
