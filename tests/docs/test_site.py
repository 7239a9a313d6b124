"""The documentation as a site."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from browsing import NEEDS_BROWSER
from driving import open_page

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with every warning an error: of a page in no menu, a link or an anchor that leads nowhere."""
    folder = tmp_path_factory.mktemp("site")
    # Not with --quiet, which keeps warnings from being counted.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_found_by_the_search(site):
    found = {
        entry["location"].partition("#")[0]
        for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    for page in pages:
        folder = page.parent if page.name == "README.md" else page.with_suffix("")
        assert ("" if folder == Path() else f"{folder}/") in found


def test_pages_fetch_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r'\ssrc="(?:https?:)?//[^"]*', text) == [], page
        assert re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(?:https?:)?//[^"]*', text) == [], page


def test_the_diagram_and_the_programs_are_part_of_it(site):
    assert "<svg" in (site / "concepts/index.html").read_text(encoding="utf-8")
    assert (site / "examples/adapt_my_robot.py").read_text() == (ROOT / "examples/adapt_my_robot.py").read_text()
    assert (site / "examples/notebooks/first_steps.ipynb").exists()


def test_equations_are_set_when_the_site_is_built(site):
    assert (site / "algorithms/promp/index.html").read_text().count("<math") > 2
    for page in site.rglob("index.html"):
        text = page.read_text(encoding="utf-8")
        assert "arithmatex" not in text, page
        assert not [equation for equation in re.findall("<math.*?</math>", text, re.DOTALL) if "\\" in equation], page


def test_the_reference_has_every_name_that_the_package_offers(site):
    import metaloom
    from metaloom.flows.cli import COMMANDS
    from metaloom.flows.operations import operations

    page = (site / "python/index.html").read_text(encoding="utf-8")
    assert "adaptation" in page
    for operation in operations().values():
        assert all(f"<td><code>{option}</code></td>" in page for option in operation.of_terminal)
    commands = (site / "commands/index.html").read_text(encoding="utf-8")
    assert all(f'id="metaloom-{name}"' in commands for name in COMMANDS)
    assert all(f">{name}<" in page for name in metaloom._names())


def test_the_reference_of_classes_has_their_methods(site):
    page = (site / "contracts/index.html").read_text(encoding="utf-8")
    assert ":::" not in page
    for name in (
        "algorithms.contract.Learner.update",
        "algorithms.maml.learner.MetaLearner.objective",
        "dataflow.stage.At.generator",
        "dataflow.graph.Graph.insert",
        "dataflow.edges.last_step",
        "policies.contract.Policy.distribution",
        "envs.contract.MetaEnv.sample_tasks",
    ):
        assert f'id="metaloom.pipeline.{name}"' in page


def test_the_menu_names_a_page_once():
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    pages = re.findall(r"[\w/]+\.md", json.dumps(yaml.safe_load(text)["nav"]))
    assert len(pages) == len(set(pages))


TRIED = ("README", "algorithms/promp", "data_format")
"""Pages with tables of links, equations and wide tables. The others are tried in the sweep."""


@NEEDS_BROWSER
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in TRIED else pytest.mark.sweep)
        for name in sorted(str(p.relative_to(ROOT / "docs").with_suffix("")) for p in (ROOT / "docs").rglob("*.md"))
    ],
)
def test_a_page_breaks_no_rule_of_accessibility_in_light_or_dark(site, name, tmp_path):
    html = site / name.removesuffix("README") / "index.html"
    with open_page(html.as_uri(), tmp_path) as page:
        page.wait("document.querySelector('nav [role=none]') !== null")
        for scheme in ("default", "slate"):
            page.value(f"document.body.dataset.mdColorScheme = '{scheme}'")
            page.value("new Promise(done => setTimeout(done, 300))")  # colors fade
            assert page.violations() == [], scheme
