"""Who acts in rollouts: a file for every way in which actions come about. without torch for plain networks."""

from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup

__all__ = ["Actor", "ActorSetup"]
