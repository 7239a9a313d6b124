"""Facts that environments tell, as numbers about a round of episodes."""

from collections.abc import Mapping

import numpy as np

from metaloom.pipeline.types import Array, Metrics


def fact_means(facts: Mapping[str, Array]) -> Metrics:
    """Means over episodes of facts of whole episodes, name -> [...] bool or float32.

    Of a flag `NAME_rate`, the share of episodes; of a number `average_NAME`, without those that are NaN, and NaN if all
    are. So `success_rate` is the share of episodes with success in any step.
    """
    return {fact_metric(name, values): _mean(values) for name, values in facts.items()}


def fact_metric(name: str, values: Array) -> str:
    """The name of the mean of a fact."""
    return f"{name}_rate" if values.dtype == np.bool_ else f"average_{name}"


def _mean(values: Array) -> float:
    known = values if values.dtype == np.bool_ else values[~np.isnan(values)]
    return float(known.mean(dtype=np.float64)) if known.size else np.nan
