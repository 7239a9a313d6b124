"""Fixtures and rules for all tests."""

import atexit
import os
import tempfile

from hypothesis import HealthCheck, settings

# pytest-xdist sets it, and so may a shell: commands are to find the same width with and without.
os.environ.pop("COLUMNS", None)

# What tests trust is nothing that the user trusts; processes that they start find it too.
_CONFIG = tempfile.TemporaryDirectory(prefix="metaloom-tests-")
atexit.register(_CONFIG.cleanup)
os.environ["XDG_CONFIG_HOME"] = _CONFIG.name

# How long an example takes is not what a test is about, and a busy machine has its own idea of it.
settings.register_profile(
    "untimed", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")
