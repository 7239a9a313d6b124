"""What the built-in graphs say of their stages: what thinning may remove, where environments run, what ends."""

import pytest

from metaloom.stages.graphs.off_policy import OFF_POLICY
from metaloom.stages.graphs.on_policy import ON_POLICY, TRIAL_INFERENCE, TRIALS
from metaloom.stages.graphs.task_inference import TASK_INFERENCE


def names(graph, flag: str) -> list[str]:
    return [stage.name for stage in graph.stages if getattr(stage, flag)]


@pytest.mark.parametrize(
    ("graph", "thinnable"),
    [
        (ON_POLICY, ["collect_rollouts", "process_samples", "adapt"]),
        (TRIALS, ["collect_rollouts", "process_samples", "adapt"]),
        # Later iterations learn from these episodes too, so that they stay.
        (TRIAL_INFERENCE, ["process_samples", "adapt"]),
        (OFF_POLICY, ["sample_transitions"]),
        (TASK_INFERENCE, ["adapt", "sample_transitions"]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_thinning_removes_only_what_no_later_iteration_reads(graph, thinnable) -> None:
    assert names(graph, "thinnable") == thinnable


@pytest.mark.parametrize(
    "graph", [ON_POLICY, TRIALS, TRIAL_INFERENCE, OFF_POLICY, TASK_INFERENCE], ids=lambda g: g.name
)
def test_environments_run_in_collection_and_evaluation_and_an_iteration_ends_with_its_update(graph) -> None:
    filled = ["fill_memory"] if graph in (OFF_POLICY, TASK_INFERENCE) else []
    assert names(graph, "samples") == [*filled, "collect_rollouts", "evaluate"]
    assert names(graph, "ends_iteration") == (["update"] if filled else ["meta_optimize"])
    assert graph.remembers_by_task == (graph is TASK_INFERENCE)
