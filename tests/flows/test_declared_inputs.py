"""Declared inputs: a stage loads what it declares and what its record says, for every algorithm and every stage."""

import inspect
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from small_runs import SMALL_RUNS

from metaloom import storage
from metaloom.flows.commands.train import Observer, train
from metaloom.flows.graph import runner
from metaloom.flows.graph.run_stages import stages_of_run
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline import seeding
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.dataflow.graph import WITNESS
from metaloom.pipeline.replay.index import RowIndex
from metaloom.pipeline.seeding import generator
from metaloom.stages import witness
from metaloom.storage import Span, StageRef

COMMON = ("iterations=3", "policy.hidden_sizes=[8]", "evaluation.every=3", "evaluation.test_episodes=1")


class Spy:
    """Finds a run's outputs and keeps which were read, and how much of them."""

    def __init__(self, run):
        self._run = run
        self.loaded, self.counted, self.read = Counter(), Counter(), Counter()

    def load(self, ref):
        self.loaded[ref] += 1
        return self._run.load(ref)

    def lengths(self, ref):
        self.counted[ref] += 1
        return self._run.lengths(ref)

    def experience(self, ref):
        self.read[ref] += 1
        return self._run.experience(ref)


CUSTOM = {
    "es_maml": ("promp-point-corner", "algorithm={name: 'es_maml:ESMAML', inner_steps: 2}", *SMALL_RUNS["promp"][1:]),
}
"""Runs of graphs that the examples define."""


@pytest.fixture(scope="module", autouse=True)
def examples():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "examples")
        yield


@pytest.fixture(scope="module", params=SMALL_RUNS | CUSTOM)
def trained(request, tmp_path_factory, drawn):
    recipe, *changes = (SMALL_RUNS | CUSTOM)[request.param]
    settings = build_config(load_settings(recipe)).model_dump(mode="json", exclude_unset=True)
    config = build_config(override(settings, [*changes, *COMMON]))
    # Twice everything that an update draws for, so that each number in a position takes two values.
    numbers = ("num_epochs", "num_minibatches", "critic_num_epochs")
    fields = type(config.algorithm).model_fields
    twice = [name for name in numbers if name in fields and fields[name].annotation is int]
    config = build_config(override(config.model_dump(mode="json"), [f"algorithm.{name}=2" for name in twice]))
    path = tmp_path_factory.mktemp("spied") / "run"
    with pytest.MonkeyPatch.context() as patch:
        digest = seeding._digest
        patch.setattr(seeding, "_digest", lambda *position: drawn.append(position) or digest(*position))

        def play_again(*arguments):
            # It resets with a seed of the rollouts; the actor is seeded as well, but plays what is recorded.
            before, found = drawn.copy(), witness.play_again(*arguments)
            again = {at for at in drawn[len(before) :] if at[1] not in ("witness", "actions")}
            assert {at[1] for at in again} == {"resets"}
            assert again <= set(before)
            drawn[:] = before
            return found

        patch.setattr(runner, "play_again", play_again)
        begins = Observer(stage_started=lambda ref: ref.stage == "initialize" and drawn.clear())
        train(config, path, backend=Backend(workers=0), observer=begins)
    return storage.open_run(path)


@pytest.fixture(scope="module")
def drawn():
    """The positions at which training began to draw: run seed, stream, position."""
    return []


def collectors(run, names, last):
    return [ref for ref in run.refs() if ref.stage in names and ref.iteration <= last]


def drawn_from(run, span, drawn):
    """The rounds that hold the rows of some minibatches."""
    index, refs = RowIndex(), collectors(run, span.stages, span.last)
    for ref in refs:
        index.append(run.lengths(ref))
    numbers = np.concatenate([rows[rows >= 0] for rows in (drawn.rows, drawn.context_rows) if rows is not None])
    return {refs[n] for n in index.round_numbers(numbers)}


