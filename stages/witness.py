"""Witness of an iteration: one episode replayed in a new environment and compared with the stored one."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from metaloom.pipeline.policies.actors.contract import ACTIONS
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages.rollouts.faults import RolloutError, RolloutPosition

Collect = Callable[[TaskParams, TaskBatch, RolloutPosition], EpisodeBatch]


def play_again(tasks: TaskBatch, episodes: EpisodeBatch, position: RolloutPosition, collect: Collect) -> str | None:
    """Replay a randomly chosen episode from its seed and stored actions; return the first difference, or None."""
    real = np.argwhere(episodes.lengths > 0)
    b, e = real[generator(position.run_seed, "witness", position.iteration, 1).integers(len(real))].tolist()
    at = RolloutPosition(position.run_seed, position.iteration, position.step, b, e)
    actions = episodes.actions[b : b + 1, e].astype(np.float32)
    where = f"iteration {at.iteration}, k={at.step}, task {b}, episode {e}"
    try:
        again = collect(TaskParams({ACTIONS: actions}), tasks.slice(b, b + 1), at)
    except RolloutError as fault:
        return f"{where}: {fault.about['problem']}"
    found = min(_differences(episodes, (b, e), again), default=None)
    return None if found is None else f"{where}: {found[1]} {f'at step {found[0]}' if found[0] >= 0 else 'after reset'}"


def _differences(stored: EpisodeBatch, at: tuple[int, int], again: EpisodeBatch) -> Iterator[tuple[int, str]]:
    """Yield the first differing step and the name of each array that differs; step -1 is the reset."""
    length = min(int(stored.lengths[at]), int(again.lengths[0, 0]))
    by_step: Mapping[str, tuple[Array, Array]] = {
        "observations": (stored.observations, again.observations),
        "rewards": (stored.rewards, again.rewards),
        **{f"reward term {name}": (term, again.reward_terms[name]) for name, term in stored.reward_terms.items()},
        **{f"fact {name}": (fact, again.facts[name]) for name, fact in stored.facts.items() if fact.ndim > 2},
    }
    for name, (one, other) in by_step.items():
        first = -1 if name == "observations" else 0  # the first observation comes from the reset
        pairs = zip(one[at][: length - first], other[0, 0, : length - first], strict=True)
        if differs := [t for t, (a, b) in enumerate(pairs, first) if a.tobytes() != b.tobytes()]:
            yield differs[0], name
    if stored.initial_state[at].tobytes() != again.initial_state[0, 0].tobytes():
        yield -1, "initial_state"
    last = [(name, getattr(stored, name), getattr(again, name)) for name in ("lengths", "terminated")]
    last += [(f"fact {name}", fact, again.facts[name]) for name, fact in stored.facts.items() if fact.ndim == 2]
    yield from ((length, name) for name, one, other in last if one[at].tobytes() != other[0, 0].tobytes())
