import dataclasses
import pickle

import numpy as np
import pytest

from metaloom.pipeline.policies.actors.contract import ACTIONS
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Samples, TaskBatch, TaskParams, Update
from metaloom.stages.faults import NotFinite, require_finite
from metaloom.stages.rollouts.faults import RolloutPosition
from metaloom.stages.witness import _differences, play_again
from metaloom.storage import StageRef
from metaloom.storage.format.codec import flatten

B, E, T, O, A, S, Z = 2, 3, 4, 5, 6, 4, 4  # S == Z == T, so that shapes alone do not tell their axes apart


def episodes() -> EpisodeBatch:
    return EpisodeBatch(
        observations=np.ones((B, E, T + 1, O), np.float32),
        actions=np.ones((B, E, T, A), np.float32),
        rewards=np.ones((B, E, T), np.float32),
        terminated=np.zeros((B, E), np.bool_),
        truncated=np.ones((B, E), np.bool_),
        lengths=np.full((B, E), T, np.int32),
        behavior={
            "mean": np.ones((B, E, T, A), np.float32),
            "log_std": np.ones((B, A), np.float32),
            "latent": np.ones((B, E, Z), np.float32),
            "epsilon": np.ones(B, np.float32),
        },
        reward_terms={"control": np.ones((B, E, T), np.float32)},
        initial_state=np.ones((B, E, S)),
    )


def samples() -> Samples:
    return Samples(*(np.ones((B, E, T), np.float32) for _ in range(4)))


def update() -> Update:
    learner = LearnerState({"w": np.ones((2, 3), np.float32)}, {"m.w": np.ones(3)}, {"coeff": np.ones(1)})
    return Update(learner, {"explained_variance": float("nan")})


def tasks() -> TaskBatch:
    return TaskBatch(np.ones((B, 1)), np.full(B, -1), ("direction",), ("1",))


CASES = [
    (episodes, "observations", (1, 2, 4, 0), {"task": 1, "episode": 2, "t": 4}),
    (episodes, "rewards", (0, 1, 3), {"task": 0, "episode": 1, "t": 3}),
    (episodes, "behavior.mean", (1, 0, 2, 5), {"task": 1, "episode": 0, "t": 2}),
    (episodes, "behavior.log_std", (1, 3), {"task": 1}),
    (episodes, "behavior.latent", (1, 2, 3), {"task": 1, "episode": 2}),
    (episodes, "behavior.epsilon", (1,), {"task": 1}),
    (episodes, "reward_terms.control", (1, 2, 0), {"task": 1, "episode": 2, "t": 0}),
    (episodes, "initial_state", (1, 2, 3), {"task": 1, "episode": 2}),
    (samples, "advantages", (1, 1, 1), {"task": 1, "episode": 1, "t": 1}),
    (lambda: TaskParams({"w": np.ones((B, 3, 3), np.float32)}), "params.w", (1, 2, 0), {"task": 1}),
    (tasks, "params", (1, 0), {"task": 1}),
    (update, "learner.params.w", (1, 2), {}),
    (update, "learner.optimizer.m.w", (2,), {}),
    (update, "learner.extra.coeff", (0,), {}),
]


def part(value, name):
    if isinstance(value, dict):
        return value[name]
    key, _, rest = name.partition(".")
    return part(getattr(value, key), rest) if rest else getattr(value, key)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("make", "name", "index", "place"), CASES)
def test_the_first_bad_number_is_named_by_array_task_episode_and_step(make, name, index, place, bad):
    value = make()
    part(value, name)[index] = bad
    with pytest.raises(NotFinite) as caught:
        require_finite(StageRef(3, "adapt", 1), value, flatten(value))
    about = caught.value.about
    assert {axis: about[axis] for axis in ("task", "episode", "t") if axis in about} == place
    assert (about["array"], tuple(about["index"]), about["count"]) == (name, index, 1)
    assert (about["stage"], about["iteration"], about["step"]) == ("adapt", 3, 1)
    assert f"{name} holds {bad} at" in str(caught.value)
    np.testing.assert_array_equal(caught.value.arrays[name], part(value, name))


@pytest.mark.parametrize("make", dict.fromkeys(make for make, *_ in CASES if make.__name__ != "<lambda>"))
def test_finite_numbers_pass(make):
    value = make()
    require_finite(StageRef(0, "adapt"), value, flatten(value))


def test_metrics_may_be_nan_because_they_decide_nothing():
    require_finite(StageRef(0, "meta_optimize"), update(), flatten(update()))


