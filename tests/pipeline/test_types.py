import pickle

import numpy as np
import pytest

from metaloom.pipeline.types import (
    BatchError,
    EpisodeBatch,
    Evaluation,
    Minibatches,
    Samples,
    TaskBatch,
    TaskParams,
    Transitions,
)


def episodes(B=2, E=3, T=4, **changes):
    fields = {
        "observations": np.zeros((B, E, T + 1, 5), np.float32),
        "actions": np.zeros((B, E, T, 2), np.float32),
        "rewards": np.ones((B, E, T), np.float32),
        "terminated": np.zeros((B, E), bool),
        "truncated": np.ones((B, E), bool),
        "lengths": np.full((B, E), T, np.int32),
        "behavior": {"mean": np.zeros((B, E, T, 2), np.float32), "log_std": np.zeros((B, 2), np.float32)},
        "reward_terms": {"run": np.ones((B, E, T), np.float32)},
        "initial_state": np.zeros((B, E, 6)),
        "facts": {"won": np.zeros((B, E, T), bool), "moves": np.zeros((B, E), np.float32)},
    }
    return EpisodeBatch(**{**fields, **changes})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("observations", np.zeros((2, 3, 4, 5), np.float32)),
        ("observations", np.zeros((2, 3, 5, 5))),
        ("actions", np.zeros((2, 3, 5, 2), np.float32)),
        ("actions", np.zeros((2, 3, 4), np.int32)),
        ("actions", np.zeros((2, 3, 5), np.int64)),
        ("rewards", np.ones((2, 3, 4))),
        ("terminated", np.zeros((2, 3), np.int8)),
        ("lengths", np.full((2, 3), 5, np.int32)),
        ("lengths", np.zeros((2, 3), np.int32)),
        ("lengths", np.int32([[4, -1, 0]] * 2)),
        ("facts", {"won": np.zeros((2, 3, 5), bool)}),
        ("initial_state", np.zeros((2, 6))),
        ("initial_state", [0.0]),
        ("reward_terms", {"run": np.zeros((2, 3), np.float32)}),
        ("behavior", {"log_std": np.zeros((3, 2), np.float32)}),
    ],
)
def test_an_episode_batch_names_the_field_that_does_not_fit(field, value):
    with pytest.raises(BatchError, match=rf"^EpisodeBatch\.{field}"):
        episodes(**{field: value})


def test_the_mask_marks_the_real_steps():
    lengths = np.array([[1, 4, 2], [3, 3, 4]], np.int32)
    batch = episodes(lengths=lengths)
    assert (batch.mask.sum(axis=2) == lengths).all()
    assert (batch.mask[0, 2] == [1, 1, 0, 0]).all()
    assert batch.num_steps == 17


def test_returns_and_facts_of_episodes_leave_empty_slots_and_padding_out():
    lengths = np.array([[1, 0, 0], [4, 4, 1]], np.int32)
    real = np.arange(4) < lengths[..., None]
    batch = episodes(
        lengths=lengths,
        rewards=real.astype(np.float32),
        truncated=lengths > 0,
        facts={"place": (np.arange(5, 9) * real).astype(np.float32), "won": real & (np.arange(4) == 1)},
    )
    assert batch.mean_returns.tolist() == [1, 3]
    assert batch.episode_facts["place"].tolist() == [[5, 0, 0], [8, 8, 5]]
    assert batch.episode_facts["won"].tolist() == [[False] * 3, [True, True, False]]


def evaluation(**changes):
    test, adaptation = np.full((2, 3, 4), 5, np.int32), np.full((2, 2, 6), 7, np.int32)
    outcomes = {
        f"{kind}_{name}": values
        for kind, lengths in (("test", test), ("adaptation", adaptation))
        for name, values in (("returns", lengths * 1.0), ("lengths", lengths), ("terminated", lengths > 6))
    }
    outcomes |= {"test_facts": {"won": test > 0}, "adaptation_facts": {"won": adaptation > 0}}
    return Evaluation(np.zeros((2, 1)), np.array([-1, -1]), ("x",), ("m",), **{**outcomes, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"test_returns": np.zeros((2, 3))}, r"test_returns has shape \(2, 3\); expected \[B, K\+1, M\]"),
        ({"test_returns": np.zeros((2, 0, 4))}, r"test_returns has shape \(2, 0, 4\); expected \[B, K\+1, M\]"),
        ({"adaptation_lengths": np.zeros((2, 3, 6), np.int32)}, r"adaptation_lengths .*; expected \[2, 2, any\] and"),
        ({"adaptation_facts": {}}, r"adaptation_facts has \[\] but test_facts has \['won'\]; the names must match"),
        ({"test_facts": {"won": np.zeros((2, 2, 4), bool)}}, r"test_facts\['won'\] .*; expected \[2, 3, 4\] and bool"),
    ],
)
def test_an_evaluation_names_the_field_that_does_not_fit(changes, words):
    with pytest.raises(BatchError, match=f"Evaluation.*{words}"):
        evaluation(**changes)


