"""`import metaloom`: what it offers, and that it costs nothing until it is used."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import metaloom
from metaloom import storage


@pytest.mark.parametrize("name", metaloom._names())
def test_every_name_of_the_package_leads_to_a_documented_object(name):
    assert name in dir(metaloom)
    assert getattr(metaloom, name).__doc__


def test_a_name_it_does_not_have_is_an_attribute_error_with_those_it_has():
    with pytest.raises(AttributeError, match=r"no attribute 'opne_run'; it has .*open_run"):
        _ = metaloom.opne_run


def test_a_run_is_opened_by_its_name_under_the_runs_folder_as_the_commands_do(tmp_path, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "elsewhere"))
    with pytest.raises(storage.RunNotFound, match="elsewhere/first"):
        metaloom.open_run("first")
    with pytest.raises(storage.RunNotFound, match=f"^{tmp_path}/first"):
        metaloom.open_run(tmp_path / "first")


def test_its_version_is_the_installed_one():
    assert metaloom.__version__ == version("metaloom")


def test_importing_it_imports_nothing_else():
    code = "import sys; before = {*sys.modules}; import metaloom; print(*sorted({*sys.modules} - before))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name for name in told.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert imported == {"metaloom"}