def test_facts_may_be_nan_because_their_declaration_determines_it_and_other_arrays_beside_them_may_not():
    value = dataclasses.replace(episodes(), facts={"distance": np.full((B, E, T), np.nan, np.float32)})
    require_finite(StageRef(0, "pre_rollouts"), value, flatten(value))
    value.rewards[1, 1, 1] = np.nan
    with pytest.raises(NotFinite, match="rewards holds nan at task 1, episode 1, step 1"):
        require_finite(StageRef(0, "pre_rollouts"), value, flatten(value))


def test_finite_numbers_whose_sum_overflows_pass():
    huge = dataclasses.replace(samples(), returns=np.full((B, E, T), 3e38, np.float32))
    require_finite(StageRef(0, "process_samples"), huge, flatten(huge))


def test_opposite_infinities_do_not_hide_each_other():
    value = samples()
    value.returns[0, 0, 0], value.returns[1, 1, 1] = np.inf, -np.inf
    with pytest.raises(NotFinite, match=r"returns holds inf at task 0, episode 0, step 0.*\(2 of 24 values"):
        require_finite(StageRef(0, "process_samples"), value, flatten(value))


def test_the_fault_keeps_place_and_arrays_on_its_way_from_a_worker():
    value = samples()
    value.values[0, 0, 0] = np.nan
    with pytest.raises(NotFinite) as caught:
        require_finite(StageRef(0, "process_samples"), value, flatten(value))
    received = pickle.loads(pickle.dumps(caught.value))
    assert (type(received), str(received), received.about) == (NotFinite, str(caught.value), caught.value.about)
    assert received.arrays.keys() == caught.value.arrays.keys()


def test_a_witness_names_the_first_step_and_array_in_which_two_episodes_differ(batch) -> None:
    same = {"speed": np.zeros((1, 1, 2), np.float32), "success": np.zeros((1, 1), np.float32)}
    stored = dataclasses.replace(
        batch(np.zeros((1, 1, 3, 2)), np.zeros((1, 1, 2)), [[2]]),
        initial_state=np.zeros((1, 1, 3)),
        reward_terms={"control": np.zeros((1, 1, 2), np.float32)},
        facts=same,
    )
    late, early = np.zeros((1, 1, 3, 2), np.float32), np.zeros((1, 1, 3, 2), np.float32)
    late[0, 0, 2], early[0, 0, 0] = 1, 1
    for changes, found in (
        ({}, []),
        ({"initial_state": np.ones((1, 1, 3))}, [(-1, "initial_state")]),
        ({"observations": late}, [(1, "observations")]),
        ({"observations": early}, [(-1, "observations")]),
        ({"rewards": np.array([[[0, 1]]], np.float32)}, [(1, "rewards")]),
        ({"terminated": np.ones((1, 1), bool), "truncated": np.zeros((1, 1), bool)}, [(2, "terminated")]),
        ({"lengths": np.array([[1]], np.int32)}, [(1, "lengths")]),
        ({"reward_terms": {"control": np.array([[[1, 0]]], np.float32)}}, [(0, "reward term control")]),
        ({"facts": {**same, "speed": np.array([[[0, 1]]], np.float32)}}, [(1, "fact speed")]),
        ({"facts": {**same, "success": np.ones((1, 1), np.float32)}}, [(2, "fact success")]),
    ):
        assert [*_differences(stored, (0, 0), dataclasses.replace(stored, **changes))] == found


def test_the_witness_is_another_real_episode_in_each_iteration_and_run(batch) -> None:
    lengths = np.full((3, 4), 2)
    lengths[1, 2:] = 0
    actions = np.arange(24, dtype=np.float32).reshape(3, 4, 2, 1)
    complete = batch(np.zeros((3, 4, 3, 2)), np.zeros((3, 4, 2)), np.full((3, 4), 2))
    stored = dataclasses.replace(complete, actions=actions, lengths=lengths.astype(np.int32), truncated=lengths > 0)
    asked = []

    def collect(params, tasks, at):
        asked.append((at.run_seed, at.iteration, at.first_task, at.first_episode))
        np.testing.assert_array_equal(params.params[ACTIONS], actions[at.first_task, at.first_episode][None])
        np.testing.assert_array_equal(tasks.params, [[at.first_task]])
        return complete

    drawn = TaskBatch(np.arange(3.0)[:, None], np.arange(3), ("direction",), ("1",))
    for seed, iteration in [(1, i) for i in range(40)] + [(2, i) for i in range(40)]:
        assert play_again(drawn, stored, RolloutPosition(seed, iteration, 1), collect) is None
    assert [at[:2] for at in asked] == [(1, i) for i in range(40)] + [(2, i) for i in range(40)]
    places = [at[2:] for at in asked]
    assert {*places[:40]} == {*places[40:]} == {(b, e) for b in range(3) for e in range(4) if lengths[b, e]}
    assert places[:40] != places[40:]
