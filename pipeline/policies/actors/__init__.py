"""Actors, which choose actions in rollouts."""

from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup

__all__ = ["Actor", "ActorSetup"]
