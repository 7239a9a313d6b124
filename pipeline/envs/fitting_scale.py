"""Whether there is anything to scale: asked of a process of its own, since an environment may end or hang it."""

import os
import subprocess
import sys
from enum import IntEnum
from functools import lru_cache

from gymnasium.spaces import Discrete

from metaloom.pipeline.envs import ENVS
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_env


class Found(IntEnum):
    """What a process that has made an environment says of its actions, by its exit status."""

    DISCRETE = 17
    OTHERS = 18


def with_fitting_scale(config: EnvConfig, timeout_seconds: float = 60) -> EnvConfig:
    """The same environment without an action scale, where nobody asked for one and its actions are discrete.

    What is found is asked for in what is returned, and is not looked for again. An environment that cannot be made in
    this time is left as it is: who trains on it will say why.
    """
    if "action_scale" in config.model_fields_set or config.action_scale is None or config.name in ENVS:
        return config
    plain = config.model_copy(update={"action_scale": None})
    match _tried(plain.model_dump_json(), timeout_seconds):
        case Found.DISCRETE:
            return plain
        case Found.OTHERS:
            return config.model_copy(update={"action_scale": config.action_scale})
        case _:
            return config


@lru_cache(maxsize=16)  # the runs of a sweep are of one environment
def _tried(settings: str, timeout_seconds: float) -> int | None:
    """Exit status of a process that makes the environment of these settings; None if it takes too long."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        return subprocess.run(
            [sys.executable, "-m", __name__],
            input=settings,
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
            capture_output=True,
            timeout=timeout_seconds,
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def _main() -> int:
    env = make_env(EnvConfig.model_validate_json(sys.stdin.read()))
    discrete = isinstance(env.action_space, Discrete)
    env.close()
    return Found.DISCRETE if discrete else Found.OTHERS


if __name__ == "__main__":
    sys.exit(_main())
