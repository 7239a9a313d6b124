"""The policy of DQL, SAC and PEARL: sizes only, since each of these algorithms knows its own networks."""

from dataclasses import dataclass

from metaloom.pipeline.policies.config import PolicyConfig


@dataclass(frozen=True)
class OffPolicyPolicy:
    """What an off-policy algorithm is told about observations and actions.

    Attributes:
        observation_size: O.
        action_size: A where actions are numbers, 0 where they are choices.
        num_choices: of which an action is one; 0 where actions are numbers.
        config: `hidden_sizes` of the acting network, whose hidden layers are ReLU here.
    """

    observation_size: int
    action_size: int
    num_choices: int
    config: PolicyConfig
