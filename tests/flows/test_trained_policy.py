"""Trained policies outside of their runs: they act as they did there, adapt as they did there, and survive as files."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium
import numpy as np
import onnxruntime
import pytest
import safetensors
import torch
from small_runs import GRADIENT_BASED, RECURRENT, SMALL_RUNS

import metaloom
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.errors import ExtraMissing, UsageError
from metaloom.flows.recipes import load_settings, new_config
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.settings import assignments
from metaloom.flows.trained import deployment
from metaloom.flows.trained.acting import TanhGaussian
from metaloom.flows.trained.deployment import PolicyFile, digest_of
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import TaskParams
from metaloom.stages.rollouts.faults import RolloutError

of_all = pytest.mark.parametrize("trained", SMALL_RUNS, indirect=True)
NONE_ADAPTS = ("a2c", "ppo", "ppo2", "svpg", "dql", "sac", *RECURRENT)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs by name, each trained when it is first asked for."""
    root, found = tmp_path_factory.mktemp("trained"), {}

    def run_of(name):
        if name not in found:
            recipe, *settings = SMALL_RUNS[name]
            config = build_config(override(load_settings(recipe), [*settings, "policy.hidden_sizes=[8]"]))
            config = config.model_copy(update={"iterations": 2})
            found[name] = metaloom.train(config, root / name, progress=False)
        return found[name]

    return run_of


@pytest.fixture
def trained(made, request):
    return made(request.param)


def observations_of(policy, n=5):
    return np.random.default_rng(3).standard_normal((n, *policy.blueprint.spaces.observation_shape)).astype(np.float32)


def most_likely(run, batch):
    """The most likely actions at every real step, as the batch recorded the acting distributions."""
    behavior = batch.behavior
    if "log_probs" in behavior or "action_values" in behavior:
        return behavior.get("log_probs", behavior.get("action_values")).argmax(-1)
    return np.tanh(behavior["mean"]) if run.config["algorithm"]["name"] == "sac" else behavior["mean"]


@pytest.mark.parametrize(
    "trained",
    [name for name in SMALL_RUNS if name not in ("pearl", "svpg", "rl2", "rl2-trpo", "varibad", *RECURRENT)],
    indirect=True,
)
def test_it_acts_and_weighs_actions_as_the_stored_episodes_say(trained):
    batch, policy = trained[1].rollouts(0), trained.policy(1)
    real, seen = batch.mask.astype(bool), batch.observations[:, :, :-1]
    np.testing.assert_allclose(policy.act(seen)[real], most_likely(trained, batch)[real], atol=1e-6)

    behavior = {name: torch.as_tensor(value) for name, value in batch.behavior.items()}
    actions = torch.as_tensor(batch.actions)
    if "log_probs" in behavior:
        expected = behavior["log_probs"].gather(-1, actions[..., None])[..., 0]
    elif "action_values" in behavior:
        epsilon, n = behavior["epsilon"][:, None, None], behavior["action_values"].shape[-1]
        expected = (epsilon / n + (1 - epsilon) * (actions == behavior["action_values"].argmax(-1))).log()
    elif "log_stds" in behavior:
        gaussian = torch.distributions.Normal(behavior["mean"].double(), behavior["log_stds"].double().exp())
        squashed = torch.distributions.TransformedDistribution(gaussian, [torch.distributions.TanhTransform()])
        expected = squashed.log_prob(actions.double().clamp(-1 + 1e-9, 1 - 1e-9)).sum(-1)
    else:
        std = behavior["log_std"][:, None, None].exp()
        expected = torch.distributions.Normal(behavior["mean"], std).log_prob(actions).sum(-1)
    found = policy.log_prob(seen, batch.actions)
    np.testing.assert_allclose(found[real], expected.numpy()[real], rtol=1e-4, atol=1e-4)


