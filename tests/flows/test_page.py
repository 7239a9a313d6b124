import base64
import hashlib
import json
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from metaloom.flows.views.page import Page, Picture
from metaloom.flows.views.series import Chart, Panel, Series

HOSTILE = '"><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>'


class Outline(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def page_with(text: str) -> Page:
    """A page that has the text in every place a page has."""
    picture = Picture("data:image/svg+xml;base64,AAAA", text, text)
    return Page(
        title=text,
        subtitle=text,
        tiles=[(text, text)],
        main_figure=picture,
        sections=[(text, [picture])],
        tables={text: [(text, text)], "open": []},
        unfolded=["open"],
    )


def drawn_page_with(text: str) -> Page:
    """A page with a chart that has the text in every place a chart has."""
    series = (Series(text, "#000000", np.ones(2), (np.zeros(2), np.ones(2))),)
    chart = Chart(
        "one", text, "lines", text, text, text, text, text, np.arange(2.0), (Panel(text, series),), None, (text,)
    )
    return Page(text, text, [], chart, [(text, [replace(chart, name="two")])], {}, (), "window.Plotly = {};")


def test_no_text_of_a_chart_can_end_its_data_or_add_an_element():
    harmless, hostile = Outline(drawn_page_with("x").html()), Outline(drawn_page_with(HOSTILE).html())
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in harmless.tags]
    assert sum(tag == "script" for tag, _ in hostile.tags) == 3
    (data,) = [part for part in hostile.text if part.startswith("[{")]
    assert json.loads(data)[0]["panels"][0]["series"][0]["label"] == HOSTILE


def test_a_page_that_draws_allows_its_two_scripts_and_no_network():
    html = drawn_page_with("x").html()
    outline = Outline(html)
    policy = next(a["content"] for tag, a in outline.tags if tag == "meta" and "http-equiv" in a)
    script = html.rpartition("<script>")[2].partition("</script>")[0]
    digests = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in (script, "window.Plotly = {};")]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert policy == (f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {allowed}")
    assert "import " not in script
    assert "export " not in script


def test_no_text_can_add_an_element_or_an_attribute():
    harmless, hostile = Outline(page_with("x").html()), Outline(page_with(HOSTILE).html())
    assert [(tag, sorted(attrs)) for tag, attrs in hostile.tags] == [
        (tag, sorted(attrs)) for tag, attrs in harmless.tags
    ]
    assert sum(HOSTILE in part for part in hostile.text) == sum(part == "x" for part in harmless.text) > 8


@pytest.mark.parametrize("attribute", ["src", "href", "srcset", "action"])
def test_the_page_refers_to_nothing_outside_itself(attribute):
    values = [attrs[attribute] for _, attrs in Outline(page_with("x").html()).tags if attribute in attrs]
    assert all(value and value.startswith("data:") for value in values)
    assert "url(" not in page_with("x").html()
    assert "@import" not in page_with("x").html()


def test_the_page_forbids_scripts_and_the_network_to_the_browser():
    metas = [attrs for tag, attrs in Outline(page_with("x").html()).tags if tag == "meta"]
    policy = next(attrs["content"] for attrs in metas if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_only_the_named_tables_are_unfolded():
    details = [attrs for tag, attrs in Outline(page_with("x").html()).tags if tag == "details"]
    assert [("open" in attrs) for attrs in details] == [False, True]


def test_pictures_fill_their_places_unless_they_are_shown_as_they_are():
    for picture, name in ((Picture("data:,", ""), "card"), (Picture("data:,", "", enlarged=False), "card as-is")):
        html = replace(page_with("x"), main_figure=picture, sections=[]).html()
        assert [attrs for tag, attrs in Outline(html).tags if tag == "figure"] == [{"class": name}]
