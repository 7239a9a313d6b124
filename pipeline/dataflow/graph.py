"""Graphs: declarative descriptions of kinds of runs, each consisting of stages connected by named edges.

Everything else is derived from graphs: the execution order within an iteration, lineage, Prefect's task dependencies,
the inputs for replay and thinning, the debugger's variables, the store's groups, command-line choices, and diagrams.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.edges import Edge
from metaloom.pipeline.dataflow.refs import Span, StageOrder, StageRef
from metaloom.pipeline.dataflow.stage import TOOLS, GraphError, Input, Stage, tools_of
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.schema import suggestion
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams, Update

WITNESS = ("witness_tasks", "witness_episodes")  # names of the inputs that a witness adds to a stage


@dataclass(frozen=True, eq=False)
class Graph:
    """A kind of run.

    Attributes:
        name: Name by which algorithm settings select the graph.
        stages: Stages in data-flow order; consecutive per-step stages run step by step.
        edges: Edges, keyed by the names that stages use.
        shared: Functions that make caches, such as a replay buffer, from tools, keyed by the stage functions' parameter
            name. Stages keep the caches between iterations. Results do not depend on them.
        remembers_by_task: True if stored data refer to tasks by index, so the training set must not change.
        check: Function that raises ConfigError or EnvError if the configuration and the environment are incompatible.

    Raises:
        GraphError: a stage reads a missing edge or takes an unknown tool, or an edge names an unknown stage.
    """

    name: str
    stages: tuple[Stage, ...]
    edges: Mapping[str, Edge]
    shared: Mapping[str, Callable[..., object]] = field(default_factory=dict[str, Callable[..., object]])
    remembers_by_task: bool = False
    check: Callable[[RunConfig, MetaEnv], None] = lambda config, env: None

    def __post_init__(self) -> None:
        given: tuple[tuple[Collection[object], type[object], str], ...] = (
            (self.stages, Stage, "Stage(function, per)"),
            (self.edges.values(), Edge, "an edge from a stage, such as this_step('adapt')"),
        )
        for found, kind, required in given:
            if other := [one for one in found if not isinstance(one, kind)]:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise GraphError(
                    f"graph {self.name}: got {other[0]!r} among its {kind.__name__.lower()}s; expected {required}"
                )
        if problems := [*dict.fromkeys(self._problems())]:
            raise GraphError("\n".join(f"graph {self.name}: {problem}" for problem in problems))

    def __getitem__(self, name: str) -> Stage:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def _order(self) -> StageOrder:
        return StageOrder((stage.name, stage.stepped) for stage in self.stages)

    def learner_ref(self, iteration: int) -> StageRef:
        """Return a reference to the output that holds the learner with which an iteration starts."""
        learners = (s for s in self.stages if s.output is Update and s.ends_iteration == (iteration > 0))
        return next(learners).at(max(iteration - 1, 0))

    def order(self, config: RunConfig, iteration: int) -> list[StageRef]:
        """Return references to an iteration's outputs in the order in which the stages run."""
        refs = (stage.at(iteration, k) for stage in self.stages for k in stage.per.steps(config, iteration))
        return self._order.sort(refs)

    def sampled_from(self, config: RunConfig, iteration: int) -> set[StageRef]:
        """Return references to sampling stages' outputs and inputs, which determine an iteration's episodes."""
        sampling = [ref for ref in self.order(config, iteration) if self[ref.stage].samples]
        read = (wanted for ref in sampling for wanted in self.inputs(config, ref).values())
        return {*sampling, *(wanted for wanted in read if isinstance(wanted, StageRef))}

    def inputs(self, config: RunConfig, ref: StageRef) -> Mapping[str, Input]:
        """Return a stage's inputs, keyed by argument name.

        If `env.witness` is set, the stage that ends an iteration also reads the tasks and one randomly drawn batch.
        Raises GraphError if an input without a default has no output to read.
        """
        stage, found = self[ref.stage], dict[str, Input]()
        for name, edge in stage.edges.items():
            wanted = self._resolved(self.edges[edge], config, ref.iteration, ref.step)
            if wanted is not None:
                found[name] = wanted
            elif not stage.inputs[name]:
                raise GraphError(
                    f"graph {self.name}: {ref} reads {name} from {edge} = {self.edges[edge]}, which has no output "
                    f"there; use another edge, or give {name} a default in the stage's function"
                )
        if not (config.env.witness and stage.ends_iteration):
            return found
        refs = self.order(config, ref.iteration)
        tasks = [one for one in refs if self[one.stage].output is TaskBatch]
        batches = [one for one in refs if self[one.stage].group in ("rollouts", "rollouts_{step}")]
        if not (tasks and batches):
            return found
        drawn = int(generator(config.seed, "witness", ref.iteration, 0).integers(len(batches)))
        return {**found, **dict(zip(WITNESS, (tasks[0], batches[drawn]), strict=True))}

    def within(self, config: RunConfig, span: Span, iteration: int) -> list[StageRef]:
        """Return references to the outputs of a span in one iteration, in the order in which they are computed."""
        return [ref for ref in self.order(config, iteration) if ref in span]

    def sources(self, edge: Edge) -> Iterator[tuple[str, Edge]]:
        """Yield the names of stages that an edge may read, each with the edge that selects its outputs."""
        if edge.first is not None:
            yield from self.sources(self.edges[edge.first] if isinstance(edge.first, str) else edge.first)
        yield from ((name, edge) for name in edge.stages)

    # Adaptation after training

    @cached_property
    def adaptation(self) -> tuple[Stage, Stage] | None:
        """Two stages: one collects adaptation episodes, one outputs the policy parameters for the next inner step.

        None for a graph without adaptation. Raises GraphError if the policy parameters are computed before the episodes
        in the same step.
        """
        for stage in self.stages:
            for edge in map(self.edges.__getitem__, stage.edges.values() if self._collects(stage) else ()):
                if edge.word == "last_step" and self[edge.stages[0]].output is TaskParams:
                    return stage, self[edge.stages[0]]
                for name, found in self.sources(edge):
                    if found.word == "this_step" and self[name].output is TaskParams and self[name].stepped:
                        raise GraphError(
                            f"graph {self.name}: {stage.name} acts on parameters from {name} in the same inner step, "
                            "which evaluations and trained policies cannot compute; use an edge last_step(...) from "
                            "the stage that ends an inner step"
                        )
        return None

    @cached_property
    def adapting(self) -> tuple[Stage, ...]:
        """The stages of one adaptation step, in order; the last outputs the policy parameters of the next."""
        needed: set[str] = set()
        waiting = [] if self.adaptation is None else [self.adaptation[1]]
        while waiting:
            stage = waiting.pop()
            needed.add(stage.name)
            for edge in stage.edges.values():
                given = [self[name] for name, found in self.sources(self.edges[edge]) if found.word == "this_step"]
                waiting += [s for s in given if s.stepped and not self._collects(s) and s.name not in needed]
        return tuple(stage for stage in self.stages if stage.name in needed)

    @staticmethod
    def _collects(stage: Stage) -> bool:
        """Return True for a stage that samples episodes rather than transforming them."""
        return stage.samples and stage.output is EpisodeBatch

    def inputs_of_adaptation(
        self, config: RunConfig, stage: Stage, k: int
    ) -> Mapping[str, StageRef | tuple[StageRef, ...] | None]:
        """Return a stage's inputs in adaptation step k after training.

        References use iteration 0, in which every stage has every step. None stands for the policy parameters.
        Raises GraphError if the stage reads an output that exists only during training.
        """
        assert self.adaptation is not None, "only such a graph has stages that adapt"
        collecting, adapted = self.adaptation
        there = {self.learner_ref(0), *(one.at(0, k) for one in self.adapting)}
        there |= {collecting.at(0, n) for n in range(k + 1)}
        found = dict[str, StageRef | tuple[StageRef, ...] | None]()
        for name, edge in stage.edges.items():
            if self.edges[edge].word == "last_step" and self[self.edges[edge].stages[0]] is adapted:
                found[name] = None
                continue
            wanted = self._resolved(self.edges[edge], config, 0, k, training=False)
            refs = {wanted} if isinstance(wanted, StageRef) else {*wanted} if isinstance(wanted, tuple) else {None}
            if refs <= there:
                assert isinstance(wanted, StageRef | tuple)
                found[name] = wanted
            elif not stage.inputs[name]:
                raise GraphError(
                    f"graph {self.name}: {stage.name} reads {name} from {edge} = {self.edges[edge]}, which exists in "
                    "training only. Evaluations and trained policies adapt with this stage too, so it can only read "
                    "the learner, episodes, the output of the last adaptation, and outputs of such stages in the same "
                    f"step; read one of these, or give {name} a default in the stage's function"
                )
        return found

    # Composition

    def insert(self, stage: Stage, *, after: Stage | str, gives: str | None = None) -> Self:
        """Return the graph with an additional stage.

        Args:
            stage: Stage to insert.
            after: Stage that the new one follows.
            gives: Name of an edge to redirect to the new stage, along with all other edges from the same source.
                Stages that read the source then read the new stage, which itself still reads the source.

        Raises:
            GraphError: the stage or edge is unknown, or the new stage cannot replace the edge's source.
        """
        before = self._known(after)
        n = self.stages.index(before) + 1
        if gives is None:
            return replace(self, stages=(*self.stages[:n], stage, *self.stages[n:]))
        if gives not in self.edges:
            raise GraphError(f"graph {self.name}: insert gives={gives!r}; expected {_one_of(self.edges, gives)}")
        source = self[self.edges[gives].stages[0]]
        if stage.output is not source.output or stage.per is not source.per:
            raise GraphError(
                f"graph {self.name}: {stage.name} gives {stage.output.__name__} {stage.per.words!r}, but the edge "
                f"{gives} comes from {source.name}, which gives {source.output.__name__} {source.per.words!r}; "
                "both must be the same; omit `gives` to add a separate edge"
            )
        moved = [name for name, edge in self.edges.items() if source.name in edge.stages]
        kept = {name: f"{name} of {source.name}" for name in moved if name in stage.edges.values()}
        edges = {**self.edges, **{name: self.edges[name].renamed(source.name, stage.name) for name in moved}}
        edges |= {new: self.edges[name] for name, new in kept.items()}
        inserted = stage.reading(**{of: kept[edge] for of, edge in stage.edges.items() if edge in kept})
        return replace(self, stages=(*self.stages[:n], inserted, *self.stages[n:]), edges=edges)

    def replace(self, old: Stage | str, new: Stage) -> Self:
        """Return the graph with one stage replaced; edges from the old stage then come from the new one."""
        before = self._known(old)
        stages = tuple(new if stage is before else stage for stage in self.stages)
        edges = {name: edge.renamed(before.name, new.name) for name, edge in self.edges.items()}
        return replace(self, stages=stages, edges=edges)

    def remove(self, stage: Stage | str) -> Self:
        """Return the graph without a stage. No remaining stage may read an edge that comes from it."""
        gone = self._known(stage)
        left = tuple(stage for stage in self.stages if stage is not gone)
        read = {edge: reader.name for reader in left for edge in reader.edges.values()}
        for name, reader in read.items():
            if gone.name in [source for source, _ in self.sources(self.edges[name])]:
                raise GraphError(
                    f"graph {self.name}: {reader} reads the edge {name} = {self.edges[name]}, which comes from "
                    f"{gone.name}; give the edge another source before removing {gone.name}: graph.edge({name}=...)"
                )
        edges = {name: edge for name, edge in self.edges.items() if gone.name not in edge.stages}
        return replace(self, stages=left, edges=edges)

    def rename(self, old: Stage | str, name: str) -> Self:
        """Return the graph with one stage renamed; its outputs are still stored in the same group."""
        before = self._known(old)
        return self.replace(before, replace(before, name=name))

    def edge(self, **edges: Edge) -> Self:
        """Return the graph with some edges redirected or added."""
        return replace(self, edges={**self.edges, **edges})

    def named(self, name: str) -> Self:
        """Return the graph under a new name."""
        return replace(self, name=name)

    def _known(self, stage: Stage | str) -> Stage:
        name = stage.name if isinstance(stage, Stage) else str(stage)
        if name not in self:
            raise GraphError(f"graph {self.name}: there is no stage {name}; use {_one_of(self._by_name, name)}")
        return self[name]

    def _resolved(self, edge: Edge, config: RunConfig, i: int, k: int, *, training: bool = True) -> Input | None:
        """Return the outputs that an edge selects at a position; None if there are none."""
        stage = self[edge.stages[0]]

        def output(i: int, k: int) -> StageRef | None:
            k = k if stage.stepped else 0
            exists = i >= 0 and k >= 0 and (k in stage.per.steps(config, i) or (stage.stepped and not training))
            return stage.at(i, k) if exists else None

        match edge.word:
            case "this_step":
                return output(i, k)
            case "last_step" if (found := output(i, k - 1)) is not None:
                return found
            case "last_iteration" if (found := output(i - 1, k)) is not None:
                return found
            case "last_step" | "last_iteration":
                if edge.first is None:
                    return None
                first = self.edges[edge.first] if isinstance(edge.first, str) else edge.first
                return self._resolved(first, config, i, k, training=training)
            case "every_step":
                return tuple(stage.at(i, n) for n in stage.per.steps(config, i)) if training else None
            case "steps_so_far":
                steps = (edge.among or stage.per).steps(config, i) if training else range(k + 1)
                return tuple(stage.at(i, n) for n in steps if n <= k)
            case "since_start":
                return Span(edge.stages, 0, i)
            case "last_iterations":
                return Span(edge.stages, max(0, i - config.algorithm.earlier_iterations), i)

    def _problems(self) -> Iterator[str]:
        """Yield a message for each problem of the graph that can be found without a configuration."""
        if len(self._by_name) < len(self.stages):
            names = [stage.name for stage in self.stages]
            twice = next(name for name in names if names.count(name) > 1)
            yield f"two stages have the name {twice}; rename one with graph.rename or Stage(name=...)"
        for name, edge in self.edges.items():
            links = [edge]
            while isinstance(links[-1].first, Edge):
                links.append(links[-1].first)
            if unknown := [source for link in links for source in link.stages if source not in self]:
                yield (
                    f"the edge {name} is {edge}, but there is no stage {unknown[0]}; use "
                    f"{_one_of(self._by_name, unknown[0])}"
                )
            seen, first = {name}, links[-1].first
            while isinstance(first, str):
                if first in seen or first not in self.edges:
                    others = [name for name in self.edges if name not in seen]
                    yield f"the edge {name} is {edge}; its first edge must be {_one_of(others, first)}"
                    break
                seen, first = {*seen, first}, self.edges[first].first
        for name, make in self.shared.items():
            if name in TOOLS:
                yield f"shared has {name}, which is the name of a tool; choose another name"
            elif not callable(make):  # pyright: ignore[reportUnnecessaryComparison]
                yield f"shared has {name} = {make!r}; it must be a function that makes the value, such as dict"
            elif unknown := [tool for tool in tools_of(make) if tool not in {**TOOLS, **self.shared} or tool == "at"]:
                yield f"shared has {name}, whose function takes {unknown[0]}; it can only take tools other than at"
        for stage in self.stages:
            for of, edge in stage.edges.items():
                if edge not in self.edges:
                    yield (
                        f"stage {stage.name} reads {of} from the edge {edge}, which does not exist; use "
                        f"{_one_of(self.edges, edge)}, or add one: graph.edge({edge}=...)"
                    )
            if unknown := [tool for tool in stage.tools if tool not in {**TOOLS, **self.shared}]:
                yield (
                    f"stage {stage.name}: its function takes {unknown[0]}, which is not a tool; use one of "
                    f"{', '.join([*TOOLS, *self.shared])}, or, for an input, a keyword-only parameter"
                )


def _one_of(names: Collection[str], found: str) -> str:
    return f"one of {', '.join(names)}{suggestion(found, names)}"
