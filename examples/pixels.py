"""A convolutional network learns to catch from 16 x 16 pixels, under PPO.

    python examples/pixels.py [FOLDER]

The environment is an ordinary gymnasium one. From the command line, in this folder, the same is
`metaloom train ppo --set env=pixels:Catch --set policy.network=cnn`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

SIZE = 16


class Catch(gymnasium.Env[np.ndarray, int]):
    """A ball falls from the top row to the bottom one, where a paddle moves left, stays or moves right.

    The reward at the end is 1 if the paddle is under the ball, -1 if not. A gray image of bytes is all there is to see.
    """

    observation_space = Box(0, 255, (SIZE, SIZE, 1), np.uint8)
    action_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Put the ball into any column of the top row, and the paddle into the middle of the bottom row."""
        super().reset(seed=seed)
        self._row, self._column, self._paddle = 0, int(self.np_random.integers(SIZE)), SIZE // 2
        return self._image(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Move the paddle by action - 1, and let the ball fall a row."""
        self._paddle = int(np.clip(self._paddle + action - 1, 1, SIZE - 2))
        self._row += 1
        ended = self._row == SIZE - 1
        reward = 0.0 if not ended else 1.0 if abs(self._column - self._paddle) <= 1 else -1.0
        return self._image(), reward, ended, False, {}

    def _image(self) -> np.ndarray:
        image = np.zeros((SIZE, SIZE, 1), np.uint8)
        image[-1, self._paddle - 1 : self._paddle + 2] = 128
        image[self._row, self._column] = 255
        return image


def main(folder: Path, iterations: int = 30) -> None:
    """Train, and tell how often the ball was caught."""
    from metaloom.flows.commands.train import train
    from metaloom.flows.recipes import load_settings
    from metaloom.flows.rollouts.workers import Backend
    from metaloom.pipeline.config.run import build_config
    from metaloom.storage import open_run

    settings = load_settings("ppo") | {
        "env": {"name": "pixels:Catch"},
        "policy": {"network": "cnn", "activation": "relu", "network_options": {"channels": [8, 16]}},
        "max_episode_steps": SIZE - 1,
        "episodes_per_task": 64,
        "iterations": iterations,
    }
    settings["algorithm"]["learning_rate"] = 2e-3
    train(build_config(settings), folder, backend=Backend(workers=0))
    returns = open_run(folder).episodes().to_pandas().groupby("iteration")["return"].mean()
    for iteration, mean in returns.items():
        print(f"iteration {iteration}: caught {(1 + mean) / 2:.0%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary) / "pixels")
