"""Acting with a memory: what is remembered, what is not, and the same bits from stored data."""

import numpy as np
import pytest
import torch

from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.acting import check_actor_params
from metaloom.pipeline.policies.actors import ActorSetup
from metaloom.pipeline.policies.actors.on_policy import RecurrentActor
from metaloom.pipeline.policies.build import RecurrentPolicy
from metaloom.pipeline.policies.config import EncoderConfig, PolicyConfig
from metaloom.pipeline.policies.remembering import Remembering, recollect
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import TaskParams

O, B, E, T = 3, 2, 3, 4
CONTINUOUS, DISCRETE = Spaces((O,), 1.0, 2, 0), Spaces((O,), 1.0, 0, 5)
ROWS = np.arange(B * E)
of_both = pytest.mark.parametrize("spaces", [CONTINUOUS, DISCRETE], ids=["gaussian", "categorical"])
of_networks = pytest.mark.parametrize(
    "network", ["gru", "lstm", "linear-attention", "linear-attention asinh", "own_cells:Elman", "own_cells:Sums"]
)

OWN = """
import torch
from torch import nn

class Elman(nn.Module):
    def __init__(self, input_size, size=5):
        super().__init__()
        self.state_size = self.feature_size = size
        self.layer = nn.Linear(input_size + size, size)

    def forward(self, inputs, state):
        state = torch.tanh(self.layer(torch.cat([inputs, state], -1)))
        return state, state

class Drawing(Elman):
    def forward(self, inputs, state):
        return super().forward(inputs, state + torch.rand_like(state))

class Dropping(Elman):
    def forward(self, inputs, state):
        learning = torch.is_grad_enabled()
        return super().forward(nn.functional.dropout(inputs, training=learning), state)

class Counting(Elman):
    def __init__(self, input_size):
        super().__init__(input_size)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs, state):
        self.calls += 1
        return super().forward(inputs, state if self.calls < 10 else 2 * state)

class Partly(Elman):
    def __init__(self, input_size):
        super().__init__(input_size)
        self.fixed, self.idle = nn.Linear(5, 5), nn.Parameter(torch.ones(2))
        self.fixed.requires_grad_(False)
        self.register_buffer("scale", torch.full((5,), 2.0))

    def forward(self, inputs, state):
        features, state = super().forward(inputs, state)
        return self.fixed(features) * self.scale, state

class Statistics(Elman):
    def forward(self, inputs, state):
        return super().forward(inputs - inputs.mean(0), state)

class Doubles(Elman):
    def forward(self, inputs, state):
        features, state = super().forward(inputs, state)
        return features.double(), state

class Needy(Elman):
    def __init__(self, input_size, width):
        super().__init__(input_size, width)

class Sums(nn.Module):
    def __init__(self, input_size, size=5, wrong=None):
        super().__init__()
        self.state_size, self.feature_size, self.wrong = size, size, wrong
        self.layer, self.scale = nn.Linear(input_size, size), nn.Parameter(torch.ones(size))

    def forward(self, inputs, state):
        if self.wrong == "steps":
            state = state + nn.functional.linear(torch.zeros(len(inputs), inputs.shape[1]), self.layer.weight)
        # Nothing is kept of the episode before.
        state = state * (1 - inputs[:, -1:]) + self.layer(inputs)
        return torch.tanh(self.scale * state), state

    def sequence(self, inputs, state):
        if self.wrong == "raises" or (self.wrong == "long" and len(inputs) > 64):
            raise ValueError("of a sequence")
        added, ends = self.layer(inputs.relu() if self.wrong == "negative" else inputs), inputs[..., -1].cumsum(0)
        if self.wrong == "resets":
            ends = torch.zeros_like(ends)
        if self.wrong == "gradient":
            added = added.detach()
        counts = torch.tril((ends.T[:, :, None] == ends.T[:, None]).to(inputs.dtype))
        if self.wrong == "parts":
            counts[:, 256:, :256] = 0
        if self.wrong == "odd":
            counts[:, :, len(inputs) // 2 * 2 :] = 0
        if self.wrong == "single" and len(state) == 1:
            state = torch.zeros_like(state)
        states = torch.einsum("nts,snf->tnf", counts, added) + state * (ends == 0)[..., None]
        features = torch.tanh(self.scale * states)
        if self.wrong == "writes":
            inputs.mul_(0.5)
        if self.wrong == "backward":
            power = features.exp()
            features = power.log() + 0 * power.add_(0)
        return features if self.wrong == "shape" else (features, states[0 if self.wrong == "last" else -1])

class Positions(nn.Module):
    def __init__(self, input_size, positions):
        super().__init__()
        self.state_size, self.feature_size = 6, 5
        self.layer, self.table = nn.Linear(input_size, 5), nn.Parameter(torch.rand(positions, 5))

    def forward(self, inputs, state):
        features, state = self.sequence(inputs[None], state)
        return features[0], state

    def sequence(self, inputs, state):
        at = state[:, -1] + torch.arange(len(inputs))[:, None]
        sums = state[:, :-1] + (self.layer(inputs) * self.table[at.round().long()]).cumsum(0)
        return sums.tanh(), torch.cat([sums[-1], at[-1, :, None] + 1], -1)

class LayerNamedSequence(nn.Module):
    def __init__(self, input_size):
        super().__init__()
        self.state_size = self.feature_size = 5
        self.sequence = nn.Sequential(nn.Linear(input_size + 5, 5), nn.Tanh())

    def forward(self, inputs, state):
        state = self.sequence(torch.cat([inputs, state], -1))
        return state, state

class Eye(nn.Module):
    def __init__(self, input_shape, output_size):
        super().__init__()
        self.see, self.tell = nn.Conv2d(1, 3, 4, stride=2), nn.LazyLinear(output_size)
        self.tell(self.see(torch.zeros(1, 1, *input_shape[:2])).flatten(1))

    def forward(self, images):
        return self.tell(torch.relu(self.see(images.permute(0, 3, 1, 2))).flatten(1))

class Silent(nn.Module):
    def __init__(self, input_size):
        super().__init__()
"""


