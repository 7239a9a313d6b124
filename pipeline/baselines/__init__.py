"""Baselines: predictors of the return from a state, fitted to each task of each rollout batch."""

from metaloom.pipeline.baselines.config import BaselineConfig
from metaloom.pipeline.baselines.contract import Baseline, BaselineError

__all__ = ["Baseline", "BaselineConfig", "BaselineError"]
