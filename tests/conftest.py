"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes is not what a test is about, and a busy machine has its own idea of it.
settings.register_profile(
    "untimed", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")
