"""Outputs of custom stages: what a class has to say of its arrays, and what is refused."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from metaloom.pipeline.outputs import Axes, OutputError, OutputSchema, as_declared

ANY = Axes("B", "a number")


@dataclass(frozen=True)
class Noise:
    """Noise of gradients.

    Not part of the schema.
    """

    scale: Annotated[NDArray[np.float32], Axes("B E T", "scale of the noise", unit="m")]
    parts: Annotated[Mapping[str, NDArray[np.float64]], Axes("B layer ...", "noise by parameter")]


SCHEMA = OutputSchema.of(Noise)


def noise(**changes):
    parts = {"w": np.zeros((2, 5, 7)), "b": np.zeros((2, 5))}
    return SCHEMA.record({"scale": np.zeros((2, 3, 4), np.float32), "parts": parts, **changes})


def with_field(hint, name="v"):
    return make_dataclass("Out", [(name, hint)], frozen=True)


def test_a_class_says_its_axes_dtypes_units_and_meaning():
    assert (SCHEMA.name, SCHEMA.description) == ("Noise", "Noise of gradients.")
    scale, parts = SCHEMA.fields
    assert (scale.axes, scale.dtype, scale.unit) == (("task", "episode", "t"), "float32", "m")
    assert scale.description == "scale of the noise"
    assert not scale.mapping
    assert parts.mapping
    assert (parts.axes, parts.dims, parts.unit) == (("task", "layer", "..."), ("task", "layer"), "1")
    assert OutputSchema.parse("Noise", SCHEMA.document()) == SCHEMA
    alone = {name: value for name, value in SCHEMA.document()["fields"][0].items() if name != "mapping"}
    assert OutputSchema.parse("Noise", {"description": "", "fields": [alone]}).fields == (scale,)
    assert OutputSchema.of(with_field(Annotated[NDArray[np.bool_], ANY])).description == ""


def test_the_stored_name_of_an_axis_means_the_same_as_its_letter():
    letters, names = (
        OutputSchema.of(with_field(Annotated[NDArray[np.bool_], Axes(axes, "x")]))
        for axes in ("B E T+1", "task episode t_with_final")
    )
    assert letters == names


def test_without_the_class_an_output_is_a_plain_one_with_the_same_fields():
    value = noise()
    assert SCHEMA.problem_of(value) is None
    assert repr(value).splitlines()[:2] == ["Noise", "  scale    [2, 3, 4]  float32  96 B"]
    again = pickle.loads(pickle.dumps(value))
    assert type(again) is type(value)
    assert len({value, again}) == 2
    assert np.array_equal(again.parts["w"], value.parts["w"])
    with pytest.raises(AttributeError):
        value.scale = 0
    own = as_declared(Noise, value)
    assert type(own) is Noise
    assert [*own.parts] == ["b", "w"]  # as they are read from the disk
    assert [*as_declared(Noise, Noise(own.scale, value.parts)).parts] == ["b", "w"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scale": np.zeros((2, 3, 4))}, "Noise.scale has dtype float64; expected float32"),
        ({"scale": np.zeros((2, 3, 4), ">f4")}, "Noise.scale has dtype >f4; expected float32"),
        ({"scale": np.zeros((2, 3), np.float32)}, "Noise.scale has shape [2, 3]; expected the axes task, episode, t"),
        ({"scale": [0.0]}, "Noise.scale is list; expected an array of float32"),
        ({"scale": np.float32(0)}, "Noise.scale is float32; expected an array of float32"),
        ({"parts": None}, "Noise.parts is NoneType; expected a mapping from names to arrays"),
        ({"parts": {1: np.zeros((2, 5))}}, "Noise.parts has the key 1; expected keys of type str"),
        ({"parts": {"w": np.zeros(2)}}, "Noise.parts['w'] has shape [2]; expected the axes task, layer, ..."),
        (
            {"parts": {"w": np.zeros((3, 5))}},
            "Noise.parts['w'] has 3 entries along task, but an earlier array has 2; expected equal lengths",
        ),
    ],
)
def test_an_output_that_is_not_as_its_class_says_is_refused(changes, problem):
    assert SCHEMA.problem_of(noise(**changes)) == problem
    assert SCHEMA.problem_of(3) == "int has no scale; expected the fields of Noise"


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        (3, "3 is not a dataclass of arrays"),
        (dict, "dict is not a dataclass of arrays"),
        (make_dataclass("Out", [("v", Annotated[NDArray[np.float32], ANY])]), "Out is mutable; use @dataclass"),
        (make_dataclass("Out", [], frozen=True), "Out has no fields; declare at least one array"),
        (with_field("Absent"), "the annotations of Out raised NameError: name 'Absent' is not defined"),
        (
            with_field(np.ndarray),
            "Out.v does not declare its axes and dtype; use Annotated[NDArray[np.float32], A",
        ),
        (with_field(Annotated[np.ndarray, ANY]), "Out.v is ndarray; expected an array with its dtype, as in Annota"),
        (with_field(Annotated[int, ANY]), "Out.v is int; expected an array with its dtype"),
        (with_field(Annotated[NDArray[Any], ANY]), "Out.v has entries of dtype Any; expected one of bool, int8"),
        (with_field(Annotated[NDArray[np.object_], ANY]), "Out.v has entries of dtype object; expected one of bool"),
        (with_field(Annotated[NDArray[np.floating], ANY]), "Out.v has entries of dtype floating; expected one of"),
        (with_field(Annotated[Mapping[int, NDArray[np.bool_]], ANY]), "Out.v has keys of type int; expected str"),
        (with_field(Annotated[NDArray[np.int64], Axes("B", " ")]), "Out.v does not describe its entries; add"),
        (with_field(Annotated[NDArray[np.int64], Axes("B Q", "x")]), "Out.v has the axis 'Q'; use letters of "),
        (with_field(Annotated[NDArray[np.int64], Axes("... B", "x")]), "Out.v has the axis '...'; use letters"),
        (with_field(Annotated[NDArray[np.int64], Axes("E E", "x")]), "Out.v has an axis twice: episode episode; ax"),
        (with_field(Annotated[NDArray[np.int64], Axes("E B", "x")]), "Out.v has the axes episode task; task (B)"),
        (with_field(Annotated[NDArray[np.int64], Axes("B step", "x")]), "Out.v has the axis 'step', which every ou"),
        (with_field(Annotated[NDArray[np.int64], Axes("B v", "x")]), "Out.v has the name of an axis; choose an"),
        (with_field(Annotated[NDArray[np.int64], ANY], "iteration"), "Out.iteration is not a valid array name"),
    ],
)
def test_a_class_that_does_not_say_what_it_holds_is_refused(declared, problem):
    with pytest.raises(OutputError) as caught:
        OutputSchema.of(declared)
    assert str(caught.value).startswith(problem)


def test_names_that_a_file_system_could_confuse_are_refused():
    hint = Annotated[NDArray[np.float32], ANY]
    with pytest.raises(OutputError, match="Out has names that differ only in case; use names that differ"):
        OutputSchema.of(make_dataclass("Out", [("a", hint), ("A", hint)], frozen=True))


@pytest.mark.parametrize(
    "document",
    [
        None,
        {"description": ""},
        {"description": "", "fields": []},
        {"description": "", "fields": [{"name": "v"}]},
        {"description": "", "fields": [{**SCHEMA.document()["fields"][0], "name": "__class__"}]},
        {"description": "", "fields": [{**SCHEMA.document()["fields"][0], "name": "import"}]},
        {"description": "", "fields": [{**SCHEMA.document()["fields"][0], "dtype": "object"}]},
        {"description": "", "fields": [{**SCHEMA.document()["fields"][0], "axes": ["../task"]}]},
    ],
)
def test_a_stored_schema_that_no_class_could_have_is_refused(document):
    with pytest.raises(OutputError):
        OutputSchema.parse("Noise", document)


@pytest.mark.parametrize("name", ["../Noise", "class"])
def test_a_stored_name_that_no_class_could_have_is_refused(name):
    with pytest.raises(OutputError, match=f"^'{name}' is not a valid name of an output; use letters, digits and _$"):
        OutputSchema.parse(name, SCHEMA.document())


def test_schemas_differ_by_fields_axes_dtypes_and_units_and_not_by_words():
    others = {
        "a": Annotated[NDArray[np.float32], Axes("B E T", "other words", unit="m")],
        "b": Annotated[NDArray[np.float32], Axes("B E T", "scale of the noise", unit="cm")],
        "c": Annotated[NDArray[np.float64], Axes("B", "scale of the noise", unit="m")],
    }
    parts = ("parts", Noise.__annotations__["parts"])
    found = {
        name: OutputSchema.of(make_dataclass("New", [("scale", hint), parts], frozen=True)).differences(SCHEMA)
        for name, hint in others.items()
    }
    stored = "stored as float32[task, episode, t] in m"
    assert found["a"] == []
    assert found["b"] == [f"New.scale is float32[task, episode, t] in cm, {stored}"]
    assert found["c"] == [f"New.scale is float64[task] in m, {stored}"]
    less = OutputSchema.of(make_dataclass("New", [parts], frozen=True))
    assert less.differences(SCHEMA) == [f"New.scale is absent, {stored}"]
