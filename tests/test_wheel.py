"""The wheel: one top-level name with real folders in it, and a command that runs from there.

flows/test_prefect_server.py trains, serves and deploys from it, installed in an environment of its own.
"""

import configparser
import os
import re
import subprocess
import sys
import zipfile

import pytest

import metaloom

PARTS = ("flows", "pipeline", "stages", "storage")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """What the wheel puts beside other packages."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_it_holds_every_source_file_under_one_name_and_nothing_else(installed, pytestconfig):
    root = pytestconfig.rootpath
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"metaloom"}
    held = {path.relative_to(installed / "metaloom").as_posix() for path in (installed / "metaloom").rglob("*.*")}
    sources = {path.relative_to(root).as_posix() for part in PARTS for path in (root / part).rglob("*.py")}
    data = {f"flows/prefect_app/{name}" for name in ("prefect.toml", "prefect.yaml", "profiles.toml")}
    static = (path for room in ("viewer", "views") for path in (root / "flows" / room / "static").iterdir())
    recipes = (root / "flows" / "recipes").glob("*.yaml")
    data |= {path.relative_to(root).as_posix() for path in (*static, *recipes)}
    assert held == sources | data | {"__init__.py", "py.typed"}
    assert not any(path.is_symlink() for path in installed.rglob("*"))


def test_it_installs_the_command_and_the_plugin_of_prefect(installed):
    (about,) = installed.glob("metaloom-*.dist-info")
    points = configparser.ConfigParser()
    points.read(about / "entry_points.txt")
    assert dict(points["console_scripts"]) == {"metaloom": "metaloom.flows.cli:main"}
    assert dict(points["prefect.plugins"]) == {"metaloom": "metaloom.flows.prefect_app.plugin"}


def test_the_command_runs_from_it_beside_folders_named_like_its_parts(installed, tmp_path):
    for part in PARTS:
        (tmp_path / part).mkdir()
        (tmp_path / part / "__init__.py").write_text("raise ImportError('a module of the user was taken for ours')")
    told = subprocess.run(
        [sys.executable, "-m", "metaloom.flows.cli", "recipes"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(tmp_path)])},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert "promp-point-corner" in told.stdout


def test_what_tells_of_the_release_names_its_version(pytestconfig):
    def named(file, pattern):
        return re.search(pattern, (pytestconfig.rootpath / file).read_text("utf-8"), re.MULTILINE)[1]

    version = metaloom.__version__
    assert named("CHANGELOG.md", r"^## \[(\d[^]]*)\] - \d{4}-\d\d-\d\d$") == version
    assert named("CITATION.cff", r"^version: (.*)$") == version
