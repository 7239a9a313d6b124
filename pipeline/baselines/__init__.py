"""Baselines: what return to expect from a state, fitted afresh to each task of each round."""

from metaloom.pipeline.baselines.config import BaselineConfig
from metaloom.pipeline.baselines.contract import Baseline, BaselineError

__all__ = ["Baseline", "BaselineConfig", "BaselineError"]
