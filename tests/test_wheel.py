"""The wheel: one top-level name with real folders in it, and a command that runs from there."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

PARTS = ("flows", "pipeline", "stages", "storage")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, pytestconfig):
    """The wheel of a copy, because a build leaves files beside the sources and takes some from there."""
    root, folder = pytestconfig.rootpath, tmp_path_factory.mktemp("wheel")
    for name in ("metaloom", *PARTS):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / name, folder / "source" / name, symlinks=True, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, folder / "source")
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_it_holds_every_source_file_under_one_name_and_nothing_else(wheel, pytestconfig):
    root = pytestconfig.rootpath
    assert {path.name.partition("-")[0] for path in wheel.iterdir()} == {"metaloom"}
    held = {path.relative_to(wheel / "metaloom").as_posix() for path in (wheel / "metaloom").rglob("*.*")}
    sources = {path.relative_to(root).as_posix() for part in PARTS for path in (root / part).rglob("*.py")}
    assert held == sources | {"__init__.py", "py.typed"}
    assert not any(path.is_symlink() for path in wheel.rglob("*"))


def test_it_installs_the_command_and_the_plugin_of_prefect(wheel):
    (about,) = wheel.glob("metaloom-*.dist-info")
    points = configparser.ConfigParser()
    points.read(about / "entry_points.txt")
    assert dict(points["console_scripts"]) == {"metaloom": "metaloom.flows.cli:main"}
    assert dict(points["prefect.plugins"]) == {"metaloom": "metaloom.flows.prefect_app.plugin"}


def test_the_command_runs_from_it_beside_folders_named_like_its_parts(wheel, tmp_path):
    for part in PARTS:
        (tmp_path / part).mkdir()
        (tmp_path / part / "__init__.py").write_text("raise ImportError('a module of the user was taken for ours')")
    told = subprocess.run(
        [sys.executable, "-m", "metaloom.flows.cli", "recipes"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(wheel), str(tmp_path)])},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert "promp-point-corner" in told.stdout
