"""Optuna suggestions for settings. Requires the extra `optuna`."""

import logging
from collections.abc import Mapping, Sequence
from itertools import count

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from metaloom.flows.streams import quiet
from metaloom.flows.sweeps.space import Dimension, Range, Search
from metaloom.pipeline.seeding import seed_for

Scored = tuple[Mapping[str, str], float | None]  # settings and score of a trial; the score is None if the trial failed


def suggest(search: Search, earlier: Sequence[Scored], run_seed: int) -> dict[str, str]:
    """Return settings for the next trial, as text keyed by setting, suggested by a tree-structured Parzen estimator.

    Bergstra et al. 2011. The study is rebuilt from all earlier trials, in order; failed trials rank below all others.
    The sampler is seeded with `run_seed` and the trial's number, so suggestions do not depend on the process.
    """
    distributions = {key: _distribution(dimension) for key, dimension in search.dimensions.items()}
    tried = [dict(settings) for settings, _ in earlier]
    for attempt in count():
        # Optuna draws from NumPy's RandomState, whose seed has 32 bits.
        seed = seed_for(run_seed, "search", len(earlier), attempt) % 2**32
        sampler = TPESampler(seed=seed) if attempt == 0 else RandomSampler(seed=seed)
        values = _ask(search, earlier, distributions, sampler)
        settings = {key: dimension.text(values[key]) for key, dimension in search.dimensions.items()}
        if settings not in tried:
            return settings
    raise AssertionError("unreachable: a space has more combinations than trials")


def _ask(
    search: Search, earlier: Sequence[Scored], distributions: dict[str, BaseDistribution], sampler: BaseSampler
) -> dict[str, float | str]:
    with quiet(logging.WARNING, "optuna"):  # it logs studies and trials
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for settings, score in earlier:
            # A pruned trial without values ranks below all complete trials; a failed trial would be ignored.
            state, values = TrialState.PRUNED if score is None else TrialState.COMPLETE, search.values(settings)
            study.add_trial(create_trial(state=state, value=score, params=values, distributions=distributions))
        return study.ask(distributions).params


def _distribution(dimension: Dimension) -> BaseDistribution:
    if not isinstance(dimension, Range):
        return CategoricalDistribution(dimension.texts)
    if dimension.whole:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