def test_every_particle_acts_and_weighs_actions_as_the_stored_episodes_of_its_task_say(made, tmp_path):
    run = made("svpg")
    batch, policy = run[1].rollouts(0), run.policy(1)
    log_probs = torch.as_tensor(batch.behavior["log_probs"])
    expected = log_probs.gather(-1, torch.as_tensor(batch.actions)[..., None])[..., 0].numpy()
    n = run.config["algorithm"]["num_particles"]
    assert len(batch.lengths) == n == 4
    for b in range(n):
        particle, real, seen = policy.task(b), batch.mask[b].astype(bool), batch.observations[b, :, :-1]
        np.testing.assert_array_equal(particle.act(seen)[real], most_likely(run, batch)[b][real])
        np.testing.assert_allclose(particle.log_prob(seen, batch.actions[b])[real], expected[b][real], atol=1e-4)
        assert repr(particle) == f"TrainedPolicy(svpg in CartPole-v1, particle {b} of 4)"
    assert np.array_equal(policy.log_prob(seen, batch.actions[-1]), policy.task(0).log_prob(seen, batch.actions[-1]))
    assert not np.array_equal(particle.log_prob(seen, batch.actions[-1]), policy.log_prob(seen, batch.actions[-1]))
    with pytest.raises(IndexError, match="task 4 is out of range; expected 0 to 3"):
        policy.task(4)
    particle.save(tmp_path / "particle.safetensors")
    for again in (metaloom.load_policy(tmp_path / "particle.safetensors"), particle.unadapted, policy.task(-1)):
        assert repr(again) == repr(particle)
        assert np.array_equal(again.log_prob(seen, batch.actions[-1]), particle.log_prob(seen, batch.actions[-1]))


@pytest.mark.parametrize("trained", GRADIENT_BASED, indirect=True)
def test_adapted_to_stored_episodes_it_is_the_stored_adapted_policy_bit_for_bit(trained):
    adapted = trained.policy(1).adapt(trained[1].rollouts(0))
    stored = trained[1].adapted(0).params
    assert adapted.params.keys() == stored.keys()
    assert all(np.array_equal(adapted.params[name], stored[name]) for name in stored)
    after = trained[1].rollouts(1)
    means = after.behavior["mean"]
    np.testing.assert_allclose(adapted.act(after.observations[:, :, :-1]), means, atol=1e-6)
    one = adapted.task(1)
    assert one.num_tasks == 1
    np.testing.assert_allclose(one.act(after.observations[1, :, :-1]), means[1], atol=1e-6)
    two = trained.policy(1).adapt(trained[1].rollouts(0).slice(0, 2))
    assert repr(two).endswith(", adapted by 1 step, 2 tasks)")
    np.testing.assert_allclose(two.act(after.observations[:2, :, :-1]), means[:2], atol=1e-5)


def test_pearl_infers_what_the_learner_infers_from_all_episodes_so_far(made):
    run = made("pearl")
    config, policy = run.config, run.policy(1)
    env = make_env(policy.blueprint.config.env)
    env.set_task(env.sample_tasks(1, np.random.default_rng(0))[0])
    once = policy.adapt(env, episodes=3, steps=1)
    twice = once.adapt(env, episodes=3)
    assert repr(twice) == "TrainedPolicy(pearl in pearl-point-robot, adapted by 2 steps)"
    assert config["algorithm"]["num_exp_traj_eval"] <= 3
    prior, first, second = (p.params["belief.variance"] for p in (policy, once, twice))
    assert (first < prior).all()
    assert (second < first).all()  # a product of Gaussians narrows with every transition
    assert np.array_equal(policy.adapt(env, episodes=3, steps=2).params["belief.mean"], twice.params["belief.mean"])
    stored = policy.adapt(run[1].rollouts(0)).task(0)
    assert (stored.adapt(env, episodes=3).params["belief.variance"] < stored.params["belief.variance"]).all()
    latent = twice.latent
    twice.reset()
    assert not np.array_equal(twice.latent, latent)
    twice.reset(seed=0)
    assert np.array_equal(twice.latent, latent)


