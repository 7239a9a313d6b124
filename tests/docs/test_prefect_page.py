"""The page about Prefect lists the parameters that the flows have."""

import re
from pathlib import Path

import pytest

from metaloom.flows.prefect_app.deployments import evaluate, meta_train, replay
from metaloom.pipeline.config.sections import EvaluationConfig

PAGE = (Path(__file__).parents[2] / "docs" / "prefect.md").read_text(encoding="utf-8")


def documented(flow: str) -> set[str]:
    """The names in the second column, from a flow's row to the next flow's."""
    rows = [line.split("|")[1:3] for line in PAGE.partition("## The flows")[2].splitlines() if line.startswith("|")]
    names, of = set(), ""
    for first, second in rows:
        of = first.strip(" `") or of
        names |= set(re.findall("`(\\w+)`", second)) if of == flow else set()
    return names


@pytest.mark.parametrize("flow", [meta_train, replay], ids=lambda flow: flow.name)
def test_every_parameter_of_a_flow_is_in_its_table(flow):
    assert documented(flow.name) == set(flow.parameters.properties)


def test_the_evaluation_takes_the_settings_that_its_own_page_lists():
    others = set(evaluate.parameters.properties) - documented("evaluate")
    assert others == set(EvaluationConfig.model_fields) - {"every"}
