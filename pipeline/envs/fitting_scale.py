"""Whether there is anything to scale: asked of a process of its own, since an environment may end or hang it."""

import os
import subprocess
import sys

from gymnasium.spaces import Discrete

from metaloom.pipeline.envs import ENVS
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_env

_DISCRETE = 17
"""Exit status of a process that made an environment and found its actions discrete."""


def with_fitting_scale(config: EnvConfig, timeout_seconds: float = 60) -> EnvConfig:
    """The same environment without an action scale, where nobody asked for one and its actions are discrete.

    One that cannot be made in this time is left as it is: who trains on it will say why.
    """
    if "action_scale" in config.model_fields_set or config.action_scale is None or config.name in ENVS:
        return config
    plain = config.model_copy(update={"action_scale": None})
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        tried = subprocess.run(
            [sys.executable, "-m", __name__],
            input=plain.model_dump_json(),
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
            capture_output=True,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        return config
    return plain if tried.returncode == _DISCRETE else config


def _main() -> int:
    env = make_env(EnvConfig.model_validate_json(sys.stdin.read()))
    discrete = isinstance(env.action_space, Discrete)
    env.close()
    return _DISCRETE if discrete else 0


if __name__ == "__main__":
    sys.exit(_main())
