"""Classes of tasks as environments declare them."""

import json

import numpy as np
import pytest
from env_names import ENV_NAMES

from metaloom.pipeline.envs import registry
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError, MetaEnv, TaskField
from metaloom.pipeline.envs.half_cheetah import HalfCheetahDir
from metaloom.pipeline.envs.point_corner import PointCorner
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.task_classes import Classes, bins, nearest
from metaloom.pipeline.tasks.samplers import TaskPool, balanced_draw


def test_a_task_belongs_to_the_nearest_center_by_the_fields_that_decide():
    classes = nearest(("x", "y"), {"east": (1, 0), "north": (0, 1)})
    # Columns in another order, and one more that does not matter. Equally near: the first.
    tasks = np.array([[0.2, 9.0, 0.9], [0.9, -9.0, 0.2], [0.5, 0.0, 0.5]])
    assert classes.of(tasks, ["y", "mass", "x"]).tolist() == [0, 1, 0]


def test_bins_hold_their_lower_edge_and_have_no_ends():
    classes = bins("velocity", (1, 2.5))
    assert classes.names == ("velocity below 1", "velocity 1 to 2.5", "velocity from 2.5")
    assert classes.of(np.array([[-7.0], [0.999], [1.0], [2.4], [2.5], [99.0]]), ["velocity"]).tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]


@pytest.mark.parametrize(
    "classes", [bins("v", (1,)), nearest("v", {"a": 0, "b": 2}), nearest(["x", "y"], {"a": (0, 1), "b": (1, 0)})]
)
def test_they_are_plain_data(classes):
    assert Classes.from_facts(json.loads(json.dumps(classes.facts()))) == classes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nearest("v", {"only": 1}), "two or more"),
        (lambda: nearest("v", {"fast": 1, "balanced": 0}), "'balanced'"),
        (lambda: nearest("v", {"a": 1, "b": 1}), "2 distinct centers"),
        (lambda: nearest("v", {"a": (1, 2), "b": (0, 1)}), "value for every field"),
        (lambda: nearest("v", {"a": float("nan"), "b": 1}), "finite"),
        (lambda: nearest(("v", "v"), {"a": (0, 1), "b": (1, 0)}), r"the fields .'v', 'v'"),
        (lambda: nearest("v", {1: 1, 2: 0}), "each must be a single line"),
        (lambda: nearest("v", {"a\nb": 1, "c": 0}), "a single line, and fields must not repeat"),
        (lambda: bins("v", (2, 1)), "increasing"),
        (lambda: bins("v", (1, 1)), "must be increasing"),
        (lambda: bins("v", ()), "expected two"),
        (lambda: Classes(("v", "w"), ("a", "b"), edges=(1.0,)), "one field"),
        (lambda: Classes.from_facts({"fields": ["v"], "colour": 1}), "Classes.facts"),
        (lambda: Classes.from_facts({"fields": [3], "names": ["a", "b"], "edges": [1]}), "'fields': .3."),
        (lambda: Classes.from_facts({"fields": ["v"], "names": ["a", "b"], "edges": [[]]}), r"'edges': \[\[\]\]"),
        (lambda: Classes.from_facts({"fields": ["v"], "names": "ab", "centers": 7}), "'centers': 7"),
    ],
)
def test_what_is_no_division_into_classes_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ENV_NAMES)
def test_every_class_of_a_built_in_environment_comes_up(name):
    env = make_env(EnvConfig(name=name))
    if env.task_classes is not None:
        tasks = env.sample_tasks(200, np.random.default_rng(0))
        of = env.task_classes.of(tasks, [field.name for field in env.task_fields])
        # Of 200 draws even a class of probability 1/5 has fewer than 15 once in 30,000 times.
        assert np.bincount(of, minlength=len(env.task_classes.names)).min() >= 15


def test_directions_and_corners_are_named_for_what_they_are():
    cheetah = make_env(EnvConfig(name="half-cheetah-dir")).task_classes
    assert [cheetah.names[c] for c in cheetah.of(np.array([[-1.0], [1.0]]), ["direction"])] == ["backward", "forward"]
    assert cheetah.centers == ((1,), (-1,))
    assert make_env(EnvConfig(name="ant-dir-2d")).task_classes.centers == ((1, 0), (0, 1), (-1, 0), (0, -1))
    assert make_env(EnvConfig(name="half-cheetah-vel")).task_classes.edges == (1, 2)
    assert make_env(EnvConfig(name="walker2d-vel")).task_classes.edges == (2.5, 5, 7.5)
    assert make_env(EnvConfig(name="swimmer-vel")).task_classes.edges == (0.15,)
    corner = make_env(EnvConfig(name="point-corner")).task_classes
    assert corner.names[corner.of(np.array([[-2.0, 2.0]]), ["goal_x", "goal_y"])[0]] == "upper left"
    ant = make_env(EnvConfig(name="pearl-ant-dir", options={"forward_backward": True}))
    assert ant.task_classes.of(np.array(ant.task_set), ["direction_x", "direction_y"]).tolist() == [1, 0]
    assert ant.task_classes.centers == ((1, 0), (-1, 0))


class Renamed(PointCorner):
    task_fields = HalfCheetahDir.task_fields
    task_set = None


class Listed(PointCorner):
    task_classes = ("forward", "backward")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Renamed, r"Renamed.task_classes uses goal_x, goal_y.*'direction'"),
        (Listed, "Listed.*`nearest` or `bins`"),
    ],
)
def test_an_environment_whose_classes_do_not_fit_its_tasks_is_refused(cls, message, monkeypatch):
    monkeypatch.setattr(registry, "find_env", lambda name: cls)
    with pytest.raises(EnvError, match=message):
        make_env(EnvConfig(name="point-corner"))


def test_classes_that_are_held_out_count_where_their_tasks_are():
    classes = nearest("kind", {"a": 0, "b": 1, "c": 2}, held_out=["c"])
    assert [classes.among(np.array(of, np.int64)).tolist() for of in ([], [0], [2], [2, 2], [1, 2])] == [
        [0, 1],
        [0, 1],
        [2],
        [2],
        [0, 1, 2],
    ]
    assert classes.returns(np.array([3.0, 5.0]), np.array([2, 2])).names == ("c",)
    assert classes.returns(np.array([3.0]), np.array([1])).num_tasks == (0, 1)
    assert Classes.from_facts(classes.facts()) == classes
    assert "held_out" not in nearest("kind", {"a": 0, "b": 1}).facts()
    for held_out in (["d"], ["a", "b", "c"], ["a", "a"]):
        with pytest.raises(ValueError, match="use some, but not all, of the names"):
            nearest("kind", {"a": 0, "b": 1, "c": 2}, held_out)


def test_balanced_draws_have_none_of_the_classes_that_are_held_out():
    classes, rng = nearest("kind", {"a": 0, "b": 1, "c": 2}, held_out=["c"]), np.random.default_rng(0)
    fields = (TaskField("kind", "1", "which"),)
    env = type("Kinds", (MetaEnv,), {"task_fields": fields})()
    drawn = balanced_draw(env, classes, 6, rng, lambda n: rng.integers(2, size=(n, 1)).astype(float))
    assert sorted(drawn[:, 0].tolist()) == [0, 0, 0, 1, 1, 1]
    tested = TaskPool(fields, np.full((4, 1), 2.0)).sample_balanced(4, rng, classes)
    assert tested.params[:, 0].tolist() == [2, 2, 2, 2]
