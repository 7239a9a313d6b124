"""Environments in wrappers that a setting names."""

import json
import math
import re
import sys

import gymnasium
import minari
import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from forging import forge
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from gymnasium.spaces.utils import flatten
from wrapped_envs import Parts, Shifted, Shows, Switches

import metaloom
from metaloom import storage
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.exports import export
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.recipes import new_config
from metaloom.flows.rollouts.rehearsal import settled
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.trained.deployment import _ActionMap
from metaloom.flows.trust import UntrustedRun, names_of_run
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config, build_stored
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.facts import described_space, space_from
from metaloom.pipeline.envs.flattening import flat
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.wrappers import action_map, sizes_of

pytestmark = pytest.mark.usefixtures("warm")

HERE = Backend(workers=0)


@pytest.fixture(autouse=True)
def own_wrappers(monkeypatch, request):
    folder = str(request.config.rootpath / "tests" / "helpers")
    monkeypatch.setenv("PYTHONPATH", folder, prepend=":")


def env_in(*wrappers, name="Pendulum-v1", **settings):
    return {"name": name, "wrappers": list(wrappers), "action_scale": None, **settings}


SHIFTED = {"name": "wrapped_envs:Shifted", "options": {"by": 2.5}}


@pytest.mark.dask
def test_wrapped_environments_give_the_same_bits_here_on_workers_resumed_replayed_and_evaluated(
    tiny_config, tmp_path, digests
):
    config = tiny_config(env=env_in("gymnasium.wrappers:TimeAwareObservation", SHIFTED), evaluation={"every": 2})
    train(config, tmp_path / "here", backend=HERE)
    train(config.model_copy(update={"iterations": 1}), tmp_path / "there", backend=HERE)
    resume(tmp_path / "there", iterations=config.iterations, backend=Backend(workers=2))
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    assert all(outcome.identical for outcome in replay(tmp_path / "there"))
    run = storage.open_run(tmp_path / "here")
    assert [wrapper["name"] for wrapper in run.config["env"]["wrappers"]] == [
        "gymnasium.wrappers:TimeAwareObservation",
        "wrapped_envs:Shifted",
    ]
    observations = run[0].rollouts(0).observations
    np.testing.assert_allclose(observations[0, 0, :, 3], 2.5 + np.arange(11))  # the time, shifted
    np.testing.assert_array_equal(
        evaluate(tmp_path / "here", 2).evaluation.test_returns, run[1].evaluation().test_returns
    )


def test_the_modules_of_wrappers_are_recorded_and_need_trust(tiny_config, tmp_path, monkeypatch):
    train(tiny_config(env=env_in(SHIFTED), iterations=1), tmp_path / "run", backend=HERE)
    run = storage.open_run(tmp_path / "run")
    assert names_of_run(run) == ["wrapped_envs:Shifted"]
    assert "wrapped_envs:Shifted" in run.info["environment"]["plugins"]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "somebody else"))
    monkeypatch.setattr("metaloom.flows.trust._trusted_here", {})
    with pytest.raises(UntrustedRun, match="its settings name wrapped_envs:Shifted"):
        [*replay(tmp_path / "run")]


def test_a_run_of_others_writes_no_films_where_its_settings_say(tiny_config, tmp_path):
    train(tiny_config(env=env_in("TimeAwareObservation"), iterations=1), tmp_path / "run", backend=HERE)
    options = {"video_folder": str(tmp_path / "films"), "step_trigger": 1}
    films = {"wrappers": [{"name": "RecordVideo", "options": options}], "options": {"render_mode": "rgb_array"}}
    forge(tmp_path / "run", lambda document: document["config"]["env"].update(films))
    for use in (lambda: [*replay(tmp_path / "run")], metaloom.open_run(tmp_path / "run").policy):
        with pytest.raises(EnvError, match="with RecordVideo, every copy"):
            use()
    assert not (tmp_path / "films").exists()


