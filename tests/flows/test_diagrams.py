"""Diagrams of the stages of every kind of run, drawn from their tables."""

import xml.etree.ElementTree as ET

import pytest

from metaloom.flows import cli
from metaloom.flows.commands.train import train
from metaloom.flows.graph.tables import GRAPHS, graph_of, stage_names
from metaloom.flows.recipes import RECIPES, load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views.diagrams import BEFORE, FORMATS, diagram_of
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.dataflow.stage import AFTER_TRAINING
from metaloom.storage import Span, StageRef

KINDS = {
    "on_policy": "promp-point-corner",
    "off_policy": "sac-pendulum",
    "task_inference": "pearl-point-robot",
    "trials": "rl2-point-corner",
    "trial_inference": "varibad-hidden-goal-grid",
}


def config_of(recipe, *changes):
    return build_config(override(load_settings(recipe), ["evaluation.every=3", *changes]))


@pytest.mark.parametrize("kind", GRAPHS)
def test_every_stage_and_every_input_is_drawn(kind):
    config = config_of(KINDS[kind])
    graph, diagram = graph_of(config), diagram_of(config)
    assert graph.name == kind
    assert diagram.stages == tuple(stage for stage in graph.stages if stage.per is not AFTER_TRAINING)
    drawn = {(edge.source, edge.target, edge.name) for edge in diagram.edges}
    for i in range(6):
        for ref in graph.order(config, i):
            for name, wanted in graph.inputs(config, ref).items():
                many = wanted if isinstance(wanted, tuple) else (wanted,)
                sources = {s for one in many for s in (one.stages if isinstance(one, Span) else (one.stage,))}
                assert {(source, ref.stage, name) for source in sources} <= drawn


@pytest.mark.parametrize("kind", GRAPHS)
def test_the_formats_show_the_same(kind):
    diagram = diagram_of(config_of(KINDS[kind]))
    shown = {name: form(diagram) for name, form in FORMATS.items()}
    ET.fromstring(shown["svg"])
    for stage in diagram.stages:
        assert all(stage.name in text for text in shown.values())
    for edge in diagram.edges:
        assert f"{edge.source} " in shown["mermaid"]
        assert f'|"{edge.label}"| {edge.target}' in shown["mermaid"]
        assert edge.label in shown["svg"]
    assert shown["svg"].count('<path d="M') == len(diagram.edges) + 1
    earlier = (BEFORE, "all so far", "last iterations")
    assert shown["mermaid"].count("-.->") == sum(edge.which in earlier for edge in diagram.edges)


def test_an_iteration_reads_only_what_was_computed_before():
    for recipe in RECIPES:
        config = config_of(recipe)
        graph, done = graph_of(config), set()
        for i in range(4):
            for ref in graph.order(config, i):
                for wanted in graph.inputs(config, ref).values():
                    ones = [wanted] if isinstance(wanted, StageRef) else wanted
                    if isinstance(ones, Span):
                        ones = [r for n in range(i + 1) for r in graph.within(config, ones, n)]
                    assert set(ones) <= done, (recipe, ref)
                done.add(ref)


def test_stages_that_a_run_never_reaches_are_not_drawn():
    names = [stage.name for stage in diagram_of(build_config(load_settings("ppo") | {"env": "CartPole-v1"})).stages]
    assert "adapt" not in names
    assert "evaluate" not in names
    assert "adapt" in stage_names()


def test_the_command_draws_recipes_files_and_stored_runs(tmp_path, tiny_config, capsys, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    train(tiny_config(iterations=1), tmp_path / "first", backend=Backend(workers=0))
    (tmp_path / "file.yaml").write_text("env: CartPole-v1\nalgorithm: a2c\n")
    capsys.readouterr()
    for asked in ("promp-point-corner", str(tmp_path / "file.yaml"), "first"):
        assert cli.run(["graph", asked]) == 0
        assert "meta_optimize" in capsys.readouterr().out
    assert cli.run(["graph", "promp-point-corner", "--format", "svg"]) == 0
    assert capsys.readouterr().out.startswith("<svg")
    assert cli.run(["graph", "promp-point-cornre"]) != 0
    assert "id you mean promp-point-corner?" in capsys.readouterr().err
