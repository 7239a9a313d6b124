"""The reliability page names tests that exist, and every test of the suite."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists_and_none_of_the_suite_is_left_out():
    named = set(re.findall(r"`tests/(\w+/test_\w+\.py)`", PAGE))
    assert [name for name in named if not (TESTS / name).exists()] == []
    assert {f"reliability/{file.name}" for file in (TESTS / "reliability").glob("test_*.py")} <= named