def test_a_policy_adapts_to_the_environment_as_it_comes_and_wraps_it_as_its_run_does(tiny_config, tmp_path):
    train(tiny_config(env=env_in(SHIFTED), iterations=1), tmp_path / "run", backend=HERE)
    policy = metaloom.open_run(tmp_path / "run").policy()
    env = gymnasium.make("Pendulum-v1")
    adapted = policy.adapt(env, episodes=2, max_episode_steps=5)
    collected = adapted._rounds[0].observations
    assert (np.abs(collected[..., :2] - 2.5) <= 1.001).all()  # a cosine and a sine
    again = policy.adapt(make_env(policy.blueprint.config.env), episodes=2, max_episode_steps=5)
    np.testing.assert_array_equal(again._rounds[0].observations, collected)
    with pytest.raises(ValueError, match=r"already wrapped in wrapped_envs:Shifted; pass it without"):
        policy.adapt(Shifted(env), episodes=2)


def test_wrappers_begin_anew_in_every_episode_that_a_policy_adapts_to(tiny_config, tmp_path):
    limit = {"name": "TimeLimit", "options": {"max_episode_steps": 4}}
    env = env_in(limit, "wrapped_envs:Remembers", observed=[0, 1], copies="fresh")
    train(tiny_config(env=env, iterations=1), tmp_path / "run", backend=HERE)
    policy = metaloom.open_run(tmp_path / "run").policy()
    collected = policy.adapt(gymnasium.make("Pendulum-v1"), episodes=3, max_episode_steps=6)._rounds[0]
    assert collected.lengths.tolist() == [[4, 4, 4]]  # by the limit in env.wrappers, not that of gymnasium.make
    # A cosine and a sine, to which every episode adds 1 as the first of a copy.
    np.testing.assert_allclose(np.hypot(*(collected.observations[0, :, 0] - 1).T), 1, rtol=1e-5)


def test_runs_without_wrappers_keep_their_digest_and_those_with_some_have_another(tiny_config):
    config = tiny_config(env=env_in(name="CartPole-v1"), algorithm="a2c")
    assert "wrappers" not in config.env.decisive()
    stored = config.model_dump(mode="json")
    del stored["env"]["wrappers"]
    assert build_stored(stored).digest() == config.digest()
    assert tiny_config(env=env_in(SHIFTED, name="CartPole-v1"), algorithm="a2c").digest() != config.digest()


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        ("FlatenObservation", "no wrapper 'FlatenObservation'; did you mean FlattenObservation?"),
        ("vector.ClipReward", "no wrapper 'vector.ClipReward'"),
        ("wrapped_envs:Missing", "got 'wrapped_envs:Missing': AttributeError"),
        ("wrapped_envs:np", "expected a subclass of gymnasium.core:Wrapper"),
        ("RescaleAction", "missing a required argument: 'min_action'; allowed: min_action, max_action"),
        ({"name": "wrapped_envs:Shifted", "options": {"to": 1}}, "unexpected keyword argument 'to'; allowed: by"),
        ("GrayscaleObservation", r"the environment has observations in Box"),
        ("NormalizeObservation", "and --set policy.normalize_observations=true"),
        ("gymnasium.wrappers:NormalizeReward", "and --set processing.scale_rewards=true"),
        ({"name": "RecordVideo", "options": {"video_folder": "films"}}, "remove it and film stored episodes with"),
        ("wrapped_envs:Misfit", r"expected numbers of shape \(7,\), as its observation_space declares; without them"),
        ({"name": "TransformReward", "options": {"func": 3}}, "'int' object is not callable; without them the"),
    ],
)  # fmt: skip
def test_a_wrapper_that_cannot_be_used_is_refused_before_the_run_has_a_folder(wrapper, words, tiny_config, tmp_path):
    with pytest.raises(EnvError, match=words) as refusal:
        train(tiny_config(env=env_in(wrapper)), tmp_path / "run", backend=HERE)
    assert "env.wrappers" in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_a_wrapper_that_needs_a_step_limit_gets_it_from_the_one_that_is_advised():
    with pytest.raises(EnvError, match="sets no step limit") as refused:
        make_env(EnvConfig(**env_in("TimeAwareObservation", name="wrapped_envs:Parts")))
    advised = yaml.safe_load(re.search(r"; put (.*) before it in env.wrappers", str(refused.value)).group(1))
    for name, size in (("wrapped_envs:Parts", 13), ("point-corner", 2)):
        env = make_env(EnvConfig(**env_in(advised, "TimeAwareObservation", name=name)))
        env.reset(seed=0)
        cut = [env.step(env.action_space.sample())[3] for _ in range(advised["options"]["max_episode_steps"])]
        assert env.observation_space.shape == (size + 1,)
        assert cut.index(True) == 99


