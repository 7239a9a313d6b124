"""Diagrams of the stages of every kind of run, drawn from their tables."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from metaloom.flows import cli
from metaloom.flows.commands.train import train
from metaloom.flows.graph.tables import GRAPHS, graph_of, stage_names
from metaloom.flows.recipes import RECIPES, load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views.diagrams import BEFORE, FORMATS, Arrow, Box, diagram_of, draw
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


def numbers_of(tag, text):
    """The numbers of every element of this kind, by name."""
    elements = re.findall(rf"<{tag} x[^>]*>", text)
    return [{name: float(n) for name, n in re.findall(r' (x|y|width|height)="([\d.]+)"', one)} for one in elements]


def test_boxes_are_at_equal_distances_with_their_text_in_the_middle():
    text = draw([Box("first", ("a", "b")), Box("second", ("c",)), Box("third", ())], [])
    boxes, words = numbers_of("rect", text), numbers_of("text", text)
    assert len({(box["x"], box["width"], box["height"]) for box in boxes}) == 1
    gaps = [lower["y"] - upper["y"] - upper["height"] for upper, lower in pairwise(boxes)]
    assert gaps[0] == gaps[1] > 0
    assert boxes[0]["x"] > 0
    assert boxes[0]["y"] > 0
    assert {word["x"] for word in words} == {boxes[0]["x"] + boxes[0]["width"] / 2}
    places = [word["y"] - box["y"] for word, box in zip(words, [boxes[n] for n in (0, 0, 0, 1, 1, 2)], strict=True)]
    assert places == [places[0], places[1], places[2], places[0], places[1], places[0]]
    assert 0 < places[0] < places[1] < places[2] < boxes[0]["height"]
    assert places[2] - places[1] == places[1] - places[0]
    width, height = (int(side) for side in re.search(r'width="(\d+)" height="(\d+)" viewBox', text).groups())
    assert f'viewBox="0 0 {width} {height}"' in text
    assert boxes[-1]["y"] + boxes[-1]["height"] < height
    assert boxes[-1]["x"] + boxes[-1]["width"] < width


@pytest.mark.parametrize("leads_down", [True, False])
def test_arrows_leave_and_reach_boxes_at_distinct_places_with_their_label_at_the_apex(leads_down):
    ends = [(0, 1), (0, 2), (1, 2), (0, 3), (2, 3)]
    arrows = [Arrow(*(pair if leads_down else pair[::-1]), f"n{n}") for n, pair in enumerate(ends)]
    text = draw([Box("box", ("a",))] * 4, arrows)
    boxes = numbers_of("rect", text)
    labels = numbers_of("text", text)[: len(arrows)]
    paths = re.findall(r'<path d="M([\d.]+) ([\d.]+)C([\d.]+) [\d.]+ [\d.]+ [\d.]+ ([\d.]+) ([\d.]+)"', text)
    out, spans = 1 if leads_down else -1, {}
    for n, (arrow, path) in enumerate(zip(arrows, paths, strict=True)):
        x, y0, reach, x1, y1 = map(float, path)
        assert x == x1 == boxes[0]["x"] + (boxes[0]["width"] if leads_down else 0)
        inside = [(y - boxes[n]["y"]) / boxes[n]["height"] for y, n in ((y0, arrow.source), (y1, arrow.target))]
        assert inside == pytest.approx([(1 / 4, 5 / 12, 7 / 12, 3 / 4)[n % 4]] * 2, abs=1e-3)
        apex = x / 4 + reach * 3 / 4
        assert (apex - x) * out > 0
        assert (labels[n]["x"] - apex) * out == pytest.approx(4, abs=1e-2)
        assert labels[n]["y"] == pytest.approx((y0 + y1) / 2 + 4, abs=1e-2)
        spans[abs(arrow.target - arrow.source)] = abs(reach - x)
    assert spans[1] < spans[2] < spans[3]


def test_arrows_without_labels_fit_beside_the_boxes():
    for ends in ((0, 1), (0, 9)):
        text = draw([Box("box", ())] * 10, [Arrow(*ends)])
        box = numbers_of("rect", text)[0]
        x, reach = (int(place) for place in re.search(r"M(\d+) [\d.]+C(\d+) ", text).groups())
        width = int(re.search(r'<svg [^>]* width="(\d+)"', text)[1])
        assert x / 4 + reach * 3 / 4 + box["x"] == pytest.approx(
            width, abs=1
        )  # the margin on the right is the one on the left


@pytest.mark.parametrize(
    ("arrows", "size", "path"),
    [
        ([], (210, 198), None),
        ([Arrow(0, 1)], (258, 198), "M190 23.75C254 23.75 254 112.75 190 112.75"),
        ([Arrow(0, 1, "label")], (520, 198), "M190 23.75C254 23.75 254 112.75 190 112.75"),
        ([Arrow(1, 0)], (568, 198), "M330 112.75C266 112.75 266 23.75 330 23.75"),
        ([Arrow(0, 5)], (360, 554), "M190 23.75C390 23.75 390 468.75 190 468.75"),
        ([Arrow(0, 9)], (382, 910), "M190 23.75C420 23.75 420 824.75 190 824.75"),
    ],
)
def test_a_diagram_is_as_large_as_its_boxes_and_arrows(arrows, size, path):
    text = draw([Box("box", ("a", "b"))] * max(2, *(arrow.target + 1 for arrow in arrows), 0), arrows)
    assert 'width="{}" height="{}"'.format(*size) in text
    boxes = numbers_of("rect", text)
    assert [(box["y"], box["width"], box["height"]) for box in boxes[:2]] == [(10, 170, 55), (99, 170, 55)]
    assert [word["y"] for word in numbers_of("text", text)[bool(arrows and arrows[0].label) :][:3]] == [27, 42, 57]
    assert (path or 'd="M0 0 8 4') in text