@pytest.fixture(scope="module", autouse=True)
def own_cells(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    (folder / "own_cells.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def config_of(network):
    if ":" in network:
        return PolicyConfig(network=network)
    name, _, reading = network.partition(" ")
    return PolicyConfig(network=name, hidden_sizes=(6,), network_options={"reading": reading} if reading else {})


def made(network, spaces, num_tasks=B):
    """A policy's settings, itself in torch, and its parameters for every task."""
    config = config_of(network)
    policy = RecurrentPolicy(spaces, config)
    rng = np.random.default_rng(0)
    params = {  # as once they have learned: those that begin with zero are not zero any more
        name: value if value.any() else rng.normal(scale=0.3, size=value.shape).astype(value.dtype)
        for name, value in policy.initialize(rng, 1.0).items()
    }
    return config, policy, params, TaskParams.broadcast(params, num_tasks)


def actor_of(config, spaces, params, *, tasks=range(B), deterministic=False, memory=None, episode=0):
    taken = np.zeros((T, len(tasks) * E, spaces.action_size or 1), np.float32)
    rngs = None if deterministic else [generator(0, "actions", b, episode) for b in tasks]
    return RecurrentActor(
        ActorSetup(config, params, taken, num_rows=E, spaces=spaces, rngs=rngs, belief_rng=generator, memory=memory)
    )


def episode_of(actor, observations, *, rewards=None):
    """Act through an episode of T steps; rewards follow from the observations unless given."""
    rows = np.arange(observations.shape[1])
    for t in range(T):
        actor.act(t, observations[t], rows)
        earned = observations[t, :, 0] if rewards is None else rewards[t]
        actor.learn_of(rows, earned.astype(np.float32), np.full(len(rows), t == T - 1))
    return {name: value.copy() for name, value in actor.behavior_by_step.items()}


def observed(seed=1, tasks=B):
    return np.random.default_rng(seed).normal(size=(T, tasks * E, O)).astype(np.float32)


@of_networks
@of_both
def test_acting_is_what_torch_computes_of_the_whole_sequence(network, spaces):
    config, policy, params, of_tasks = made(network, spaces)
    actor, seen = actor_of(config, spaces, of_tasks), observed()
    behavior = episode_of(actor, seen)
    before = np.zeros((T, B * E, (spaces.num_actions or spaces.action_size) + 2), np.float32)
    actions = np.eye(5)[actor.actions] if spaces.num_actions else actor.actions
    before[1:] = np.concatenate([actions, seen[..., :1], np.zeros((T, B * E, 1))], -1)[:-1]
    tensors = {name: torch.tensor(value) for name, value in params.items()}
    features = policy.features(tensors, torch.tensor(np.concatenate([seen, before], -1)))
    now = policy.distribution(tensors, features.flatten(0, 1))
    name, value = ("log_probs", now.log_probs) if spaces.num_actions else ("mean", now.mean)
    np.testing.assert_allclose(behavior[name], value.numpy().reshape(behavior[name].shape), atol=2e-6)


def test_only_differences_of_keys_count_however_large_they_are():
    _, _, _, of_tasks = made("linear-attention", DISCRETE)
    config, behavior = config_of("linear-attention"), []
    for added in (0, 200):
        params = dict(of_tasks.params)
        params["cell.key.bias"] = params["cell.key.bias"] + np.float32(added)
        behavior.append(episode_of(actor_of(config, DISCRETE, TaskParams(params), deterministic=True), observed()))
    np.testing.assert_allclose(behavior[1]["log_probs"], behavior[0]["log_probs"], atol=1e-4)


@pytest.mark.parametrize("learn_std", [True, False])
def test_only_the_standard_deviation_may_be_left_as_it_is(learn_std):
    policy = RecurrentPolicy(CONTINUOUS, config_of("gru").model_copy(update={"learn_std": learn_std}))
    names = [*policy.initialize(np.random.default_rng(0), 1.0)]
    assert policy.learned(dict.fromkeys(names)) == tuple(names if learn_std else names[:-1])
    assert names[-1] == "log_std"


@of_networks
@of_both
def test_hidden_states_come_again_bit_for_bit_from_what_is_stored(network, spaces):
    config, _, _, params = made(network, spaces)
    first = actor_of(config, spaces, params)
    episode_of(first, observed())
    second = actor_of(config, spaces, params, memory=first.memory, episode=1)
    behavior = episode_of(second, observed(2))

    remembering = Remembering(config, spaces, params, E)
    for actor, seen in ((first, observed()), (second, observed(2))):

        def stored(values):
            return np.moveaxis(values.reshape(T, B, E, *values.shape[2:]), 0, 2)

        outputs = recollect(
            remembering,
            stored(seen),
            stored(actor.actions),
            stored(seen[..., 0]),
            np.full((B, E), T),
        )
    for name in ("state", "last"):
        assert np.array_equal(getattr(remembering.memory, name), getattr(second.memory, name))
    if not spaces.num_actions:
        assert np.array_equal(outputs, stored(behavior["mean"]))


@of_both
def test_what_is_remembered_of_episodes_of_several_lengths_comes_again_from_what_is_stored(spaces):
    config, _, _, params = made("gru", spaces)
    actor, seen, lengths = actor_of(config, spaces, params), observed(), np.array([[4, 1, 2], [3, 4, 1]])
    for t in range(T):
        rows = np.flatnonzero(lengths.ravel() > t)
        actor.act(t, seen[t], rows)
        actor.learn_of(rows, seen[t, rows, 0], lengths.ravel()[rows] == t + 1)
    remembering = Remembering(config, spaces, params, E)
    parts = (seen, actor.actions, seen[..., 0])
    recollect(remembering, *(np.moveaxis(part.reshape(T, B, E, *part.shape[2:]), 0, 2) for part in parts), lengths)
    for name in ("state", "last"):
        assert np.array_equal(getattr(remembering.memory, name), getattr(actor.memory, name))


@of_both
def test_a_trial_begins_with_zeros_and_its_second_episode_with_what_was_seen(spaces):
    config, _, _, params = made("gru", spaces)
    first = actor_of(config, spaces, params, deterministic=True)
    assert not first.memory.state.any()
    assert not first.memory.last.any()
    begun = episode_of(first, observed())
    assert first.memory.state.any()
    assert (first.memory.last[..., -1] == 1).all()  # the end of an episode

    # Another trial after it, as far as one can be: nothing of state, action, reward or end is left.
    again = episode_of(actor_of(config, spaces, params, deterministic=True), observed())
    going_on = episode_of(actor_of(config, spaces, params, deterministic=True, memory=first.memory), observed())
    for name in begun:
        assert np.array_equal(again[name], begun[name])
        assert not np.array_equal(going_on[name][0], begun[name][0])


@of_both
@pytest.mark.parametrize("part", ["state", "last"])
def test_each_part_of_the_memory_counts(spaces, part):
    config, _, _, params = made("gru", spaces)
    actor = actor_of(config, spaces, params, deterministic=True)
    nothing = actor.memory
    begun = episode_of(actor, observed())
    memory = type(nothing)(**{**vars(nothing), part: getattr(actor.memory, part)})
    other = episode_of(actor_of(config, spaces, params, deterministic=True, memory=memory), observed())
    assert all(not np.array_equal(other[name][0], begun[name][0]) for name in begun)


@of_networks
@of_both
def test_a_tasks_bits_depend_on_no_other_task(network, spaces):
    config, _, _, params = made(network, spaces, num_tasks=3)
    together = actor_of(config, spaces, params, tasks=range(3))
    behavior, seen = episode_of(together, observed(tasks=3)), observed(tasks=3)
    for b in range(3):
        rows = slice(b * E, (b + 1) * E)
        alone = actor_of(config, spaces, params.slice(b, b + 1), tasks=[b])
        found = episode_of(alone, seen[:, rows])
        assert np.array_equal(alone.actions, together.actions[:, rows])
        assert all(np.array_equal(found[name], behavior[name][:, rows]) for name in found)


def test_rows_that_have_ended_remember_what_they_had():
    config, _, _, params = made("gru", CONTINUOUS)
    actor = actor_of(config, CONTINUOUS, params)
    actor.act(0, observed()[0], ROWS)
    actor.learn_of(ROWS, np.ones(len(ROWS), np.float32), ROWS == 4)
    before, others = actor.memory, ROWS[ROWS != 4]
    actor.act(1, observed()[1], others)
    actor.learn_of(others, np.zeros(len(others), np.float32), np.zeros(len(others), bool))
    for name in ("state", "last"):
        after = getattr(actor.memory, name)
        assert np.array_equal(after[1, 1], getattr(before, name)[1, 1])
        assert not np.array_equal(after[0, 0], getattr(before, name)[0, 0])


def test_parameters_that_do_not_fit_are_refused():
    config, _, _params, of_tasks = made("gru", CONTINUOUS)
    check_actor_params("recurrent", config, of_tasks.params, CONTINUOUS)
    wrong = {**of_tasks.params, "cell.hidden_bias": np.zeros((B, 3), np.float32)}
    with pytest.raises(ValueError, match=r"policy parameter cell.hidden_bias: got \(2, 3\); expected \[B, 18\]"):
        check_actor_params("recurrent", config, wrong, CONTINUOUS)
    half = {**of_tasks.params, "trial.state": np.zeros((B, 6), np.float32)}
    with pytest.raises(ValueError, match=r"policy parameter trial\.last: got nothing"):
        check_actor_params("recurrent", config, half, CONTINUOUS)
    without = {name: value for name, value in of_tasks.params.items() if name != "log_std"}
    with pytest.raises(ValueError, match=r"policy parameter log_std: got nothing"):
        check_actor_params("recurrent", config, without, CONTINUOUS)
    config, _, _params, discrete = made("gru", DISCRETE)
    check_actor_params("recurrent", config, discrete.params, DISCRETE)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Drawing", "draws random numbers when it is called"),
        ("Dropping", "draws random numbers when it is called"),
        ("Counting", "changes its buffer calls when it is called"),
        ("Statistics", "depends on the other rows"),
        ("Silent", "state_size is None; expected integers"),
        ("Nothing", "own_cells:Nothing"),
        ("Doubles", r"^policy.network: own_cells:Doubles returns outputs of torch.float64; expected float32"),
        ("Needy", r"own_cells:Needy\(\d+, ...\) raised TypeError: .*'width'; .* called with \(input_size\)"),
    ],
)
def test_a_cell_that_does_not_keep_to_the_contract_is_refused(name, reason):
    with pytest.raises(ConfigError, match=reason):
        RecurrentPolicy(CONTINUOUS, config_of(f"own_cells:{name}"))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (
            "resets",
            r"Sums.sequence returned features -?\d.* at \(1, .*\), but step by step -?\d.*; they must agree to 1e-06",
        ),
        ("last", r"Sums.sequence returned states -?\d.* at .*, but step by step -?\d"),
        ("gradient", r"by own_cells:Sums.sequence the gradient of layer.weight 0 at .*, but step by step -?\d"),
        ("negative", r"Sums.sequence returned features -?\d.* at .*, but step by step"),
        ("parts", r"Sums.sequence returned features -?\d.* at \(25\d, .*\), but step by step"),
        ("odd", r"Sums.sequence returned features .* at \(2, 0, .*\), but step by step"),
        ("single", r"Sums.sequence returned features .* at \(0, 0, .*\), but step by step"),
        (
            "shape",
            r"Sums.sequence returned \['Tensor'|sequence returned \[\(2, 4, 5\)\]; expected \[\(2, 4, 5\), \(4, 5\)\]",
        ),
        ("raises", r"Sums.sequence raised ValueError on inputs of shape \(2, 4, 7\) .* float64: of a sequence"),
        ("long", r"Sums.sequence, unlike 70 single steps, raised ValueError on inputs of shape \(70, 4, 7\)"),
        ("writes", "Sums.sequence modifies its inputs in place, which other code reads; return a copy"),
        ("backward", "the gradient of own_cells:Sums.sequence raised RuntimeError .* by an inplace operation"),
        ("steps", "Sums, called step by step, raised RuntimeError .* both float64: .* same dtype"),
    ],
)
def test_a_sequence_that_is_not_the_steps_of_its_cell_is_refused_with_both_values(wrong, reason):
    config = PolicyConfig(network="own_cells:Sums", network_options={"wrong": wrong})
    with pytest.raises(ConfigError, match=reason):
        RecurrentPolicy(CONTINUOUS, config)