def test_a_wrapper_that_remembers_gets_a_new_copy_for_every_episode_also_around_a_built_in_environment():
    for name in ("Pendulum-v1", "point-corner"):
        config = EnvConfig(name=name, wrappers=["wrapped_envs:Remembers"])
        assert (config.copies, config.witness) == ("auto", True)
        found, notes = settled(config, 20)
        assert found.copies == "fresh"
        assert "earlier episodes of its copy (observations after reset of episode 2)" in notes[0]


def test_wrappers_around_a_meta_env_keep_its_tasks(tiny_config, tmp_path):
    config = EnvConfig(name="point-corner", wrappers=[SHIFTED, "wrapped_envs:Halved"])
    env, bare = make_env(config), make_env(EnvConfig(name="point-corner"))
    assert (env.task_fields, env.task_set) == (bare.task_fields, bare.task_set)
    assert env.observation_components is None  # they are other numbers now
    assert env.action_components == bare.action_components
    both = []
    for wrapped in (env, bare):
        wrapped.set_task(np.array([-2.0, 2.0]))
        both.append((wrapped.reset(seed=3)[0], wrapped.step(np.array([1.0, 2.0], np.float32))))
    np.testing.assert_allclose(both[0][0], both[1][0] + 2.5)
    assert both[0][1][1] == both[1][1][1] / 2
    terms = both[0][1][4]["reward_terms"]
    assert terms == {"progress": both[1][1][1], "wrappers": -both[1][1][1] / 2}
    train(tiny_config(env=config.model_dump(mode="json", exclude={"copies"})), tmp_path / "run", backend=HERE)
    assert storage.open_run(tmp_path / "run")[0].metrics()["witness_reproduced"] == 1


@pytest.mark.parametrize("change", ["env=CartPole-v1", "env.name=CartPole-v1", "env.wrappers=[TimeAwareObservation]"])
def test_an_environment_of_others_is_rehearsed_and_witnessed_whatever_recipe_it_is_put_into(change):
    env = new_config("promp-point-corner", [change]).env
    assert (env.copies, env.seed_bits, env.witness, env.integer_observations) == ("auto", 32, True, True)
    assert new_config("promp-point-corner", [change, "env.copies=kept"]).env.copies == "kept"


def test_wrappers_put_around_the_environment_of_settings_bring_a_witness(tiny_config, tmp_path):
    config = tiny_config(env="point-corner", iterations=1)
    run = metaloom.train(config, tmp_path / "run", progress=False, env={"wrappers": [SHIFTED]})
    assert run.config["env"]["witness"]
    assert "witness_reproduced" in run.metrics().column_names


def test_names_and_options_can_be_set_on_the_command_line():
    wrappers = "env.wrappers=[TimeAwareObservation, {name: RescaleAction, options: {min_action: -1, max_action: 1}}]"
    config = EnvConfig.model_validate(override({"env": {"name": "Pendulum-v1"}}, [wrappers])["env"])
    first, second = config.wrappers
    assert (first.name, first.options) == ("TimeAwareObservation", {})
    assert (second.name, second.options) == ("RescaleAction", {"min_action": -1, "max_action": 1})


# Observations and actions of several parts.


