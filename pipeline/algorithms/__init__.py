"""Registry of algorithms. To add an algorithm, put its files in this folder and add a line to ALGORITHMS."""

from metaloom.pipeline.plugins import Plugins

ALGORITHMS = Plugins(
    "algorithm",
    "metaloom.algorithms",
    {
        "a2c": "metaloom.pipeline.algorithms.actor_critic.settings:A2C",
        "dice-maml": "metaloom.pipeline.algorithms.maml.settings:DiceMAML",
        "dql": "metaloom.pipeline.algorithms.off_policy.settings:DQL",
        "e-maml": "metaloom.pipeline.algorithms.maml.settings:EMAML",
        "maml-ppo": "metaloom.pipeline.algorithms.maml.settings:MAMLPPO",
        "maml-trpo": "metaloom.pipeline.algorithms.maml.settings:MAMLTRPO",
        "maml-vpg": "metaloom.pipeline.algorithms.maml.settings:MAMLVPG",
        "pearl": "metaloom.pipeline.algorithms.pearl.settings:PEARL",
        "ppo": "metaloom.pipeline.algorithms.actor_critic.settings:PPO",
        "ppo2": "metaloom.pipeline.algorithms.actor_critic.settings:PPO2",
        "promp": "metaloom.pipeline.algorithms.maml.settings:ProMP",
        "recurrent-a2c": "metaloom.pipeline.algorithms.trials.settings:RecurrentA2C",
        "recurrent-ppo": "metaloom.pipeline.algorithms.trials.settings:RecurrentPPO",
        "rl2": "metaloom.pipeline.algorithms.trials.settings:RL2",
        "rl2-trpo": "metaloom.pipeline.algorithms.trials.settings:RL2TRPO",
        "sac": "metaloom.pipeline.algorithms.off_policy.settings:SAC",
        "svpg": "metaloom.pipeline.algorithms.actor_critic.settings:SVPG",
        "varibad": "metaloom.pipeline.algorithms.varibad.settings:VariBAD",
        "vpg-dice": "metaloom.pipeline.algorithms.maml.settings:VPGDice",
    },
)
"""Settings classes of all algorithms, subclasses of AlgorithmSettings."""
