"""Baselines: predictors of returns from observations, fitted to each task in each rollout batch."""

from metaloom.pipeline.baselines.config import BaselineConfig
from metaloom.pipeline.baselines.contract import Baseline, BaselineError

__all__ = ["Baseline", "BaselineConfig", "BaselineError"]
