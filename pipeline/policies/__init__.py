"""Policies: functions of explicit parameters, without hidden state."""

from metaloom.pipeline.policies.config import PolicyConfig

__all__ = ["PolicyConfig"]