@pytest.mark.dask
def test_parts_are_trained_on_as_gymnasium_flattens_them_and_come_back_everywhere(tiny_config, tmp_path, digests):
    settings = {"env": env_in(name="wrapped_envs:Parts"), "algorithm": "maml-vpg", "evaluation": {"every": 2}}
    config = tiny_config(**settings, iterations=2)
    train(config, tmp_path / "here", backend=HERE)
    train(config.model_copy(update={"iterations": 1}), tmp_path / "there", backend=HERE)
    resume(tmp_path / "there", iterations=2, backend=Backend(workers=2))
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    assert all(outcome.identical for outcome in replay(tmp_path / "there"))

    run, env = metaloom.open_run(tmp_path / "here"), Parts()
    batch = run[0].rollouts(0)
    expected = flatten(env.observation_space, env.reset(seed=0)[0])
    assert batch.observations.shape[-1] == len(expected) == 13
    np.testing.assert_array_equal(np.delete(batch.observations[0, 0, 0], [6, 7]), np.delete(expected, [6, 7]))
    np.testing.assert_allclose(batch.observations[0, 0, 1, 6:8], 0.9 * batch.observations[0, 0, 0, 6:8], rtol=1e-6)
    names = [*run.components("observation")]
    assert names[:7] == ["heading.0", "heading.1", "heading.2", "heading.3", "keys.0", "keys.1", "near.0.0"]
    assert names[7:] == ["near.0.1", "near.1.0", "near.1.1", "near.1.2", "near.1.3", "near.1.4"]

    # The policy's actions 0 ... 5 are the combinations, and the reward says which one the environment took.
    parts = np.stack(np.unravel_index(batch.actions, (2, 3)), -1)
    np.testing.assert_array_equal(batch.rewards, parts[..., 1] - parts[..., 0])
    policy = run.policy()
    adapted = policy.adapt(env, episodes=2)
    seen = np.stack([expected, expected]).astype(np.float32)
    assert adapted(seen).shape == (2, 2)
    assert all(env.action_space.contains(action) for action in adapted(seen))
    adapted.save(tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    np.testing.assert_array_equal(session.run(None, {"observations": seen})[0], adapted(seen))
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["metaloom.observation_names"]) == names
    adapted.save(tmp_path / "policy.safetensors")
    np.testing.assert_array_equal(metaloom.load_policy(tmp_path / "policy.safetensors")(seen), adapted(seen))


@pytest.mark.parametrize("part", [None, "heading", "keys", "near", "switches"])
def test_a_policy_takes_what_the_environment_shows_and_gives_what_it_takes(part, tiny_config, tmp_path):
    env = Switches() if part == "switches" else Shows(part)
    settings = {"name": f"wrapped_envs:{type(env).__name__}", "options": {} if part == "switches" else {"part": part}}
    config = tiny_config(env=env_in(**settings, copies="kept"), algorithm="a2c", iterations=1)
    policy = metaloom.train(config, tmp_path / "run", progress=False).policy()
    policy.save(tmp_path / "policy.safetensors")
    seen, _ = env.reset(seed=1)
    for _ in range(2):
        action = policy(seen)
        assert env.action_space.contains(action)
        vector = flatten(env.observation_space, seen)
        np.testing.assert_array_equal(policy(np.stack([vector, vector])), [action, action])
        for asked in (policy, metaloom.load_policy(tmp_path / "policy.safetensors")):
            np.testing.assert_array_equal(asked(seen), action)
            assert asked.log_prob(seen, asked.act(seen)) == asked.log_prob(vector, asked.act(vector))
        seen, *_ = env.step(action)
    for wrong in ({"other": 1}, [{"near": 1}], ["go", "on"], (np.zeros(2), "go")):
        with pytest.raises(ValueError, match=r"^got .*the observation"):
            policy(wrong)


def test_an_action_of_a_minari_export_is_the_combination_that_the_environment_took(tiny_config, tmp_path):
    config = tiny_config(env=env_in(name="wrapped_envs:Switches"), algorithm="a2c", iterations=1)
    train(config, tmp_path / "run", backend=HERE)
    export(storage.open_run(tmp_path / "run"), tmp_path / "minari", "minari")
    dataset = minari.MinariDataset(next((tmp_path / "minari").rglob("data")))
    assert dataset.action_space == MultiBinary(9)
    for episode in dataset.iterate_episodes():
        assert all(dataset.action_space.contains(action) for action in episode.actions)
        np.testing.assert_array_equal(episode.actions.sum(1), episode.rewards)


@pytest.mark.parametrize("space", [Discrete(3, start=2), MultiDiscrete([2, 3, 4]), MultiBinary((2, 2))])
def test_every_action_of_several_parts_is_one_of_the_policys_here_in_a_file_and_as_recorded(space):
    taken = action_map(space, None)
    n = space.n if isinstance(space, Discrete) else math.prod(sizes_of(space))
    found = taken(np.arange(n)).astype(space.dtype)
    assert len({action.tobytes() for action in found}) == n
    assert all(space.contains(action) for action in found)
    assert space_from(json.loads(json.dumps(described_space(space)))) == space
    np.testing.assert_array_equal(_ActionMap(space, None)(torch.arange(n)), found)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"heading": 0}, "got the observation['heading'] 0; expected an integer in Discrete(4, start=1)"),
        ({"keys": np.zeros(3, np.int8)}, "got the observation['keys'] array([0, 0, 0], dtype=int8); expected an"),
        ({"near": (np.zeros(3), np.zeros(2, int))}, "shape (3,) as the observation['near'][0]; expected numbers of"),
        ({"near": [np.zeros(2)]}, "as the observation['near']; expected a tuple of 2 parts"),
        ({"other": 1}, "got ['heading', 'keys', 'near', 'other'] as the observation; expected a dict of"),
    ],
)
def test_a_part_that_is_not_in_its_space_is_refused_by_its_name(wrong, words, monkeypatch):
    monkeypatch.setattr(Parts, "wrong", wrong)
    with pytest.raises(EnvError, match=re.escape(words)):
        make_env(EnvConfig(**env_in(name="wrapped_envs:Parts"))).reset(seed=0)


