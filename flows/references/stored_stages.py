"""What the records of a run say of its stages besides digests, and which of them it should have."""

from collections.abc import Iterable, Iterator

from metaloom.flows.formatting import stage_name
from metaloom.flows.graph.run_stages import stages_of_run
from metaloom.flows.graph.runner import Runner
from metaloom.flows.rollouts.workers import Backend
from metaloom.storage import Run, Span, StageRef
from metaloom.storage.format.records import Input


def false_records(run: Run, iterations: Iterable[int]) -> Iterator[str]:
    """Give what the records of complete iterations say otherwise than the stages that compute their outputs.

    Sums of spans are not compared; `storage.verify_run` does that.
    """
    with stages_of_run(run, Backend(workers=0)) as stages:
        for iteration in iterations:
            asked, stored = stages.order(iteration), run.refs_of([iteration])
            for ref in asked:
                if ref not in stored:
                    yield f"{_told(ref)}, which the settings ask for and is not stored"
                else:
                    wrong = ", ".join(_false_entries(run, ref, stages.of(ref)))
                    yield from [f"{wrong} of {_told(ref)}"] if wrong else []
            yield from (f"{_told(ref)}, for which the settings do not ask" for ref in stored if ref not in asked)


def _told(ref: StageRef) -> str:
    return f"{stage_name(ref)} of iteration {ref.iteration}"


def _false_entries(run: Run, ref: StageRef, stages: Runner) -> Iterator[str]:
    record, inputs = run.record(ref), stages.inputs(ref)
    outputs = [wanted for wanted in inputs if isinstance(wanted, StageRef)]
    if record.inputs != tuple(Input(wanted, run.record(wanted).digest) for wanted in outputs):
        yield "inputs"
    if [item.span for item in record.spans] != [wanted for wanted in inputs if isinstance(wanted, Span)]:
        yield "spans"
    if record.seed_position != tuple(stages.seed_position(ref)):
        yield "seed_position"
