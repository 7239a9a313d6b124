"""Names of the built-in environments that tests of all of them go through."""

from importlib.util import find_spec

from metaloom.pipeline.envs import ENVS

# One of Meta-World's 54, which take long to make; tests/pipeline/envs/test_metaworld.py has tests of the others.
_METAWORLD = ("metaworld-ml1-reach",) if find_spec("metaworld") else ()

ENV_NAMES = (*(name for name in ENVS if not name.startswith("metaworld-")), *_METAWORLD)
