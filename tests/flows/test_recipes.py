"""Recipes: one for every algorithm on two environments, by names that say so."""

import gymnasium
import pytest

from metaloom.flows import cli
from metaloom.flows.recipes import RECIPES, load_settings, new_config
from metaloom.pipeline.algorithms import ALGORITHMS
from metaloom.pipeline.config.input import ConfigError, override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.registry import make_env

SINGLE_TASK = ["a2c", "dql", "ppo", "ppo2", "recurrent-a2c", "recurrent-ppo", "sac", "svpg"]
BY_NO_GRADIENT = ["pearl", "rl2", "rl2-trpo", "varibad"]
NAMES = sorted(ALGORITHMS.builtin.keys() - {*SINGLE_TASK, *BY_NO_GRADIENT})


@pytest.mark.parametrize("env", ["point-corner", "half-cheetah-dir"])
@pytest.mark.parametrize("algorithm", NAMES)
def test_every_algorithm_has_a_recipe(algorithm, env):
    config = RECIPES[f"{algorithm}-{env}"]()
    assert (config.algorithm.name, config.env.name) == (algorithm, env)


@pytest.mark.parametrize("name", [*NAMES, *BY_NO_GRADIENT])
def test_an_algorithm_by_name_trains_on_the_environment_that_is_set(name):
    config = new_config(name, ["env=ant-dir"])
    assert (config.algorithm.name, config.env.name) == (name, "ant-dir")
    assert config.num_tasks == RECIPES[name]().num_tasks


@pytest.mark.parametrize("env", ["CartPole-v1", "Hopper-v5", "Pendulum-v1"])
@pytest.mark.parametrize("name", SINGLE_TASK)
def test_one_word_changes_the_environment_of_a_single_task_and_with_it_the_step_limit(name, env):
    config = build_config(override(load_settings(name), [f"env={env}"]))
    assert (config.algorithm.name, config.env.name) == (name, env)
    assert config.env.action_scale == (1.0 if name == "sac" else None)  # a squashed Gaussian fills [-1, 1]
    assert config.max_episode_steps == gymnasium.spec(env).max_episode_steps


def test_recipes_are_in_alphabetical_order():
    assert [*RECIPES] == sorted(RECIPES)
    assert len(RECIPES) == len({*RECIPES}) > 50


def test_a_name_that_is_no_recipe_is_none_of_the_mapping():
    assert "no-such-recipe" not in RECIPES
    assert RECIPES.get("no-such-recipe") is None


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_named_for_what_they_run_and_say_where_they_are_from(name):
    config = RECIPES[name]()
    if config.algorithm.name in SINGLE_TASK:
        assert name.startswith(config.algorithm.name)
    elif name == config.algorithm.name:  # for an environment of the user's choice
        assert config.env.name in ("half-cheetah-dir", "pearl-cheetah-vel")
    elif config.algorithm.name == "pearl" and config.env.name.startswith("pearl-"):
        assert name == config.env.name
    elif name == "first-steps":
        assert config.env.name == "point-corner"
    elif name.endswith("-tuned"):  # of ours, beside that of the authors
        assert name == f"{config.algorithm.name}-{config.env.name}-tuned"
    elif name in ("promp-bandit", "rl2-bandit", "rl2-bandit-100", "rl2-trpo-bandit"):  # there is one kind
        assert config.env.name == "bernoulli-bandit"
    else:
        assert name == f"{config.algorithm.name}-{config.env.name}"
    assert RECIPES[name].about


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_being_written_down(name):
    assert build_config(load_settings(name)) == RECIPES[name]()


