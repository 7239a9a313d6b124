"""The stages of a run with their workers, and the settings that determine each stored output."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import torch
from threadpoolctl import threadpool_limits

from metaloom.flows.errors import exit_text
from metaloom.flows.graph.changes import changes_of, warn_changed_sources
from metaloom.flows.graph.check import check_graph
from metaloom.flows.graph.runner import Runner
from metaloom.flows.graph.tables import graph_of, table_of
from metaloom.flows.rollouts.workers import (
    Backend,
    LocalWorkers,
    RolloutWorkers,
    SamplerSpec,
    close_samplers,
    usable_cores,
)
from metaloom.flows.trust import require_trust
from metaloom.pipeline.algorithms.contract import AnyLearner
from metaloom.pipeline.config.run import RunConfig, build_stored
from metaloom.pipeline.config.sources import plugin_sources
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.pipeline.numerics import normal_numerics, prepare_thread
from metaloom.stages.faults import StageFault
from metaloom.storage import IncompatibleFormat, Run, StageRef
from metaloom.storage.read.info import mapping


@contextmanager
def rollout_workers(config: RunConfig, backend: Backend) -> Iterator[RolloutWorkers]:
    """Yield the rollout workers for a run; local worker processes end with the block."""
    spec, backend = SamplerSpec.of(config, backend.threads), backend.for_tasks(config.num_tasks)
    if backend.scheduler is None and backend.workers == 0:
        try:
            yield LocalWorkers(spec)
        finally:
            close_samplers()
        return
    # Imported only when needed, since the import takes half a second.
    from metaloom.flows.rollouts.dask import DaskWorkers

    with DaskWorkers.started(spec, backend) as workers:
        yield workers


@contextmanager
def stages_of(config: RunConfig, backend: Backend, check: Callable[[], object] = lambda: None) -> Iterator[Runner]:
    """Yield the stages of a run; their workers end with the block.

    `check` may reject the settings. It is called after workers have tried the environment, since a hang kills only a
    worker. Each Python thread uses one BLAS thread and one torch thread; more would make results depend on the number
    of cores.
    """
    try:
        check_graph(config)
        torch.set_num_threads(1)  # only once: setting it between stages changed the results of a VariBAD run
        with (
            threadpool_limits(1),
            ThreadPoolExecutor(usable_cores(), "metaloom-math", prepare_thread) as pool,
            rollout_workers(config, backend) as workers,
        ):
            with normal_numerics(config.device):
                check()
                runner = Runner.build(config, workers, pool.map)
            with closing(runner.env):
                yield runner
    except SystemExit as ended:
        raise StageFault(exit_text(ended)) from ended


class RunStages:
    """The stages of a run, with the settings that determine each output.

    In a fork, outputs shared with the parent use the parent's settings. Workers start on first use.
    """

    def __init__(
        self, run: Run, backend: Backend, stack: ExitStack, config: RunConfig, check: Callable[[], object]
    ) -> None:
        self._run = run
        self._backend = backend
        self._stack = stack
        self._own = config
        self._check = check
        self._known: dict[str, Runner] = {}
        self._sources: dict[str, dict[str, str]] = {}
        self._warned: set[str] = set()
        self._configs: dict[str, RunConfig] = {json.dumps(run.config, sort_keys=True): self._own}

    def order(self, iteration: int) -> list[StageRef]:
        config = self.config(self._run.last_ref(iteration))
        return graph_of(config).order(config, iteration)

    def config(self, ref: StageRef) -> RunConfig:
        """Return the configuration that determined a stored output."""
        return self._configured(ref)[1]

    def of(self, ref: StageRef) -> Runner:
        """Return the runner that computes an output; its array shapes and output types must match the stored ones."""
        key, config = self._configured(ref)
        if key not in self._known:
            self._known[key] = self._stack.enter_context(
                stages_of(config, self._backend, self._check if config is self._own else (lambda: None))
            )
            require_stored_sizes(self._run, self._known[key].learner)
            require_stored_outputs(self._run, self._known[key].graph)
        if self._run.contains(ref):
            self._warned |= warn_changed_sources(self._run, ref, self.plugins(ref), self._warned)
        return self._known[key]

    def renew_learners(self) -> None:
        self._known = {key: stages.with_new_learner() for key, stages in self._known.items()}

    def changes(self, ref: StageRef) -> Sequence[str]:
        """Return the changes in plug-in sources since an output was stored."""
        return changes_of(self._run, ref, self.plugins(ref))

    def plugins(self, ref: StageRef) -> Mapping[str, str]:
        """Return the digests of the plug-in sources that compute an output, keyed by name."""
        key, config = self._configured(ref)
        if key not in self._sources:
            self._sources[key] = plugin_sources(config)
        return self._sources[key]

    def own(self) -> Runner:
        """Return the runner for the outputs that the run does not share with a parent."""
        return self.of(self._run.last_ref(self._own.iterations))

    def _configured(self, ref: StageRef) -> tuple[str, RunConfig]:
        settings = self._run.config_of(ref)
        key = json.dumps(settings, sort_keys=True)
        if key not in self._configs:
            self._configs[key] = config_of(self._run, ref)
        return key, self._configs[key]


@contextmanager
def stages_of_run(
    run: Run, backend: Backend, config: RunConfig | None = None, check: Callable[[], object] = lambda: None
) -> Iterator[RunStages]:
    """Yield the stages of a stored run; their workers end with the block."""
    with ExitStack() as stack:
        yield RunStages(run, backend, stack, config or config_of(run), check)


def config_of(run: Run, ref: StageRef | None = None) -> RunConfig:
    """Return a stored run's configuration, or the one that determined `ref`, with the newest iteration target.

    The two differ only in a fork, where shared outputs have the parent's settings. All stored settings that name
    modules are read through this function, since reading them may import the modules.

    Raises:
        UntrustedRun: the settings name modules that the user has not trusted.
    """
    require_trust(run)
    settings = run.config if ref is None else run.config_of(ref)
    return build_stored({**settings, "iterations": run.capacity})


def require_stored_sizes(run: Run, learner: AnyLearner) -> None:
    """Raise IncompatibleFormat if the learner's array shapes differ from the stored ones under these settings."""
    ref = run.learner_ref(0)
    if not run.contains(ref):
        return
    arrays, state = run.record(ref).arrays, learner.initialize(run_seed=0)
    # Runs of earlier versions may lack some extra arrays.
    kept = {name: value for name, value in state.extra.items() if f"learner.extra.{name}" in arrays}
    for part, name, value in [*(("params", *p) for p in state.params.items()), *(("extra", *e) for e in kept.items())]:
        stored = arrays.get(f"learner.{part}.{name}")
        if stored is None or stored.shape != value.shape:
            raise IncompatibleFormat(
                run.path / "run.json",
                found=f"settings that give the learner's {part}.{name} the shape {list(value.shape)}",
                required=f"{list(stored.shape) if stored else 'no such array'}, as stored with {ref}",
                action="Restore run.json from a copy of the run",
            )