@pytest.mark.parametrize("positions", [50, 100, 300])
def test_a_sequence_is_compared_on_no_more_steps_than_single_steps_take(positions):
    RecurrentPolicy(CONTINUOUS, PolicyConfig(network="own_cells:Positions", network_options={"positions": positions}))
    with pytest.raises(ConfigError, match=r"Positions, called step by step, raised IndexError"):
        RecurrentPolicy(CONTINUOUS, PolicyConfig(network="own_cells:Positions", network_options={"positions": 2}))


def test_learning_calls_the_sequence_that_a_cell_offers_and_acting_its_steps(monkeypatch):
    config, policy, params, of_tasks = made("own_cells:Sums", CONTINUOUS)
    cell_class, called = policy.cell._class, []
    plain = cell_class.sequence
    monkeypatch.setattr(cell_class, "sequence", lambda *given: called.append(len(given[1])) or plain(*given))
    inputs = torch.rand(6, 2, policy.cell.spec.input_size).round()
    tensors = {name: torch.tensor(value) for name, value in params.items()}
    features = policy.features(tensors, inputs)
    assert called == [6]
    remembering = Remembering(config, CONTINUOUS, of_tasks, num_rows=E)
    remembering.outputs()
    assert called == [6]
    monkeypatch.delattr(cell_class, "sequence")
    torch.testing.assert_close(features, policy.features(tensors, inputs))