# Episode steps, inner steps, hidden units and steps per iteration of the ProMP paper's experiments.
SIZES = {
    "promp-half-cheetah-dir": (100, 1, 64, 160_000),
    "promp-ant-goal": (200, 2, 64, 480_000),
    "promp-walker2d-dir": (200, 1, 64, 320_000),
    "promp-walker2d-vel": (200, 1, 64, 320_000),
    "promp-walker2d-rand-params": (200, 1, 64, 320_000),
    "promp-hopper-rand-params": (200, 1, 64, 320_000),
    "promp-humanoid-dir": (200, 1, 128, 320_000),
    "promp-humanoid-dir-2d": (200, 1, 128, 320_000),
}


@pytest.mark.parametrize("name", SIZES)
def test_robots_have_the_sizes_of_the_papers_experiments(name):
    steps, inner_steps, units, total = SIZES[name]
    config = RECIPES[name]()
    assert (config.max_episode_steps, config.algorithm.inner_steps) == (steps, inner_steps)
    assert config.policy.hidden_sizes == (units, units)
    assert config.nominal_steps_per_iteration == total


# Tasks per gradient step and per iteration, steps of the phases, gradient steps, transitions to infer from.
PEARL_SIZES = {
    "pearl-ant-dir": (2, 2, (400, 0, 600), 4000, 256),
    "pearl-ant-goal": (10, 5, (400, 0, 400), 4000, 256),
    "pearl-cheetah-dir": (2, 2, (1000, 0, 1000), 2000, 256),
    "pearl-cheetah-vel": (16, 5, (400, 0, 600), 2000, 100),
    "pearl-hopper-rand-params": (10, 5, (400, 0, 400), 4000, 100),
    "pearl-humanoid-dir": (16, 5, (400, 0, 400), 4000, 256),
    "pearl-point-robot": (16, 5, (200, 0, 200), 1000, 64),
    "pearl-sparse-point-robot": (16, 10, (100, 900, 0), 2000, 1024),
    "pearl-walker2d-rand-params": (10, 5, (400, 0, 400), 4000, 100),
}


@pytest.mark.parametrize("name", PEARL_SIZES)
def test_pearls_recipes_have_its_authors_sizes_but_for_tasks_drawn_twice(name):
    config = RECIPES[name]()
    pearl = config.algorithm
    steps = (pearl.num_steps_prior, pearl.num_steps_posterior, pearl.num_extra_rl_steps_posterior)
    found = (pearl.meta_batch_size, config.num_tasks, steps, pearl.num_updates, pearl.embedding_batch_size)
    assert found == PEARL_SIZES[name]
    assert (pearl.batch_size, pearl.latent_size, config.policy.hidden_sizes) == (256, 5, (300, 300, 300))
    assert config.max_episode_steps == (20 if "point" in name else 200)
    make_env(config.env)


# Steps of an iteration, and iterations, of recipes for Meta-World.
METAWORLD = {
    "maml-trpo-metaworld-ml10": (20 * 10 * 500 * 2, 100),
    "promp-metaworld-ml10": (20 * 10 * 500 * 2, 100),
    "rl2-metaworld-ml10": (20 * 10 * 500, 200),
    "pearl-metaworld-ml10": (10 * (2500 + 2500), 400),
    "varibad-metaworld-ml10": (20 * 10 * 500, 200),
    "ppo-metaworld-mt10": (10 * 20 * 500, 200),
    "sac-metaworld-mt10": (500, 40_000),
}


@pytest.mark.parametrize("name", METAWORLD)
def test_recipes_for_metaworld_take_20_million_steps(name):
    (steps, iterations), config = METAWORLD[name], RECIPES[name]()
    pearl = config.algorithm if config.algorithm.name == "pearl" else None
    per_task = pearl.num_steps_prior + pearl.num_extra_rl_steps_posterior if pearl else 0
    assert steps == (config.num_tasks * per_task or config.nominal_steps_per_iteration)
    assert config.iterations == iterations
    assert steps * iterations == 20_000_000


