"""From rewards to what an algorithm learns from, by the run's baseline."""

from metaloom.pipeline.estimation.processing import process_samples

__all__ = ["process_samples"]
