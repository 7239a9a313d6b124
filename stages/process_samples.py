"""From rewards to what an algorithm learns from, by the run's baseline or by the learner's critic."""

from metaloom.pipeline.algorithms.actor_critic.learner import ActorCriticLearner
from metaloom.pipeline.estimation.processing import process_samples
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Samples

__all__ = ["process_samples", "process_with_critic"]


def process_with_critic(algorithm: ActorCriticLearner, learner: LearnerState, episodes: EpisodeBatch) -> Samples:
    """Returns, and values and advantages by the learner's critic; zero on padding.

    An episode that its step limit ended is credited with the critic's value of the state it had reached.

    Args:
        algorithm: says how, and of which part of the learner.
        learner: input of the iteration.
        episodes: one round of rollouts.
    """
    return algorithm.estimate(learner, episodes)