def require_stored_outputs(run: Run, graph: Graph) -> None:
    """Raise IncompatibleFormat if the output type of a stage in the graph differs from the stored one."""
    for stage in (stage for stage in table_of(graph).stages if stage.name in run.stages):
        stored = run.stages[stage.name]
        other = [f"it returns {stage.output}, stored as {stored.output}"] if stage.output != stored.output else []
        different = stage.schema.differences(stored.schema) if stage.schema and stored.schema else other
        if different:
            raise IncompatibleFormat(
                run.path / "run.json",
                found=f"stage {stage.name}: {'; '.join(different)}",
                required="what the run stores",
                action="Restore the class as it was when the run began, or train a new run with this one",
            )


def changed_since(run: Run, refs: Iterable[StageRef]) -> dict[str, set[int]]:
    """Return the iterations that were computed before each change in plug-in sources, keyed by the change.

    Nothing is imported for a run without plug-ins.

    Raises:
        ConfigError: a module is not trusted, can no longer be imported, or is incompatible with the settings.
    """
    environments = [mapping(info.get("environment")) for info in (run.info, *run.info.get("ancestors", []))]
    environments += [session.environment for session in run.sessions()]
    changed = defaultdict[str, set[int]](set)
    if any(environment.get("plugins") for environment in environments):
        with stages_of_run(run, Backend(workers=0)) as stages:
            for ref in refs:
                for change in stages.changes(ref):
                    changed[change].add(ref.iteration)
    return changed
