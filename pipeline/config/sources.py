"""The files of what a run's settings name and Metaloom does not bring, by digest."""

from collections.abc import Iterator, Mapping

from metaloom.pipeline.algorithms.contract import AlgorithmSettings
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.facts import class_path
from metaloom.pipeline.estimation.measures import METRICS
from metaloom.pipeline.nn.spec import NETWORKS
from metaloom.pipeline.plugins import path_of, source_digest
from metaloom.pipeline.policies.config import POLICIES
from metaloom.pipeline.schema import PluginSettings, Settings

_KNOWN_BY_VERSION = ("metaloom.", "gymnasium.")


def plugin_sources(config: RunConfig) -> dict[str, str]:
    """SHA-256 of the file of every plug-in of a run, by module:Class."""
    named = [
        class_path(config.env),
        NETWORKS.path(config.policy.network),
        *([POLICIES.path(config.policy.name)] if config.policy.name else []),
        *(METRICS.path(name) for name in config.metrics),
        *_classes(config),
    ]
    own = {path for path in named if ":" in path and not path.startswith(_KNOWN_BY_VERSION)}
    digests = {path: source_digest(path) for path in sorted(own)}
    return {path: digest for path, digest in digests.items() if digest is not None}


def changed_plugins(config: RunConfig, stored: Mapping[str, str]) -> list[str]:
    """Tell, a line each, which plug-ins are no longer written as they were when a run was started."""
    now = plugin_sources(config) if stored else {}
    return [
        f"{path} is not what the run was started with: its file had the SHA-256 {digest[:12]}..., found "
        f"{now[path][:12] + '...' if path in now else 'nothing'}; numbers may differ"
        for path, digest in stored.items()
        if now.get(path) != digest
    ]


def _classes(settings: Settings) -> Iterator[str]:
    """module:Class of all settings found by name, and of their learners, graphs and networks."""
    for value in dict(settings).values():
        if isinstance(value, PluginSettings):
            yield path_of(type(value))
        if isinstance(value, AlgorithmSettings):
            yield from (value.learner, value.graph, *(NETWORKS.path(name) for name in value.networks))
        if isinstance(value, Settings):
            yield from _classes(value)
