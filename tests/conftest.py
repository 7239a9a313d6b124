"""Fixtures and rules for all tests."""

import os

from hypothesis import HealthCheck, settings

# pytest-xdist sets it, and so may a shell: commands are to find the same width with and without.
os.environ.pop("COLUMNS", None)

# How long an example takes is not what a test is about, and a busy machine has its own idea of it.
settings.register_profile(
    "untimed", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")
