"""Digests of the source files of a run's plug-ins."""

from collections.abc import Iterator, Mapping

from metaloom.pipeline.algorithms.contract import AlgorithmSettings
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.estimation.diagnostics import METRICS
from metaloom.pipeline.nn.spec import NETWORKS
from metaloom.pipeline.plugin_files import acting_paths, sources_of
from metaloom.pipeline.plugins import path_of
from metaloom.pipeline.schema import PluginSettings, Settings


def plugin_sources(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of every source file of a run's plug-ins; see `sources_of`."""
    return sources_of(plugin_paths(config))


def plugin_paths(config: RunConfig) -> list[str]:
    """Return module:Class of every plug-in in a run's settings."""
    metrics = (METRICS.path(name) for name in config.metrics)
    return [*acting_paths(config.env, config.policy), *metrics, *_classes(config)]


def changed_sources(now: Mapping[str, str], then: Mapping[str, object]) -> list[str]:
    """Describe each source whose digest differs from the one in `then`."""
    return [
        f"the source of {name} had the SHA-256 {before[:12]}..., found {now[name][:12]}..."
        for name, before in then.items()
        if isinstance(before, str) and now.get(name, before) != before
    ]


def _classes(settings: Settings) -> Iterator[str]:
    """Yield module:Class of settings selected by name, and of their learners, graphs and networks."""
    for value in dict(settings).values():
        if isinstance(value, PluginSettings):
            yield path_of(type(value))
        if isinstance(value, AlgorithmSettings):
            yield from (value.learner, value.graph, *(NETWORKS.path(name) for name in value.networks))
        if isinstance(value, Settings):
            yield from _classes(value)
