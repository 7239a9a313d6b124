"""A run of each algorithm that trains in about a second, for tests of what holds for all of them."""

_META = ("env.options={reward: dense}", "num_tasks=3", "episodes_per_task=4", "max_episode_steps=6")
_ONE_TASK = ("env=CartPole-v1", "min_steps=20", "episodes_per_task=8", "max_episode_steps=10")
_REPLAY = (
    "max_episode_steps=10",
    "algorithm.memory_size=200",
    "algorithm.num_init_memory_steps=20",
    "algorithm.batch_size=8",
)
GRADIENT_BASED = ("promp", "maml-trpo", "maml-vpg", "maml-ppo", "e-maml", "dice-maml", "vpg-dice")
RECURRENT = ("recurrent-a2c", "recurrent-ppo")
SMALL_RUNS = {
    **{name: (f"{name}-point-corner", *_META) for name in GRADIENT_BASED},
    **{name: (name, *_ONE_TASK) for name in ("a2c", "ppo", "ppo2", "svpg")},
    **{name: (name, "env=CartPole-v1", "episodes_per_task=4", "max_episode_steps=10") for name in RECURRENT},
    "rl2-trpo": ("rl2-trpo", "env=navigation-2d", "num_tasks=3", "episodes_per_task=4", "max_episode_steps=6"),
    "rl2": ("rl2-navigation-2d", "num_tasks=3", "episodes_per_task=4", "max_episode_steps=6"),
    "varibad": (
        "varibad-half-cheetah-dir",
        "env=navigation-2d",
        "num_tasks=3",
        "episodes_per_task=4",
        "max_episode_steps=6",
        "algorithm.encoder_size=8",
        "algorithm.embedding_size=8",
        "algorithm.decoder_layers=[8]",
        "algorithm.critic_hidden_sizes=[8]",
        "algorithm.buffer_iterations=2",
        "algorithm.model_updates=2",
        "algorithm.trials_per_model_update=4",
    ),
    "dql": ("dql", "env=CartPole-v1", *_REPLAY),
    "sac": ("sac", "env=Pendulum-v1", "algorithm.critic_hidden_sizes=[8]", *_REPLAY),
    "pearl": (
        "pearl-point-robot",
        "num_tasks=2",
        "max_episode_steps=5",
        "algorithm.num_initial_steps=10",
        "algorithm.num_steps_posterior=10",
        "algorithm.num_extra_rl_steps_posterior=10",
        "algorithm.num_steps_prior=5",
        "algorithm.num_updates=3",
        "algorithm.meta_batch_size=2",
        "algorithm.batch_size=8",
        "algorithm.embedding_batch_size=6",
        "algorithm.critic_hidden_sizes=[8]",
        "algorithm.encoder_hidden_sizes=[8]",
    ),
}
"""Algorithm -> recipe and settings; a test adds `iterations` and `policy.hidden_sizes`."""
SMALL_SWEEP = (
    "env.options.reward=dense",
    "algorithm.num_epochs=1",
    "policy.hidden_sizes=[4]",
    "iterations=2",
    "num_tasks=2",
    "episodes_per_task=2",
    "max_episode_steps=4",
)
"""Settings of ProMP on the point robot, of which a sweep trains many."""
