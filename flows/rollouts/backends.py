"""The workers of a backend."""

from collections.abc import Iterator
from contextlib import contextmanager

from metaloom.flows.rollouts.workers import Backend, LocalWorkers, RolloutWorkers, SamplerSpec, close_samplers
from metaloom.pipeline.config.run import RunConfig


@contextmanager
def rollout_workers(config: RunConfig, backend: Backend) -> Iterator[RolloutWorkers]:
    """Yield the workers for a run; local processes end with the block."""
    spec, backend = SamplerSpec.of(config, backend.threads), backend.for_tasks(config.num_tasks)
    if backend.scheduler is None and backend.workers == 0:
        try:
            yield LocalWorkers(spec)
        finally:
            close_samplers()
        return
    # Imported when needed: it takes half a second, and sampling in this process does not need it.
    from metaloom.flows.rollouts.dask import DaskWorkers

    with DaskWorkers.started(spec, backend) as workers:
        yield workers