def test_an_evaluation_counts_the_steps_of_test_and_of_adaptation_episodes():
    found = evaluation()
    assert found.num_steps == 2 * 3 * 4 * 5 + 2 * 2 * 6 * 7
    assert (found.adaptation_steps, found.episodes_per_step) == (2, 6)


def test_concatenated_shards_equal_the_whole():
    rng = np.random.default_rng(0)
    whole = episodes(B=5, rewards=rng.standard_normal((5, 3, 4)).astype(np.float32))
    shards = [
        episodes(B=2, rewards=whole.rewards[:2]),
        episodes(B=3, rewards=whole.rewards[2:]),
    ]
    merged = EpisodeBatch.concatenate(shards)
    assert (merged.rewards == whole.rewards).all()
    assert merged.behavior["mean"].shape == whole.behavior["mean"].shape


def test_a_task_batch_needs_a_name_and_a_unit_for_every_column():
    with pytest.raises(BatchError, match=r"^TaskBatch\.ids has shape \(3,\) and dtype int32; expected \[3\] and int64"):
        TaskBatch(np.zeros((3, 1)), np.zeros(3, np.int32), names=("x",), units=("m",))
    with pytest.raises(BatchError, match=r"^TaskBatch\.params has shape \(3, 2\)"):
        TaskBatch(np.zeros((3, 2)), np.full(3, -1), names=("x",), units=("m",))
    with pytest.raises(BatchError, match="units"):
        TaskBatch(np.zeros((3, 1)), np.full(3, -1), names=("x",), units=())


def test_broadcast_parameters_are_shared_and_not_copied():
    params = TaskParams.broadcast({"w": np.arange(3, dtype=np.float32)}, 4)
    assert params.params["w"].shape == (4, 3)
    assert params.params["w"].strides[0] == 0


@pytest.mark.parametrize("shared", [True, False])
def test_parameters_that_tasks_share_are_sent_once(shared):
    given = np.arange(400, dtype=np.float32)
    own = np.arange(1200, dtype=np.float32).reshape(3, 400)
    params = TaskParams.broadcast({"w": given}, 3) if shared else TaskParams({"w": own})
    sent = pickle.dumps(params)
    (found,) = pickle.loads(sent).params.values()
    assert np.array_equal(found, params.params["w"])
    assert (len(sent) < 2 * given.nbytes, found.strides[0] == 0) == (shared, shared)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("observations", np.zeros((2, 4, 5), np.float32)),
        ("actions", np.zeros((2, 2), np.int64)),
        ("actions", np.zeros((2, 3), np.float32)),
        ("rewards", np.zeros((2, 3))),
        ("next_observations", np.zeros((2, 3, 4), np.float32)),
        ("terminated", np.zeros((2, 3), np.int8)),
    ],
)
def test_transitions_name_the_field_that_does_not_fit(field, value):
    places, rewards = np.zeros((2, 3, 5), np.float32), np.zeros((2, 3), np.float32)
    fields = {"observations": places, "actions": places, "rewards": rewards, "next_observations": places}
    Transitions(**fields, terminated=rewards > 0)
    with pytest.raises(BatchError, match=rf"^Transitions\.{field} has shape"):
        Transitions(**{**fields, "terminated": rewards > 0, field: value})


def test_minibatches_name_the_field_that_does_not_fit():
    rows, ids = np.zeros((2, 1, 3), np.int64), np.zeros((2, 1), np.int64)
    assert Minibatches(rows, ids - [[0], [1]], rows).num_updates == 1
    for field, given in (
        ("rows", (rows.astype(np.int32), ids, rows)),
        ("task_ids", (rows, ids[:1], rows)),
        ("context_rows", (rows, ids, rows[:1])),
    ):
        with pytest.raises(BatchError, match=rf"^Minibatches\.{field} has shape"):
            Minibatches(*given)


def test_task_parameters_with_different_numbers_of_tasks_are_refused():
    with pytest.raises(BatchError, match=r"^TaskParams\.params\['a'\] has shape \(2, 1\) and dtype float64"):
        TaskParams({"a": np.zeros((2, 1))})
    with pytest.raises(BatchError, match="number of tasks"):
        TaskParams({"a": np.zeros((2, 1), np.float32), "b": np.zeros((3, 1), np.float32)})


def test_adjusted_rewards_are_optional_but_of_the_shape_of_the_others():
    values = np.zeros((2, 3, 4), np.float32)
    assert Samples(values, values, values, values).adjusted_rewards is None
    for wrong in (values[:1], values.astype(np.float64)):
        with pytest.raises(BatchError, match=r"Samples\.adjusted_rewards"):
            Samples(values, values, values, values, wrong)
