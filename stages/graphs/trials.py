"""Runs that adapt within a trial, by an actor's memory of its episodes, as RL2 does."""

from metaloom.stages.adapt import ADAPT
from metaloom.stages.graphs.on_policy import ON_POLICY
from metaloom.stages.remember import REMEMBER

TRIALS = ON_POLICY.named("trials").replace(ADAPT, REMEMBER)