def test_a_layer_that_is_called_sequence_is_learned_step_by_step():
    _config, policy, params, _of_tasks = made("own_cells:LayerNamedSequence", CONTINUOUS)
    inputs = torch.rand(6, 2, policy.cell.spec.input_size)
    features = policy.features({name: torch.tensor(value) for name, value in params.items()}, inputs)
    assert features.shape == (6, 2, 5)


def test_what_a_cell_freezes_is_what_its_constructor_makes_and_no_parameter():
    cell = RecurrentPolicy(CONTINUOUS, config_of("own_cells:Partly")).cell
    assert [*cell.shapes] == ["cell.idle", "cell.layer.weight", "cell.layer.bias"]
    params = {name: torch.tensor(value) for name, value in cell.initialize(np.random.default_rng(0)).items()}
    inputs, state = torch.rand(3, 2, cell.spec.input_size), torch.zeros(2, 5)
    one = cell(params, inputs, state)
    again = RecurrentPolicy(CONTINUOUS, config_of("own_cells:Partly")).cell(params, inputs, state)
    assert all(torch.equal(*pair) for pair in zip(one, again, strict=True))
    # What it does not learn follows the inputs to their dtype, as to their device.
    double = cell({name: value.double() for name, value in params.items()}, inputs.double(), state.double())
    torch.testing.assert_close(double[0].float(), one[0])