def test_a_number_stands_for_a_part_of_one_number_and_for_no_other():
    space = Dict({"mass": Box(0, 9, (1,)), "position": Box(-1, 1, (2,))})
    np.testing.assert_array_equal(flat(space, {"mass": 8.0, "position": np.ones(2)}), [8, 1, 1])
    with pytest.raises(
        EnvError, match=r"shape \(\) as the observation\['position'\]; expected numbers of shape \(2,\)"
    ):
        flat(space, {"mass": 8.0, "position": 1.0})


# What messages advise.

OWN = """
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Class(gymnasium.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        if not isinstance(env.observation_space, Box):
            self.observation_space = Box(0, 1, (1,))
        if env.action_space.shape:
            self.action_space = Discrete(2)

    def seen(self, observation):
        return observation if isinstance(observation, np.ndarray) else np.zeros(1)

    def reset(self, **about):
        observation, info = self.env.reset(**about)
        return self.seen(observation), info

    def step(self, action):
        if self.env.action_space.shape:
            action = self.env.action_space.sample()
        observation, *rest = self.env.step(action)
        return self.seen(observation), *rest
"""


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Spoken", {}, "Remove the other parts"),
        ("OnlySpoken", {}, "Wrap it in a custom gymnasium.Wrapper"),
        ("ManySwitches", {}, "with 8,192 combinations"),
        ("Grasps", {}, "expected a one-dimensional, non-empty Box of floats"),
        ("Camera", {}, "whose pixels it would treat as unrelated numbers"),
        (
            "Camera",
            {"algorithm": "recurrent-ppo", "policy": {"network": "gru", "hidden_sizes": [8]}},
            "or flatten images with",
        ),
        ("Switches", {"action_scale": 10}, "cannot be scaled"),
        ("Unbounded", {"action_scale": 10}, "cannot be mapped onto it"),
    ],
)
def test_what_a_refusal_advises_works_where_it_is_given(name, settings, words, tiny_config, tmp_path, monkeypatch):
    (tmp_path / "my_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    scale = {"action_scale": settings.get("action_scale"), "copies": "kept"}
    others = {key: value for key, value in settings.items() if key != "action_scale"}
    tiny = {"algorithm": "a2c", "iterations": 1, "policy": {"hidden_sizes": [8]}, **others}
    given = tiny_config(env={"name": f"wrapped_envs:{name}", **scale}, **tiny)
    with pytest.raises(ValueError, match=words) as refusal:
        train(given, tmp_path / "run", backend=HERE)
    (advice,) = re.findall(r"--set (?:'([^']+)'|(\S+))", str(refusal.value))
    advised = build_config(override(given.model_dump(exclude_unset=True), ["".join(advice)]))
    train(advised, tmp_path / "run", backend=HERE)
    assert len(storage.open_run(tmp_path / "run").iterations) == 1


def test_the_wrapper_that_is_advised_for_another_action_box_makes_the_policy_adapt(tiny_config, tmp_path):
    train(tiny_config(env=env_in(), iterations=1), tmp_path / "run", backend=HERE)
    policy, env = metaloom.open_run(tmp_path / "run").policy(), gymnasium.make("Pendulum-v1")
    env.unwrapped.action_space = Box(-1, 1, (1,), np.float32)
    with pytest.raises(ValueError, match="wrap it: ") as refusal:
        policy.adapt(env, episodes=2)
    wrapped = eval(str(refusal.value).partition("wrap it: ")[2], {"gymnasium": gymnasium, "np": np, "env": env})
    policy.adapt(wrapped, episodes=2, max_episode_steps=3)
