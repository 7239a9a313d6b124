"""The learner over whole updates."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from metaloom.pipeline.algorithms.contract import NumericalError
from metaloom.pipeline.algorithms.pearl.learner import METRICS
from metaloom.pipeline.types import LearnerState, Minibatch, Transitions

from .conftest import A, C, K, N, O, Z, build, small

PRIOR_VARIANCE = 1.0


def arrays(learner: LearnerState) -> dict[str, np.ndarray]:
    return {**learner.params, **learner.extra, **{f"optimizer.{n}": v for n, v in learner.optimizer.items()}}


def assert_same_bits(a: LearnerState, b: LearnerState) -> None:
    assert arrays(a).keys() == arrays(b).keys()
    for name, value in arrays(a).items():
        np.testing.assert_array_equal(value, arrays(b)[name], err_msg=name)


def update(settings, learner, *minibatches, run_seed=1, iteration=0, parallel=map, discount=0.9):
    algorithm = build(settings, discount)
    return algorithm.update(learner, minibatches, run_seed=run_seed, iteration=iteration, parallel=parallel)


def initial(settings=None, run_seed=0) -> LearnerState:
    return build(settings or small()).initialize(run_seed=run_seed)


def vector(learner: LearnerState, prefix: str) -> np.ndarray:
    return np.concatenate([v.ravel() for n, v in arrays(learner).items() if n.startswith(f"{prefix}.")])


def test_q_functions_start_apart_and_stay_apart(draw):
    before = initial()
    after, _ = update(small(), before, draw.minibatch(), draw.minibatch())
    for learner in (before, after):
        assert np.abs(vector(learner, "q1") - vector(learner, "q2")).max() > 0.1


def test_the_target_starts_as_v_and_moves_by_tau(draw):
    settings = small(soft_target_tau=0.25, v_learning_rate=0.01)
    before = initial(settings)
    np.testing.assert_array_equal(vector(before, "target_v"), vector(before, "v"))
    after, _ = update(settings, before, draw.minibatch())
    assert np.abs(vector(after, "v") - vector(before, "v")).max() > 0.005
    moved = 0.75 * vector(before, "target_v") + 0.25 * vector(after, "v")
    np.testing.assert_allclose(vector(after, "target_v"), moved, rtol=1e-6, atol=1e-7)


def test_the_first_step_of_every_optimizer_has_its_learning_rate(draw):
    # Adam's first step is α g / (|g| + 1e-8), and its first moment is then g / 10.
    rates = {"policy": 1e-3, "encoder": 2e-3, "q": 3e-3, "v": 4e-3}
    settings = small(**{f"{name}_learning_rate": rate for name, rate in rates.items()})
    before = initial(settings)
    after, _ = update(settings, before, draw.minibatch())
    smallest = np.inf
    for prefix, name in {"policy_network": "policy", "encoder": "encoder", "q1": "q", "q2": "q", "v": "v"}.items():
        optimizer = f"q.{prefix}" if name == "q" else name
        gradient = 10 * after.optimizer[f"{optimizer}.first_moment"]
        expected = rates[name] * gradient / (np.abs(gradient) + 1e-8)
        step = vector(before, prefix) - vector(after, prefix)
        np.testing.assert_allclose(step, expected, rtol=1e-4, atol=1e-7, err_msg=prefix)
        smallest = min(smallest, np.abs(gradient[gradient != 0]).min())
    assert smallest < 1e-5  # so that a larger ε would show


def test_every_step_size_follows_the_schedule(draw):
    # Adam's first step is as long as the step size wherever a gradient is large.
    settings = small(lr_schedule="exponential", lr_decay=0.1)
    learner, minibatch = draw.learner(settings), draw.minibatch()
    later = replace(learner, extra=learner.extra | {"num_updates": np.array(2)})
    for state, factor in ((learner, 1.0), (later, 0.01)):
        after, _ = update(settings, state, minibatch)
        for prefix in ("policy_network", "encoder", "q1", "q2", "v"):
            step = np.abs(vector(state, prefix) - vector(after, prefix)).max()
            assert step == pytest.approx(3e-4 * factor, rel=0.05), prefix


def each_task(transitions: Transitions) -> list[Transitions]:
    fields = transitions.__dataclass_fields__
    return [
        Transitions(*(getattr(transitions, name)[k : k + 1] for name in fields))
        for k in range(len(transitions.rewards))
    ]


def with_fields(transitions: Transitions, **fields) -> Transitions:
    return replace(transitions, **fields)


def test_what_follows_a_terminal_step_does_not_matter_and_otherwise_it_does(draw):
    learner, minibatch = draw.learner(small()), draw.minibatch()

    def learned(terminated: bool, next_observations) -> LearnerState:
        batch = with_fields(
            minibatch.transitions, terminated=np.full((K, N), terminated), next_observations=next_observations
        )
        return update(small(), learner, Minibatch(batch, minibatch.context))[0]

    here = minibatch.transitions.next_observations
    assert_same_bits(learned(True, here), learned(True, here + 1))
    assert np.abs(vector(learned(False, here), "q1") - vector(learned(False, here + 1), "q1")).max() > 1e-5


def test_with_discount_zero_every_step_is_as_a_terminal_one(draw):
    learner, minibatch = draw.learner(small()), draw.minibatch()
    ended = Minibatch(with_fields(minibatch.transitions, terminated=np.ones((K, N), bool)), minibatch.context)
    assert_same_bits(update(small(), learner, minibatch, discount=0.0)[0], update(small(), learner, ended)[0])


def test_rewards_are_scaled_for_the_critics_and_not_in_the_context(draw):
    learner, minibatch = draw.learner(small()), draw.minibatch()
    batch, context = minibatch.transitions, minibatch.context
    quadruple = Minibatch(with_fields(batch, rewards=4 * batch.rewards), context)
    scaled = update(small(reward_scale=4), learner, minibatch)[0]
    assert_same_bits(scaled, update(small(reward_scale=1), learner, quadruple)[0])
    everywhere = Minibatch(quadruple.transitions, with_fields(context, rewards=4 * context.rewards))
    assert (vector(scaled, "q1") != vector(update(small(reward_scale=1), learner, everywhere)[0], "q1")).any()


def test_next_observations_are_context_only_where_that_is_asked_for(draw):
    context = draw.transitions(K, C)
    other = with_fields(context, next_observations=context.next_observations + 1)
    for asked in (False, True):
        settings = small(use_next_obs_in_context=asked)
        learner = draw.learner(settings)
        assert learner.params["encoder.hidden_0.kernel"].shape[0] == O + A + 1 + (O if asked else 0)
        beliefs = [build(settings).infer(learner, each_task(c)).params["belief.mean"] for c in (context, other)]
        assert np.array_equal(*beliefs) is not asked


def test_bits_do_not_depend_on_the_number_of_threads(draw):
    learner, minibatches = draw.learner(small()), [draw.minibatch() for _ in range(3)]
    one, metrics = update(small(), learner, *minibatches)
    for threads in (2, 3):
        with ThreadPoolExecutor(threads) as pool:
            more, same_metrics = update(small(), learner, *minibatches, parallel=pool.map)
        assert_same_bits(one, more)
        assert same_metrics == metrics


def test_an_update_leaves_the_learner_it_began_with(draw):
    learner = draw.learner(small())
    before = {name: value.copy() for name, value in arrays(learner).items()}
    for value in arrays(learner).values():
        value.flags.writeable = False
    after, metrics = update(small(), learner, draw.minibatch(), draw.minibatch())
    for name, value in arrays(learner).items():
        np.testing.assert_array_equal(value, before[name])
        assert arrays(after)[name].dtype == value.dtype
        if name not in ("num_updates",):
            assert not np.array_equal(arrays(after)[name], value), name
    assert int(after.extra["num_updates"]) == 1
    assert metrics["gradient_steps"] == 2
    assert list(metrics) == [*METRICS, "gradient_steps"]
    assert all(np.isfinite(value) for value in metrics.values())


def test_updates_go_on_where_the_last_one_ended(draw):
    # Two iterations of one step are told apart from one of two only by their noise, so optimizers are what is compared.
    learner, minibatch = initial(), draw.minibatch()
    first, _ = update(small(), learner, minibatch)
    second, _ = update(small(), first, minibatch, iteration=1)
    assert int(second.optimizer["policy.step_count"]) == int(second.optimizer["q.q1.step_count"]) == 2
    assert int(second.extra["num_updates"]) == 2


def test_the_page_describes_every_metric():
    page = (Path(__file__).parents[4] / "docs" / "algorithms" / "pearl.md").read_text()
    table = page.split("\n## Metrics\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {*METRICS, "gradient_steps"}


def test_noise_depends_on_run_and_iteration(draw):
    learner, minibatch = draw.learner(small()), draw.minibatch()
    policies = [
        vector(update(small(), learner, minibatch, run_seed=seed, iteration=i)[0], "policy_network")
        for seed, i in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    np.testing.assert_array_equal(policies[0], policies[1])
    for other in policies[2:]:
        assert (policies[0] != other).any()


def test_a_belief_does_not_depend_on_the_tasks_beside_it(draw):
    settings = small()
    learner, context = draw.learner(settings), draw.transitions(K, 40)
    together = build(settings).infer(learner, each_task(context)).params
    for k in range(K):
        one = Transitions(*(getattr(context, name)[k : k + 1] for name in context.__dataclass_fields__))
        alone = build(settings).infer(learner, [one]).params
        for name in ("belief.mean", "belief.variance"):
            np.testing.assert_array_equal(alone[name], together[name][k : k + 1])
    assert together["belief.mean"].shape == (K, Z)
    assert (together["belief.variance"] > 0).all()


def test_who_knows_nothing_acts_by_the_prior():
    algorithm, learner = build(small()), initial()
    params = algorithm.acting_params(learner, 3).params
    assert {name for name in params if not name.startswith("policy_network.")} == {"belief.mean", "belief.variance"}
    np.testing.assert_array_equal(params["belief.mean"], np.zeros((3, Z)))
    np.testing.assert_array_equal(params["belief.variance"], np.full((3, Z), PRIOR_VARIANCE))
    for name, value in params.items():
        if name.startswith("policy_network."):
            np.testing.assert_array_equal(value[2], learner.params[name])
    assert params["policy_network.hidden_0.kernel"].shape == (3, O + Z, 10)
    assert params["policy_network.output.bias"].shape == (3, 2 * A)


def test_without_the_bottleneck_nothing_is_in_doubt(draw):
    settings = small(use_information_bottleneck=False)
    algorithm, learner = build(settings), draw.learner(settings)
    assert not algorithm.acting_params(learner, 2).params["belief.variance"].any()
    belief = algorithm.infer(learner, each_task(draw.transitions(K, C))).params
    assert belief["belief.mean"].any()
    assert not belief["belief.variance"].any()
    assert update(settings, learner, draw.minibatch())[1]["kl"] == 0


def test_minibatches_without_context_are_refused(draw):
    with pytest.raises(ValueError, match="no context; PEARL requires one"):
        update(small(), initial(), Minibatch(draw.transitions(K, N)))


def test_divergence_is_named(draw):
    minibatch = draw.minibatch()
    minibatch.transitions.rewards[2, 3] = np.nan
    with pytest.raises(
        NumericalError, match=r"parameters of (encoder|policy) are not finite.*Lower algorithm.reward_scale"
    ):
        update(small(), initial(), minibatch)


def test_the_policy_learns_to_act_by_what_the_context_says():
    # One-step tasks: the reward is -(a - goal)², and nothing but the rewards of the context tells where the goal is.
    rng = np.random.default_rng(0)
    rates = {f"{name}_learning_rate": 3e-3 for name in ("policy", "q", "v", "encoder")}
    settings = small(encoder_hidden_sizes=(32,), critic_hidden_sizes=(64,), kl_weight=0.01, reward_scale=20, **rates)
    goals = np.array([-0.5, 0.5])

    def episodes(n: int) -> Transitions:
        actions = np.tanh(rng.standard_normal((2, n, A))).astype(np.float32)
        rewards = -np.square(actions[..., 0] - goals[:, None]).astype(np.float32)
        nothing = np.zeros((2, n, O), np.float32)
        return Transitions(nothing, actions, rewards, nothing, np.ones((2, n), bool))

    algorithm, learner = build(settings), initial(settings)
    minibatches = (Minibatch(episodes(64), episodes(32)) for _ in range(600))
    learner, _ = algorithm.update(learner, minibatches, run_seed=0, iteration=0)
    z = algorithm.infer(learner, each_task(episodes(32))).params["belief.mean"]
    hidden = np.concatenate([np.zeros((2, O)), z], axis=1)
    for i in range(2):
        hidden = np.maximum(
            hidden @ learner.params[f"policy_network.hidden_{i}.kernel"]
            + learner.params[f"policy_network.hidden_{i}.bias"],
            0,
        )
    outputs = hidden @ learner.params["policy_network.output.kernel"] + learner.params["policy_network.output.bias"]
    np.testing.assert_allclose(np.tanh(outputs[:, 0]), goals, atol=0.2)