@pytest.mark.parametrize("network", ["gru", "linear-attention", "own_cells:Elman"])
@pytest.mark.parametrize("encoder", ["cnn", "own_cells:Eye", "mlp"])
def test_behind_an_encoder_what_acts_is_what_learns(encoder, network):
    spaces = DISCRETE if encoder == "mlp" else Spaces((8, 8, 1), 255.0, 0, 5)
    config = config_of(network).model_copy(update={"encoder": EncoderConfig(name=encoder, size=7)})
    policy, rng = RecurrentPolicy(spaces, config), np.random.default_rng(0)
    params = policy.initialize(rng, 1.0)
    assert [name.partition(".")[0] for name in params][:2] == ["encoder", "encoder"]
    of_tasks = TaskParams.broadcast(params, B)
    check_actor_params("recurrent", config, of_tasks.params, spaces)
    observations = rng.integers(256, size=(B, E, T + 1, spaces.observation_size)).astype(np.float32)
    actions, rewards = rng.integers(5, size=(B, E, T)), rng.normal(size=(B, E, T)).astype(np.float32)
    whole = (observations, actions, rewards, np.full((B, E), T))
    found = recollect(Remembering(config, spaces, of_tasks, E), *whole)
    alone = recollect(Remembering(config, spaces, of_tasks.slice(1, 2), E), *(part[1:] for part in whole))
    assert np.array_equal(found[1:], alone)
    ends = (np.arange(T) == T - 1) * np.ones((B, E, 1))
    before = np.zeros((B, E, T, 7), np.float32)
    before[:, :, 1:] = np.concatenate([np.eye(5)[actions], rewards[..., None], ends[..., None]], -1)[:, :, :-1]
    inputs = np.concatenate([observations[:, :, :-1], before], -1).reshape(B * E, T, -1).swapaxes(0, 1)
    tensors = {name: torch.tensor(value) for name, value in params.items()}
    features = policy.features(tensors, torch.tensor(inputs))
    expected = policy.distribution(tensors, features.flatten(0, 1)).log_probs.reshape(T, B, E, 5)
    logits = torch.tensor(found).permute(2, 0, 1, 3)
    torch.testing.assert_close(logits.log_softmax(-1), expected, rtol=1e-4, atol=1e-5)


def test_images_are_refused_without_an_encoder():
    with pytest.raises(ConfigError, match=r"observations are images of shape \(8, 8, 3\)"):
        RecurrentPolicy(Spaces((8, 8, 3), 255.0, 0, 4), config_of("gru"))