@of_all
def test_what_is_saved_acts_alike_without_the_run(trained, tmp_path, monkeypatch):
    policy = trained.policy()
    seen, one = observations_of(policy), observations_of(policy, 1)
    expected = policy(seen)
    assert expected.dtype == make_env(policy.blueprint.config.env).env.action_space.dtype
    policy.save(tmp_path / "policy.safetensors")
    remembers = policy.blueprint.config.algorithm.trial is not None
    if remembers:
        with pytest.raises(UsageError, match="keeps a memory from step to step"):
            policy.save(tmp_path / "policy.pt2")
    else:
        policy.save(tmp_path / "policy.pt2")
    (tmp_path / "other").touch()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    monkeypatch.setattr("metaloom.storage.run.read_info", lambda path: pytest.fail("a run was opened"))
    loaded = metaloom.load_policy(tmp_path / "policy.safetensors")
    assert np.array_equal(loaded(seen), expected)
    if remembers:
        for each in (policy, loaded):
            each.reset()
    drawn = [each.act(seen, deterministic=False) for each in (policy, loaded)]
    assert np.array_equal(*drawn)
    if remembers:
        return
    program = torch.export.load(tmp_path / "policy.pt2").module()
    np.testing.assert_allclose(program(torch.tensor(seen)).numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(program(torch.tensor(one)).numpy(), policy(one), atol=1e-6)


@pytest.mark.parametrize("trained", ["promp", "ppo", "dql", "sac", "pearl"], indirect=True)
def test_an_onnx_model_acts_alike_under_another_runtime(trained, tmp_path):
    policy = trained.policy()
    policy.save(tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"))
    for n in (1, 7):
        seen = observations_of(policy, n)
        (actions,) = session.run(None, {"observations": seen})
        np.testing.assert_allclose(actions, policy(seen), atol=1e-6)
        assert actions.dtype == policy(seen).dtype


@pytest.mark.parametrize("trained", ["promp"], indirect=True)
def test_without_the_package_that_writes_onnx_its_extra_is_named(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(deployment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExtraMissing, match=r"^onnxscript is not installed; .*metaloom\[onnx\]"):
        trained.policy().save(tmp_path / "policy.onnx")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("trained", ["promp"], indirect=True)
def test_an_onnx_model_says_where_it_is_from_and_what_its_numbers_are(trained, tmp_path, capfd):
    trained.policy(1).save(tmp_path / "policy.safetensors")
    metaloom.load_policy(tmp_path / "policy.safetensors").save(tmp_path / "policy.onnx")
    assert capfd.readouterr().out == ""
    found = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx")).get_modelmeta().custom_metadata_map
    about = {name.removeprefix("metaloom."): value for name, value in found.items() if name.startswith("metaloom.")}
    components = {axis: trained.components(axis) for axis in ("observation", "action")}
    assert all(components.values())
    for axis, units in components.items():
        assert json.loads(about.pop(f"{axis}_names")) == [*units]
        assert json.loads(about.pop(f"{axis}_units")) == [*units.values()]
    assert about == {
        "run": trained.name,
        "run_id": trained.info["id"],
        "iteration": "1",
        "learner_sha256": trained.record(trained.learner_ref(1)).digest,
        "adapted": "false",
    }


def test_a_network_of_the_users_own_is_saved_and_exported_too(tmp_path, monkeypatch):
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.chdir(examples)
    monkeypatch.syspath_prepend(examples)
    run = metaloom.train(
        "promp-point-corner",
        tmp_path / "run",
        progress=False,
        iterations=1,
        num_tasks=2,
        episodes_per_task=2,
        max_episode_steps=5,
        policy={"network": "own_network:Residual"},
    )
    policy = run.policy()
    seen = observations_of(policy)
    policy.save(tmp_path / "policy.safetensors")
    assert np.array_equal(metaloom.load_policy(tmp_path / "policy.safetensors")(seen), policy(seen))
    policy.save(tmp_path / "policy.pt2")
    program = torch.export.load(tmp_path / "policy.pt2").module()
    np.testing.assert_allclose(program(torch.tensor(seen)).numpy(), policy(seen), atol=1e-6)


class Robot(gymnasium.Env):
    """What point-corner shows and takes, without being it; it counts how it is used."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gymnasium.spaces.Box(-0.2, 0.2, (2,), np.float32)

    def __init__(self):
        self.resets, self.taken, self.limit = 0, [], 10**6

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        self.t, self.at = 0, self.np_random.standard_normal(2)
        return self.at.copy(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.taken.append(action)
        self.t, self.at = self.t + 1, self.at + action
        return self.at.copy(), float(-abs(self.at).sum()), False, self.t >= self.limit, {}


def test_adapting_to_an_environment_takes_its_episodes_and_leaves_the_policy_alone(made):
    policy, env = made("promp").policy(), Robot()
    before = {name: value.copy() for name, value in policy.params.items()}
    adapted = policy.adapt(env, episodes=4, steps=2)
    assert (env.resets, len(env.taken)) == (8, 8 * 6)
    assert all(np.array_equal(policy.params[name], before[name]) for name in before)
    assert any(not np.array_equal(adapted.params[name], before[name]) for name in before)
    double = Robot()
    double.action_space = gymnasium.spaces.Box(-0.2, 0.2, (2,), np.float64)
    assert policy.adapt(double, episodes=1).adapted  # which takes the same actions, in more digits
    again = policy.adapt(Robot(), episodes=4).adapt(Robot(), episodes=4)
    assert all(np.array_equal(again.params[name], adapted.params[name]) for name in before)
    other = made("promp").policy(seed=1).adapt(Robot(), episodes=4, steps=2)
    assert any(not np.array_equal(other.params[name], adapted.params[name]) for name in before)
    assert all(np.array_equal(adapted.unadapted.params[name], before[name]) for name in before)


def test_an_episode_that_the_robot_ends_early_is_an_episode(made):
    env = Robot()
    env.limit = 3
    made("promp").policy().adapt(env, episodes=4)
    assert (env.resets, len(env.taken)) == (4, 12)


def test_draws_follow_from_seed_episode_and_step_alone(made):
    policy, same = made("promp").policy(seed=5), made("promp").policy(seed=5)
    seen = observations_of(policy, 1)[0]
    drawn = np.array([policy.act(seen, deterministic=False) for _ in range(70)])
    same(seen)  # the most likely action draws nothing
    assert np.array_equal(drawn, [same.act(seen, deterministic=False) for _ in range(70)])
    assert len(np.unique(drawn[:, 0])) == 70
    policy.reset()
    assert not np.array_equal(drawn[0], policy.act(seen, deterministic=False))
    policy.reset(seed=5)
    assert np.array_equal(drawn[0], policy.act(seen, deterministic=False))
    std = np.exp(policy.params["log_std"][0])
    noise = (drawn - policy.act(seen)) / std
    assert abs(noise.mean()) < 0.4
    assert 0.7 < noise.std() < 1.3


def test_threads_that_share_a_policy_act_as_one_does(made):
    policy = made("promp").policy()
    seen = [policy.act(np.full((300, 2), n)) for n in range(1000)]
    expected = [policy(each) for each in seen]
    with ThreadPoolExecutor(4) as threads:
        assert all(map(np.array_equal, threads.map(policy, seen), expected))


def test_a_pickled_policy_goes_on_in_its_episode(made):
    policy = made("promp").policy(seed=5)
    policy(np.ones(2), deterministic=False)
    same = pickle.loads(pickle.dumps(policy))
    drawn = [each(np.ones(2), deterministic=False) for each in (policy, same)]
    assert np.array_equal(*drawn)


def test_the_task_of_a_policy_that_has_not_adapted_adapts(made):
    policy = made("promp").policy()
    assert repr(policy.task(0)) == repr(policy)
    adapted = policy.task(-1).adapt(Robot(), episodes=4)
    assert repr(adapted).endswith("adapted by 1 step)")
    assert np.array_equal(adapted(np.ones(2)), policy.adapt(Robot(), episodes=4)(np.ones(2)))


@pytest.mark.parametrize("trained", NONE_ADAPTS, indirect=True)
def test_what_does_not_adapt_says_so(trained):
    with pytest.raises(UsageError, match=" does not adapt; use the policy as it is"):
        trained.policy().adapt(Robot())


def test_what_does_not_fit_is_refused_in_words(made, tmp_path):
    run = made("promp")
    policy = run.policy()
    env = Robot()
    for low, high in ((-1.0, 1.0), (-0.2, 1.0), (-1.0, 0.2)):
        env.action_space = gymnasium.spaces.Box(low, high, (2,), np.float32)
        with pytest.raises(ValueError, match=rf"got the action space Box\({low}, {high}.*RescaleAction"):
            policy.adapt(env)
    env.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    with pytest.raises(ValueError, match=r"got the action space Box\(-inf, inf.* trained in$"):
        policy.adapt(env)
    cart = gymnasium.make("CartPole-v1")
    cart.unwrapped.action_space = gymnasium.spaces.Discrete(2, start=1)
    with pytest.raises(ValueError, match=r"space Discrete\(2, start=1\); expected Discrete\(2\), .* trained in$"):
        made("ppo").policy().blueprint.wrap(cart)
    with pytest.raises(ValueError, match=r"got observations of shape \(4,\) and 2 discrete actions; expected .*\(2,\)"):
        policy.adapt(gymnasium.make("CartPole-v1"))
    with pytest.raises(ValueError, match=r"got observations of shape \(3,\); expected \(..., 2\)"):
        policy(np.zeros(3))
    with pytest.raises(ValueError, match=r"got observations of shape \(\); .*encode discrete observations as one-hot"):
        policy(1)
    with pytest.raises(ValueError, match="got actions of shape"):
        policy.log_prob(np.zeros((4, 2)), np.zeros((3, 2)))
    with pytest.raises(UsageError, match="episodes must be at least 1, got 0"):
        policy.adapt(Robot(), episodes=0)
    with pytest.raises(UsageError, match="cannot be combined with a batch of episodes"):
        policy.adapt(run[0].rollouts(0), episodes=3)
    with pytest.raises(UsageError, match="3 tasks cannot adapt to one environment"):
        policy.adapt(run[0].rollouts(0)).adapt(Robot())
    with pytest.raises(UsageError, match="got episodes of 2 tasks and a policy for 3; the numbers must match"):
        policy.adapt(run[0].rollouts(0)).adapt(run[0].rollouts(0).slice(0, 2))
    with pytest.raises(UsageError, match="got episodes of 3 tasks; expected those of the task the policy adapted to"):
        policy.adapt(Robot(), episodes=4).adapt(run[0].rollouts(0))
    with pytest.raises(ValueError, match="got episodes with observations of 4 values and discrete actions; exp"):
        policy.adapt(made("ppo")[0].rollouts(0))
    with pytest.raises(ValueError, match=r"the episodes record latent, log_stds, mean .*; expected log_std, mean,"):
        policy.adapt(made("pearl")[0].rollouts(0))
    with pytest.raises(TypeError, match=r"cannot adapt to 'Pendulum-v1'; pass a gymnasium\.Env"):
        policy.adapt("Pendulum-v1")
    with pytest.raises(UsageError, match="no learner after 5 updates; the run has completed only 2"):
        run.policy(5)
    with pytest.raises(UsageError, match="no iteration -4; choose one from -3 to 2"):
        run.policy(-4)
    for found in (np.nan, np.inf, 1e300):
        with pytest.raises(ValueError, match="observations must be finite"):
            policy(np.full(2, found))
    with pytest.raises(ValueError, match="got the action nan; expected finite numbers"):
        policy.log_prob(np.zeros(2), np.full(2, np.nan))
    discrete = made("ppo").policy()
    for action in (-1, 2, 0.5):
        with pytest.raises(ValueError, match=f"got the action {action}; expected integers from 0 to 1"):
            discrete.log_prob(np.zeros(4), action)
    for seed in (-1, 2**63):
        with pytest.raises(UsageError, match=rf"seed must be an integer from 0 to 2\*\*63 - 1, got {seed}"):
            run.policy(seed=seed)
        with pytest.raises(UsageError, match=f"seed must be .*, got {seed}"):
            policy.reset(seed=seed)
    with pytest.raises(UsageError, match=r"nowhere.policy.safetensors cannot be written \(No such file"):
        policy.save(tmp_path / "nowhere" / "policy.safetensors")
    (tmp_path / "there.onnx").touch()
    with pytest.raises(UsageError, match="already exists"):
        policy.save(tmp_path / "there.onnx")
    with pytest.raises(UsageError, match=r"unsupported suffix '.pkl'; use one of .safetensors, .onnx, .pt2"):
        policy.save(tmp_path / "policy.pkl")
    with pytest.raises(UsageError, match=r"the policy is for 3 tasks; select one with `policy.task\(b\)`"):
        policy.adapt(run[0].rollouts(0)).save(tmp_path / "policy.pt2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.onnx"]


def test_a_robot_that_fails_is_told_with_its_own_error(made):
    env = Robot()
    env.step = lambda action: 1 / 0
    with pytest.raises(RolloutError, match=r"^adapt, step 0: Robot, task 0, episode 0 .*ZeroDivisionError"):
        made("promp").policy().adapt(env)


def test_a_policy_saved_after_adapting_acts_but_adapts_from_the_start_only(made, tmp_path):
    adapted = made("promp").policy().adapt(Robot(), episodes=4)
    adapted.save(tmp_path / "mine.safetensors")
    loaded = metaloom.load_policy(tmp_path / "mine.safetensors")
    assert np.array_equal(loaded(np.ones(2)), adapted(np.ones(2)))
    with pytest.raises(UsageError, match=r"use `policy.unadapted.adapt`"):
        loaded.adapt(Robot())
    again = loaded.unadapted.adapt(Robot(), episodes=4)
    assert np.array_equal(again(np.ones(2)), adapted(np.ones(2)))


def test_a_file_that_is_no_policy_is_told_in_one_line(tmp_path):
    broken, foreign = tmp_path / "broken.safetensors", tmp_path / "foreign.safetensors"
    broken.write_bytes(b"\x80\x04pickle?")
    with pytest.raises(UsageError, match="is not a safetensors file"):
        metaloom.load_policy(broken)
    safetensors.numpy.save_file({"a": np.zeros(1)}, foreign)
    with pytest.raises(UsageError, match="the safetensors file has format None"):
        metaloom.load_policy(foreign)
    for policy in ("{", json.dumps({"config": {}})):
        metadata, arrays = {"format": "metaloom-policy-1", "policy": policy}, {"a": np.zeros(1)}
        metadata["sha256"] = digest_of(metadata, arrays)
        safetensors.numpy.save_file(arrays, foreign, metadata)
        with pytest.raises(UsageError, match="the policy's description is damaged"):
            metaloom.load_policy(foreign)
    with pytest.raises(UsageError, match="no such file"):
        metaloom.load_policy(tmp_path / "nowhere.safetensors")
    with pytest.raises(UsageError, match=r"is a folder; .* `metaloom.open_run\(.*\).policy\(\)`"):
        metaloom.load_policy(tmp_path)


def test_a_file_of_other_bits_is_refused_and_so_are_numbers_that_are_no_policy_of_its_settings(made, tmp_path):
    path = tmp_path / "policy.safetensors"
    policy = made("promp").policy().adapt(made("promp")[0].rollouts(0))
    policy.save(path)
    whole = path.read_bytes()
    for place in np.random.default_rng(0).integers(len(whole), size=50):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(UsageError, match=r"^[^\n]*(contents differ from|not a safetensors|has format)[^\n]*$"):
            metaloom.load_policy(path)

    name = "mean_network.output.kernel"
    for wrong in (policy.params[name][..., :1], policy.params[name] * np.nan):
        params = TaskParams({**policy.params, name: wrong})
        path.unlink()
        PolicyFile(policy.blueprint, policy.state, params, True, 0).write(path)
        with pytest.raises(UsageError, match=f"policy parameter {name}.*(expected|not finite)"):
            metaloom.load_policy(path)

    state = {f"params.{key}": value for key, value in policy.state.params.items()}
    task = {f"task.{key}": value for key, value in policy.params.items()}
    crafted = (
        {f"task.{name}": policy.params[name].astype(np.float64)},
        {f"task.{name}": policy.params[name][:2]},
        {f"params.{name}": policy.state.params[name].astype(np.float64)},
        {f"task.{letter}": policy.params[name] for letter in "dbeac"},
    )
    PolicyFile(policy.blueprint, policy.state, policy._params, True, 0).write(tmp_path / "whole.safetensors")
    with safetensors.safe_open(tmp_path / "whole.safetensors", framework="numpy") as file:
        metadata = file.metadata()
    for arrays in ({**state, **task, **wrong} for wrong in crafted):
        metadata["sha256"] = digest_of(metadata, arrays)
        safetensors.numpy.save_file(arrays, path, metadata)
        with pytest.raises(UsageError, match="save the policy again") as error:
            metaloom.load_policy(path)
    assert "parameters are unexpected or missing: a, b, c, d, e;" in str(error.value)
    # Files of the first versions had no particle.
    described = json.loads(metadata["policy"])
    del described["particle"]
    metadata["policy"] = json.dumps(described)
    metadata["sha256"] = digest_of(metadata, state | task)
    safetensors.numpy.save_file(state | task, path, metadata)
    assert metaloom.load_policy(path).particle == 0


def test_a_squashed_action_at_its_bounds_is_weighed_as_the_nearest_that_float32_rounds_to_them():
    u = 13 * np.log(2)  # where tanh(u) = 1 - 2**-25, half way to the next float32 below 1, and its slope is 2**-24
    found = TanhGaussian(torch.zeros(1), torch.zeros(1)).log_prob(torch.tensor([[1.0], [-1.0]]))
    np.testing.assert_allclose(found, [24 * np.log(2) - u**2 / 2 - np.log(2 * np.pi) / 2] * 2, rtol=1e-6)


def test_the_command_writes_the_policy_of_an_iteration(made, tmp_path, capsys):
    run = made("promp")
    assert cli.run(["policy", f"{run.path}@1", "--out", str(tmp_path / "first.safetensors")]) == 0
    assert f"TrainedPolicy(promp in point-corner)  {tmp_path / 'first.safetensors'}\n" in capsys.readouterr().out
    loaded = metaloom.load_policy(tmp_path / "first.safetensors")
    assert np.array_equal(loaded(np.ones(2)), run.policy(1)(np.ones(2)))
    assert not np.array_equal(loaded(np.ones(2)), run.policy()(np.ones(2)))
    assert cli.run(["policy", str(run.path), "--out", str(tmp_path / "newest.safetensors")]) == 0
    newest = metaloom.load_policy(tmp_path / "newest.safetensors")
    assert np.array_equal(newest(np.ones(2)), run.policy()(np.ones(2)))
    assert loaded.seed == run.policy(1).seed == 0


def test_the_api_trains_resumes_replays_forks_and_questions_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    sizes = {"num_tasks": 2, "episodes_per_task": 2, "max_episode_steps": 5}
    run = metaloom.train(
        "promp-point-corner", "first", progress=False, iterations=1, algorithm={"inner_lr": 0.2}, **sizes
    )
    assert run.config["algorithm"]["inner_lr"] == 0.2
    assert len(metaloom.resume(run, iterations=2, progress=False)) == len(run) == 2
    assert all(stage.identical for stage in metaloom.replay("first", 1))
    fork = metaloom.fork("first", 1, "second", iterations=2, algorithm={"inner_lr": 0.1})
    metaloom.resume(fork, progress=False, backend=Backend(workers=0))
    both = metaloom.open_runs("*")
    assert [each.name for each in both] == ["first", "second"]
    assert both.metrics()["run"].to_pylist() == ["first"] * 2 + ["second"] * 2
    assert both.episodes().num_rows == 2 * 2 * 2 * 2 * 2
    assert both[1:][0].config["algorithm"]["inner_lr"] == 0.1
    assert all(stage.ref.iteration == 1 for stage in metaloom.replay(run, -1, stage="adapt"))
    other = metaloom.optimize(run, 1, algorithm={"clip_eps": 0.01})
    assert repr(other).startswith("Counterfactual of meta_optimize(i=1, k=0) under algorithm.clip_eps=0.01\n")
    assert "RunConfig" not in repr((other, other.changed))
    assert other.ref.stage == "meta_optimize"
    newest = metaloom.evaluate(run, -1, num_tasks=2, episodes=2)
    assert (newest.updates, newest.evaluation.adaptation_steps) == (2, 1)
    title, *rows = repr(newest).splitlines()
    assert title == "EvaluationOutcome of first after 2 updates: 2 tasks (of 4), 2 test episodes each"
    assert [row.split()[0] for row in rows] == ["adaptation", "0", "1"]
    assert metaloom.optimize(run, -1, algorithm={"clip_eps": 0.01}).ref == other.ref
    assert "promp-point-corner" in metaloom.recipes()
    with pytest.raises(UsageError, match="no run matches"):
        metaloom.open_runs("nothing-*")


def test_runs_of_one_name_or_without_a_table_can_be_read_together(made, tmp_path):
    run = made("promp")
    for n, name in enumerate(("a/same", "b/same", "b/other")):
        metaloom.fork(run, 2 - n, tmp_path / name)
    metaloom.fork(run, 0, tmp_path / "c" / "new")
    for pattern in (f"{tmp_path}/**", tmp_path / "**"):
        runs = metaloom.open_runs(pattern)
        assert [each.name for each in runs] == ["same", "other", "same", "new"]
        assert runs.metrics()["run"].to_pylist() == [str(tmp_path / "a" / "same")] * 2 + [str(tmp_path / "b" / "same")]
        assert runs.metrics().column_names[:2] == ["run", "iteration"]
    with pytest.raises(storage.StageMissing, match="no table of evaluations"):
        runs.evaluations()
    with pytest.raises(UsageError, match=r"cannot search the URL s3://bucket/\*; pass a pattern"):
        metaloom.open_runs("s3://bucket/*")


def test_numbers_of_numpy_and_paths_are_settings_too():
    settings = {"seed": np.int64(3), "algorithm": {"inner_lr": np.float64(0.1)}, "init_from": Path("runs/a")}
    assert assignments(settings) == ["seed=3", "algorithm.inner_lr=0.1", 'init_from="runs/a"']
    with pytest.raises(ConfigError, match=r"a setting cannot be \{1\}; use numbers"):
        assignments({"seed": {1}})
    with pytest.raises(ConfigError, match=rf'cannot be the class Robot; use its name, "{Robot.__module__}:Robot"'):
        assignments({"env": Robot})


def test_an_empty_mapping_changes_nothing_of_a_section():
    settings = {"policy": {}, "algorithm": {}, "env": {}}
    assert new_config("promp-humanoid-dir", assignments(settings)) == new_config("promp-humanoid-dir")
    assert assignments({"env": {"options": {}}}) == ["env.options={}"]  # a setting's own value


def test_a_seed_of_numpys_is_kept_in_a_file_and_a_fraction_is_none(copy_tiny_run, tmp_path):
    run = metaloom.open_run(copy_tiny_run(tmp_path / "run"))
    policy, plain = run.policy(np.int64(1), seed=np.int64(3)), run.policy(1, seed=3)
    policy.save(tmp_path / "policy.safetensors")
    observations = np.zeros((2, *policy.blueprint.spaces.observation_shape), np.float32)
    loaded = metaloom.load_policy(tmp_path / "policy.safetensors")
    assert np.array_equal(loaded.act(observations, deterministic=False), plain.act(observations, deterministic=False))
    assert metaloom.fork(run, np.int64(1), tmp_path / "fork").info["parent"]["iteration"] == 1
    with pytest.raises(UsageError, match=r"seed must be an integer .*, got 1\.5"):
        run.policy(1, seed=1.5)