@pytest.mark.parametrize("algorithm", ["maml-trpo", "promp", "rl2", "pearl", "varibad"])
def test_recipes_for_one_class_of_metaworld_differ_in_tasks_alone(algorithm):
    ten, one = RECIPES[f"{algorithm}-metaworld-ml10"](), RECIPES[f"{algorithm}-metaworld-ml1-reach"]()
    changed = {name for name in RunConfig.model_fields if getattr(ten, name) != getattr(one, name)}
    assert changed <= {"env", "task_sampling", "evaluation"}
    assert (one.env.name, one.task_sampling, one.evaluation.num_tasks) == ("metaworld-ml1-reach", "uniform", 10)
    assert (
        new_config(f"{algorithm}-metaworld-ml1-reach", ["env.name=metaworld-ml1-push"]).env.name == "metaworld-ml1-push"
    )


@pytest.mark.parametrize("robot", ["walker2d", "hopper"])
def test_unknown_bodies_are_learned_more_carefully(robot):
    algorithm = RECIPES[f"promp-{robot}-rand-params"]().algorithm
    assert (algorithm.inner_lr, algorithm.num_epochs, algorithm.init_inner_kl_penalty) == (0.05, 3, 1e-3)
    assert (algorithm.adaptive_inner_kl_penalty, algorithm.target_inner_kl) == (True, 0.01)


@pytest.mark.parametrize("algorithm", ["maml-trpo", "maml-vpg", "maml-ppo", "e-maml"])
def test_one_word_changes_the_algorithm(algorithm):
    settings = load_settings("promp-point-corner")
    config = build_config(override(settings, [f"algorithm={algorithm}", "algorithm.inner_lr=0.05"]))
    assert (config.algorithm.name, config.algorithm.inner_lr) == (algorithm, 0.05)
    assert config.algorithm == RECIPES[f"{algorithm}-point-corner"]().algorithm.model_copy(update={"inner_lr": 0.05})


def test_a_wrong_setting_is_named_as_the_user_typed_it():
    settings = override(load_settings("promp-point-corner"), ["algorithm=maml-trpo", "algorithm.clip_eps=0.1"])
    with pytest.raises(ValueError, match=r"^algorithm\.clip_eps: unknown key"):
        build_config(settings)


def test_an_environment_that_there_is_not_is_told_with_the_settings():
    with pytest.raises(EnvError, match=r"^env\.name is 'point-cornr'; did you mean point-corner"):
        new_config("promp", ["env=point-cornr"])


def test_a_broken_recipe_of_an_installed_package_is_named_and_hides_no_other(tmp_path, monkeypatch, capsys):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[metaloom.recipes]\nbroken = no_such_module:recipe\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.run(["recipes"]) == 0
    told = capsys.readouterr().out
    assert "broken: ConfigError: got 'no_such_module:recipe'" in " ".join(told.split())
    assert "promp-point-corner" in told


def test_hidden_layers_of_a_recipe_are_not_those_of_a_network_of_the_users_own():
    assert new_config("sac-pendulum", ["policy.network=cnn"]).policy.hidden_sizes == (64, 64)
    config = new_config("sac-pendulum", ["policy.network=my_nets:Net"])
    assert config.policy.hidden_sizes == config.algorithm.critic_hidden_sizes == (256, 256)
    with pytest.raises(ConfigError, match=r"policy.hidden_sizes is \(8,\) .*remove it"):
        new_config("sac-pendulum", ["policy.network=my_nets:Net", "policy.hidden_sizes=[8]"])


def test_another_algorithm_among_the_settings_of_one_is_refused_in_a_line_that_says_how():
    with pytest.raises(ConfigError, match=r"\Aalgorithm\.name=maml-trpo: .*Use algorithm=maml-trpo.*\Z"):
        new_config("promp", ["algorithm.name=maml-trpo"])
    assert new_config("promp", ["algorithm=maml-trpo"]).algorithm.name == "maml-trpo"
    with pytest.raises(ConfigError, match="sarsa"):
        new_config("promp", ["algorithm.name=sarsa"])
