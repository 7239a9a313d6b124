"""Arguments of the Python API are checked against what its functions are annotated with."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal

import numpy as np
import pytest
from cyclopts import Parameter
from cyclopts.validators import Number

from metaloom.flows.arguments import checked, fits, required
from metaloom.flows.errors import UsageError

AT_LEAST_ONE = Annotated[int, Parameter(validator=Number(gte=1))]
SHARE = Annotated[float, "of all", Parameter(validator=(Number(gte=0, lte=1),))]


@pytest.mark.parametrize(
    ("annotation", "right", "wrong", "words"),
    [
        (int, (0, np.int64(3)), (True, 1.0, "1", None), "an integer"),
        (float, (1, 0.5, np.float32(1)), (False, "1", None), "a number"),
        (bool, (True,), (1, None), "True or False"),
        (str, ("a",), (1, b"a"), "text"),
        (None, (None,), (0, ""), "None"),
        (int | None, (None, 2), ("a", 1.5), "an integer or None"),
        (int | str | None, (None, 2, "a"), (1.5,), "an integer, text or None"),
        (Literal["a", 1], ("a", 1), ("b", "1", 2, True), "one of a, 1"),
        (
            Sequence[int],
            ([], [1], (1, 2), np.array([1, 2])),
            ("12", b"1", {0: 1}, {1}, [1, "a"], ["a", 1], 5),
            "a list whose items are each an integer",
        ),
        (
            tuple[int, str],
            ((1, "a"), [1, "a"]),
            ((1,), (1, "a", "b"), (1, 2), ("a", "a"), "1a"),
            "a tuple of 2: an integer, text",
        ),
        (Mapping[str, int], ({}, {"a": 1}), ({"a": "b"}, {1: 1}, [("a", 1)], None), "a mapping"),
        (Callable[[int], int], (len,), (1, None), "a function"),
        (Path, (Path(),), ("a", None), "a Path"),
        (ArithmeticError, (ZeroDivisionError(),), (ValueError(),), "an ArithmeticError"),
        (ForwardRef("ArithmeticError"), (ZeroDivisionError(),), (ValueError(), "a"), "an ArithmeticError"),
        (AT_LEAST_ONE, (1, 5), (0, "a", 1.5, True), "an integer >= 1"),
        (AT_LEAST_ONE | None, (None, 1), (0,), "an integer >= 1 or None"),
        (SHARE, (0, 0.5, 1), (-0.1, 1.1, True), "a number from 0 to 1"),
        (Any, (None, 1, "a"), (), "an Any"),
        (tuple[int, ...], ((), (1, 2)), (), None),
    ],
)
def test_values_fit_what_is_asked_for_in_words(annotation, right, wrong, words):
    assert all(fits(value, annotation) for value in right)
    assert not any(fits(value, annotation) for value in wrong)
    assert words is None or required(annotation) == words


def test_a_wrong_argument_is_named_with_what_is_expected_and_how_a_list_of_one_is_written():
    @checked
    def read(names: Sequence[str], number: "int" = 1, **more: int):
        return names, number, more

    assert read(["a"], number=2, others="b") == (["a"], 2, {"others": "b"})
    for arguments, told in (
        ({"names": "a"}, "got names='a'; expected a list whose items are each text; write names=['a']"),
        ({"names": 5}, "got names=5; expected a list whose items are each text"),
        ({"names": [], "number": "1"}, "got number='1'; expected an integer"),
        ({"names": [], "number": [1]}, "got number=[1]; expected an integer"),
    ):
        with pytest.raises(UsageError) as caught:
            read(**arguments)
        assert str(caught.value) == f"read: {told}"
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        read()