def trials_drawn_from(run, config, iteration):
    """The rounds that hold the trials of the gradient steps of VariBAD's model."""
    settings = config.algorithm
    of_each = config.num_tasks * config.episodes_per_task // settings.episodes_per_trial
    refs = collectors(run, ("collect_rollouts",), iteration)[-settings.buffer_iterations :]
    found = set()
    for n in range(settings.model_updates):
        rng = generator(config.seed, "model", iteration, n)
        number, size = len(refs) * of_each, settings.trials_per_model_update
        found |= {refs[n // of_each] for n in rng.choice(number, size, replace=False).tolist()}
    return found


def test_what_a_stage_loads_is_what_it_declares_and_what_its_record_says(trained):
    spans = 0
    with stages_of_run(trained, Backend(workers=0)) as all_stages:
        for ref in reversed(trained.refs()):  # so that nothing that a stage leaves can help a later one
            # Without what the stages keep in memory, so that all that is needed is asked for.
            own = all_stages.of(ref)
            stages, spy = own.under(own.config), Spy(trained)
            value = stages.compute(ref, spy)
            record = trained.record(ref)
            assert storage.output_digest(storage.digest(value)) == record.digest

            declared = stages.inputs(ref)
            singles = [one for one in declared if isinstance(one, StageRef)]
            declared_spans = [one for one in declared if isinstance(one, Span)]
            assert [item.ref for item in record.inputs] == singles
            assert [item.span for item in record.spans] == declared_spans

            within = {one: {r for r in trained.refs() if r in one} for one in declared_spans}
            of_spans = set().union(*within.values())
            assert set(singles) <= set(spy.loaded)
            assert set(spy.loaded) - set(singles) <= of_spans
            assert set(spy.counted) | set(spy.read) <= of_spans
            for one, refs in within.items():
                # A span of tasks is loaded, one of episodes counted; of the rows drawn the batches are read as well.
                spans += 1
                assert refs <= set(spy.loaded if "sample_tasks" in one.stages else spy.counted)
            if spy.read and stages.graph.name == "trial_inference":
                assert set(spy.read) == trials_drawn_from(trained, stages.config, ref.iteration)
            elif spy.read:
                (rounds,) = declared_spans
                minibatches = next(trained.load(r) for r in singles if r.stage == "sample_transitions")
                assert set(spy.read) == drawn_from(trained, rounds, minibatches)
    assert (spans > 0) == (stages.graph.name not in ("on_policy", "trials", "es_maml"))


def test_every_input_of_a_stage_is_an_argument_of_what_computes_it(trained):
    with stages_of_run(trained, Backend(workers=0)) as all_stages:
        for ref in trained.refs():
            stages = all_stages.of(ref)
            stage = stages.graph[ref.stage]
            inputs = stages.graph.inputs(stages.config, ref)
            assert set(WITNESS) <= inputs.keys() or not (
                stages.config.env.witness and stages.graph[ref.stage].ends_iteration
            )
            declared = {name: wanted for name, wanted in inputs.items() if name not in WITNESS}
            inspect.signature(stage.run).bind(*stage.tools, **declared)


EPOCHS = {"ppo", "ppo2", "recurrent-ppo", "rl2", "varibad"}
"""Algorithms that draw minibatches anew in each of several epochs."""


def test_no_epoch_iteration_or_step_draws_what_another_one_has_drawn(trained, drawn):
    # The tasks of iteration 0 fill a replay buffer as well; an evaluation's own seed is asked for over and over, and so
    # is the batch that a witness is from, by whoever asks what a stage reads.
    counts = Counter(at for at in drawn if at[1] not in ("evaluation", "tasks", "witness"))
    algorithm = trained.config["algorithm"]["name"]
    # The first two iterations of a plug-in are computed twice.
    times = 1 if algorithm in SMALL_RUNS else 2
    assert [at for at, count in counts.items() if count > times] == []
    epochs = {(position[0], position[1]) for _, stream, position in counts if stream == "minibatches"}
    if algorithm in EPOCHS:
        assert epochs >= {(iteration, epoch) for iteration in range(3) for epoch in range(2)}
    for stream in ("tasks", "resets", "minibatches", "updates", "model"):
        positions = {position for _, found, position in drawn if found == stream}
        assert not positions or len({position[0] for position in positions}) >= 3
