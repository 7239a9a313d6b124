"""Meta-World at the sizes of its reference implementations.

ML10 has 20 tasks, 10 episodes of 500 steps of each and 20 million steps in all, MT10 as many steps in all, in
`metaworld-algorithms` (McLean et al. 2025, arXiv:2505.11289). Networks of the MAML family have two layers of 128, as in
garage: three of 400, as there, take most of an iteration on a CPU. VariBAD has no sizes in any of them; ours are a
beginning. Recipes for one class of tasks have the settings of ML10 and the class reach, and `--set
env.name=metaworld-ml1-push` names another.
"""

from typing import Any

from metaloom.pipeline.algorithms.actor_critic.ppo import PPO
from metaloom.pipeline.algorithms.contract import AlgorithmSettings
from metaloom.pipeline.algorithms.maml.settings import MAMLTRPO, ProMP
from metaloom.pipeline.algorithms.off_policy.sac import SAC
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.algorithms.rl2.settings import RL2
from metaloom.pipeline.algorithms.varibad.settings import VariBAD
from metaloom.pipeline.config.evaluation import EvaluationConfig
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig

STEPS = 20_000_000
"""Environment steps of a run."""
EPISODE = 500


def maml_trpo_metaworld_ml10() -> RunConfig:
    """MAML-TRPO on ten classes of tasks; one inner step of 0.1, a KL bound of 0.01, no bootstrapping."""
    return _maml(MAMLTRPO())


def promp_metaworld_ml10() -> RunConfig:
    """ProMP on ten classes of tasks; sizes as of MAML-TRPO, which has published results."""
    return _maml(ProMP())


def rl2_metaworld_ml10() -> RunConfig:
    """RL2 on ten classes of tasks; a trial has ten episodes, a GRU of 256 remembers them."""
    return _meta(
        RL2(episodes_per_trial=10, learning_rate=5e-4, num_epochs=10, trials_per_minibatch=10, entropy_coeff=5e-3),
        policy=PolicyConfig(network="gru", hidden_sizes=(256,)),
        processing=ProcessingConfig(discount=0.99, gae_lambda=0.95),
        iterations=STEPS // (20 * 10 * EPISODE),
    )


def pearl_metaworld_ml10() -> RunConfig:
    """PEARL on ten classes of tasks; garage's `pearl_metaworld_ml10`, which has one goal of each, ours all 50.

    So one episode instead of ten of every task fills the replay buffer, 250,000 steps in all.
    """
    algorithm = PEARL(
        latent_size=7,
        num_updates=60,
        meta_batch_size=10,
        num_initial_steps=EPISODE,
        num_steps_prior=2500,
        num_extra_rl_steps_posterior=2500,
        embedding_batch_size=250,
        reward_scale=1000.0,
    )
    return RunConfig(
        env=EnvConfig(name="metaworld-ml10", action_scale=1.0),
        algorithm=algorithm,
        iterations=STEPS // (10 * 5000),
        num_tasks=10,
        max_episode_steps=EPISODE,
        evaluation=_evaluation(every=20),
    )


def varibad_metaworld_ml10() -> RunConfig:
    """VariBAD on ten classes of tasks; a trial has ten episodes, as of RL2. Sizes of the model are ours."""
    return _meta(
        VariBAD(
            episodes_per_trial=10,
            learning_rate=5e-4,
            num_epochs=10,
            trials_per_minibatch=10,
            entropy_coeff=5e-3,
            encoder_size=256,
            elbo_steps=25,
            decoded_steps=50,
        ),
        policy=PolicyConfig(hidden_sizes=(128, 128)),
        processing=ProcessingConfig(discount=0.99, gae_lambda=0.95),
        iterations=STEPS // (20 * 10 * EPISODE),
    )


def maml_trpo_metaworld_ml1_reach() -> RunConfig:
    """MAML-TRPO on goals of reach, or of the class of another environment, by the settings of ML10."""
    return _of_one_class(maml_trpo_metaworld_ml10())


def promp_metaworld_ml1_reach() -> RunConfig:
    """ProMP on goals of reach, or of the class of another environment, by the settings of ML10."""
    return _of_one_class(promp_metaworld_ml10())


