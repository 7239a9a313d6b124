"""Facts that environments tell, as numbers about a round of episodes."""

from collections.abc import Mapping

import numpy as np

from metaloom.pipeline.types import Array, Metrics


def fact_means(facts: Mapping[str, Array]) -> Metrics:
    """Means over episodes of facts of whole episodes, name -> [...] bool or float32.

    Of a flag `NAME_rate`, the share of episodes; of a number `average_NAME`, without those that are NaN, and NaN if all
    are. So `success_rate` is the share of episodes with success in any step.
    """
    means: Metrics = {}
    for name, values in facts.items():
        known = values if values.dtype == np.bool_ else values[~np.isnan(values)]
        means[fact_metric(name, values)] = float(known.mean(dtype=np.float64)) if known.size else np.nan
    return means


def fact_metric(name: str, values: Array) -> str:
    """The name of the mean of a fact."""
    return f"{name}_rate" if values.dtype == np.bool_ else f"average_{name}"
