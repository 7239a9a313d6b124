import math

import pytest
import yaml

from metaloom.pipeline.config.yaml import dump, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("010", 10),
        ("+3", 3),
        (".inf", math.inf),
        ("true", True),
        ("", None),
        ("~", None),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'7'", "7"),
        ("half-cheetah-dir", "half-cheetah-dir"),
        ("[64, 1e-3, x]", [64, 1e-3, "x"]),
        ("a: 1e-3\nb: {c: 010}", {"a": 1e-3, "b": {"c": 10}}),
        ('{\n\t"a": 1e-3\n}', {"a": 1e-3}),
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
    ],
)
def test_values_mean_what_yaml_1_2_and_json_say(text, value):
    found = parse(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["1e3", "1E-3", "010", "+3", ".inf", "true", "no", "1:30", "2024-01-01", "", "~", "<<"]
)
def test_text_that_looks_like_something_else_is_written_so_that_it_stays_text(text):
    value = {"a": text, "b": [text, 1e-5, 3, True, None]}
    assert parse(dump(value)) == yaml.safe_load(dump(value)) == value


def test_a_mapping_is_written_in_its_order_and_letters_as_they_are():
    assert dump({"b": 1, "a": "Köln"}) == "b: 1\na: Köln\n"


def test_what_two_aliases_share_becomes_two_values():
    found = parse("a: &x {b: 1}\nc: *x")
    assert isinstance(found, dict)
    assert found["a"] is not found["c"]


@pytest.mark.parametrize(
    "text", ["a: [", "!!timestamp 2024-01-01", "!!python/name:os.system", "&a [*a]", "9" * 5000, "[" * 9999]
)
def test_what_is_no_plain_value_is_refused(text):
    with pytest.raises(ValueError, match=r"\w"):
        parse(text)


@pytest.mark.parametrize("text", ["a: {b: 1, c: 2, b: 1}", '{"a": {"b": 1, "c": 2, "b": 1}}', "- b: 1\n  b: 2"])
def test_a_key_that_appears_twice_is_named(text):
    with pytest.raises(ValueError, match="the key 'b' appears twice in one mapping; keys must be unique"):
        parse(text)


@pytest.mark.parametrize("link", ["[{}]", "{{<<: [{}]}}"])
def test_aliases_of_aliases_that_would_fill_the_memory_are_refused(link):
    levels = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} " + link.format(", ".join([f"*a{i - 1}"] * 9)) for i in range(1, 30)]
    with pytest.raises(ValueError, match="aliases"):
        parse("\n".join(levels))


def test_as_many_values_as_are_accepted_and_no_more():
    def text(more):
        return f"[&a [{', '.join(['0'] * 368)}]{', *a' * 270}{', 0' * more}]"  # 1 + 271 * 369 values, and more

    found = parse(text(0))
    assert isinstance(found, list)
    assert len(found) == 271
    with pytest.raises(ValueError, match="its aliases expand to 100001 values; at most 100000 are accepted"):
        parse(text(1))
