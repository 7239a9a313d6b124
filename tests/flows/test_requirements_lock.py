"""requirements.lock holds all that `make setup` installs."""

import re
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def locked() -> dict[str, Requirement]:
    lines = (PROJECT / "requirements.lock").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


@pytest.fixture(scope="module")
def needed(locked) -> set[str]:
    """Every package that metaloom[dev] needs on this machine, directly or not, but for what torch's CUDA build pins."""
    names: set[str] = set()
    queue, seen = [Requirement("metaloom[dev]")], set()
    while queue:
        requirement = queue.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        names.add(canonicalize_name(requirement.name))
        for line in distribution(requirement.name).requires or []:
            child = Requirement(line)
            of_cuda = requirement.name == "torch" and canonicalize_name(child.name) not in locked
            wanted = child.marker is None or any(child.marker.evaluate({"extra": x}) for x in ("", *requirement.extras))
            if wanted and not of_cuda:
                queue.append(child)
    return names - {"metaloom"}


def test_every_package_that_the_project_needs_is_locked(needed, locked):
    assert needed - locked.keys() == set()


def test_every_line_pins_one_version_without_a_build_suffix(locked):
    for requirement in locked.values():
        assert re.fullmatch(r"==[^+,]+", str(requirement.specifier)), f"{requirement} is not one version"


def test_the_tests_run_with_the_locked_versions(needed, locked):
    installed = {name: distribution(name).version.split("+")[0] for name in needed}
    assert {n: v for n, v in installed.items() if not locked[n].specifier.contains(v, prereleases=True)} == {}


def test_the_locked_versions_install_on_the_oldest_python_that_the_project_allows(needed):
    oldest = {name: distribution(name).metadata.get("Requires-Python") for name in needed}
    assert distribution("metaloom").metadata["Requires-Python"] == ">=3.11"
    assert {name: ok for name, ok in oldest.items() if ok and not SpecifierSet(ok).contains("3.11.0")} == {}


def test_the_lock_names_no_place_to_download_from(locked):
    text = (PROJECT / "requirements.lock").read_text()
    assert not re.search(r"https?:|file:|--|@", text)
