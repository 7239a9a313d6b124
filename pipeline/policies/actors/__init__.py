"""Who acts in rollouts: a file for every way in which actions come about. numpy only, in fixed shapes."""

from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup

__all__ = ["Actor", "ActorSetup"]