def rl2_metaworld_ml1_reach() -> RunConfig:
    """RL2 on goals of reach, or of the class of another environment, by the settings of ML10."""
    return _of_one_class(rl2_metaworld_ml10())


def pearl_metaworld_ml1_reach() -> RunConfig:
    """PEARL on goals of reach, or of the class of another environment, by the settings of ML10."""
    return _of_one_class(pearl_metaworld_ml10())


def varibad_metaworld_ml1_reach() -> RunConfig:
    """VariBAD on goals of reach, or of the class of another environment, by the settings of ML10."""
    return _of_one_class(varibad_metaworld_ml10())


def ppo_metaworld_mt10() -> RunConfig:
    """PPO on one task of each of ten classes in every iteration, told apart by their unit vectors."""
    algorithm = PPO(
        learning_rate=3e-4,
        num_epochs=16,
        batch_size=3125,
        clip_eps=0.2,
        max_grad_norm=1.0,
        critic_hidden_sizes=(400, 400, 400),
        critic_learning_rate=3e-4,
        critic_num_epochs=16,
        critic_batch_size=3125,
        critic_max_grad_norm=1.0,
    )
    return RunConfig(
        env=EnvConfig(name="metaworld-mt10", action_scale=None),
        algorithm=algorithm,
        policy=PolicyConfig(hidden_sizes=(400, 400, 400)),
        processing=ProcessingConfig(discount=0.99, gae_lambda=0.97),
        iterations=STEPS // (10 * 20 * EPISODE),
        num_tasks=10,
        task_sampling="balanced",
        episodes_per_task=20,
        max_episode_steps=EPISODE,
        evaluation=_evaluation(every=10),
    )


def sac_metaworld_mt10() -> RunConfig:
    """SAC on one episode of one of 500 tasks in every iteration, told apart by unit vectors and goals.

    The reference steps one task of each class side by side and has a temperature for each class; ours has one.
    """
    return RunConfig(
        env=EnvConfig(name="metaworld-mt10", action_scale=1.0),
        algorithm=SAC(
            memory_size=1_000_000,
            num_init_memory_steps=10 * EPISODE,
            batch_size=1280,
            num_updates_per_step=EPISODE // 10,
            critic_hidden_sizes=(400, 400),
            max_grad_norm=1.0,
            ent_coeff_init=1.0,
        ),
        policy=PolicyConfig(hidden_sizes=(400, 400)),
        iterations=STEPS // EPISODE,
        max_episode_steps=EPISODE,
        evaluation=_evaluation(every=400),
    )


def _maml(algorithm: ProMP | MAMLTRPO) -> RunConfig:
    return _meta(
        algorithm,
        policy=PolicyConfig(hidden_sizes=(128, 128)),
        processing=ProcessingConfig(discount=0.99, gae_lambda=1.0),
        # Before adaptation and after it.
        iterations=STEPS // (2 * 20 * 10 * EPISODE),
    )


def _meta(algorithm: AlgorithmSettings, **settings: Any) -> RunConfig:
    return RunConfig(
        env=EnvConfig(name="metaworld-ml10", action_scale=1.0),
        algorithm=algorithm,
        num_tasks=20,
        task_sampling="balanced",
        episodes_per_task=10,
        max_episode_steps=EPISODE,
        evaluation=_evaluation(every=10),
        **settings,
    )


def _of_one_class(config: RunConfig) -> RunConfig:
    """Goals of one class, drawn uniformly; ten of those held out in every evaluation."""
    assert config.evaluation.every is not None
    changed = {
        "env": config.env.model_copy(update={"name": "metaworld-ml1-reach"}),
        "task_sampling": "uniform",
        "evaluation": EvaluationConfig(every=config.evaluation.every, num_tasks=10, test_episodes=3),
    }
    return config.model_copy(update=changed)


def _evaluation(every: int) -> EvaluationConfig:
    """One task of every class, three test episodes of each."""
    return EvaluationConfig(every=every, evenly_by="class", test_episodes=3)
