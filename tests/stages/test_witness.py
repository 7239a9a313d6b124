"""An episode of each iteration is drawn by the seed of the run and played again; the first difference is named."""

from types import SimpleNamespace

import numpy as np
import pytest

from metaloom.pipeline.seeding import generator
from metaloom.stages.rollouts.faults import RolloutError, RolloutPosition
from metaloom.stages.witness import play_again


class Asked(Exception):
    """Carries what a witness asks for."""


def asked_for(run_seed: int, iteration: int, lengths: np.ndarray) -> tuple[float, RolloutPosition]:
    actions = np.arange(lengths.size, dtype=np.float64).reshape(*lengths.shape, 1, 1)
    episodes = SimpleNamespace(lengths=lengths, actions=actions)
    tasks = SimpleNamespace(slice=lambda first, stop: (first, stop))

    def collect(params, chosen, at):
        assert chosen == (at.first_task, at.first_task + 1)
        (played,) = params.params.values()
        raise Asked(played.item(), at)

    with pytest.raises(Asked) as caught:
        play_again(tasks, episodes, RolloutPosition(run_seed, iteration, 1), collect)
    return caught.value.args


def test_the_episode_is_drawn_from_those_that_there_are() -> None:
    lengths = np.array([[5, 0, 3, 1], [0, 2, 2, 0], [4, 4, 0, 1]])
    real = [(0, 0), (0, 2), (0, 3), (1, 1), (1, 2), (2, 0), (2, 1), (2, 3)]
    found = []
    for run_seed in (3, 4):
        for iteration in range(8):
            b, e = real[generator(run_seed, "witness", iteration, 1).integers(8)]
            played, at = asked_for(run_seed, iteration, lengths)
            assert at == RolloutPosition(run_seed, iteration, 1, b, e)
            assert played == 4 * b + e
            found.append((b, e))
    assert found[:8] != found[8:]
    assert len({*found}) > 4


def played() -> SimpleNamespace:
    """One task's episode of three steps and a place for a fourth."""
    steps = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    return SimpleNamespace(
        observations=np.arange(5, dtype=np.float32).reshape(1, 1, 5, 1),
        rewards=steps,
        reward_terms={"run": steps},
        facts={"distance": steps, "success": np.ones((1, 1), bool)},
        initial_state=np.zeros((1, 1, 2)),
        lengths=np.full((1, 1), 3),
        terminated=np.ones((1, 1), bool),
        actions=steps[..., None],
    )


def replayed(*changes: tuple[str, int, int]) -> str | None:
    """Return what is said of the second task's episode if some numbers of it are others when it is played again."""
    stored = vars(played())

    def with_empty_task(part):
        if isinstance(part, dict):
            return {name: with_empty_task(value) for name, value in part.items()}
        return np.concatenate([np.zeros_like(part), part])

    episodes = SimpleNamespace(**{name: with_empty_task(part) for name, part in stored.items()})
    again = played()
    for name, place, value in changes:
        field, _, key = name.partition(".")
        array = (getattr(again, field)[key] if key else getattr(again, field)).copy()
        array.reshape(-1)[place] = value
        if key:
            getattr(again, field)[key] = array
        else:
            setattr(again, field, array)
    tasks = SimpleNamespace(slice=lambda first, stop: None)
    return play_again(tasks, episodes, RolloutPosition(3, 5, 1), lambda *_: again)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], None),
        ([("observations", 0, 9)], "observations after reset"),
        ([("observations", 1, 9)], "observations at step 0"),
        ([("observations", 3, 9)], "observations at step 2"),
        ([("observations", 4, 9), ("rewards", 3, 9), ("reward_terms.run", 3, 9), ("facts.distance", 3, 9)], None),
        ([("rewards", 0, 9)], "rewards at step 0"),
        ([("rewards", 2, 9), ("observations", 2, 9)], "observations at step 1"),
        ([("rewards", 1, 9), ("rewards", 0, 9)], "rewards at step 0"),
        ([("reward_terms.run", 2, 9)], "reward term run at step 2"),
        ([("facts.distance", 1, 9)], "fact distance at step 1"),
        ([("facts.success", 0, 0)], "fact success at step 3"),
        ([("initial_state", 1, 9)], "initial_state after reset"),
        ([("lengths", 0, 2)], "lengths at step 2"),
        ([("lengths", 0, 4)], "lengths at step 3"),
        ([("terminated", 0, 0)], "terminated at step 3"),
    ],
)
def test_the_first_difference_is_named_with_its_step(changes, said: str | None) -> None:
    assert replayed(*changes) == (said and f"iteration 5, k=1, task 1, episode 0: {said}")


def test_a_fault_of_the_environment_is_named_as_a_difference() -> None:
    def fail(*_):
        raise RolloutError("all of it", {"problem": "step raised ValueError"})

    episodes = SimpleNamespace(lengths=np.ones((1, 1)), actions=np.zeros((1, 1, 1, 1)))
    tasks = SimpleNamespace(slice=lambda first, stop: None)
    said = play_again(tasks, episodes, RolloutPosition(3, 0, 1), fail)
    assert said == "iteration 0, k=1, task 0, episode 0: step raised ValueError"
