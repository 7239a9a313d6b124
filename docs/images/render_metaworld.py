"""The picture of Meta-World's page: `MUJOCO_GL=egl python docs/images/render_metaworld.py`.

A scripted expert of the package's grasps the puck and brings it to its goal, as `metaloom video` draws episodes.
"""

from pathlib import Path

import numpy as np
from matplotlib import image
from metaworld.policies import ENV_POLICY_MAP

from metaloom.flows.films.painters import drawable, painter_of
from metaloom.pipeline.envs.config import EnvConfig

FILE = Path(__file__).parent / "metaworld_pick_place.png"
PICK_PLACE, SHOWN = 100, (0, 25, 46, 60)
"""Place of the task in MT10's set, and the steps after which it is drawn."""


def main() -> None:
    """Draw the expert's steps side by side."""
    env = drawable(EnvConfig(name="metaworld-mt10", action_scale=None))
    env.set_task(np.array((env.task_set or ())[PICK_PLACE]))
    observation, _ = env.reset(seed=0)
    painter, expert, pictures = painter_of(env, (320, 240)), ENV_POLICY_MAP["pick-place-v3"](), []
    for t in range(SHOWN[-1] + 1):
        if t in SHOWN:
            pictures.append(painter.draw())
        observation = env.step(expert.get_action(observation[:39]))[0]
    painter.close()
    image.imsave(FILE, np.concatenate(pictures, axis=1))


if __name__ == "__main__":
    main()
