"""`import metaloom`: what it offers, and that it costs nothing until it is used."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

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


# What functions do unless told otherwise, where that is neither False nor None.
DEFAULTS = {
    "compare last": "10", "compare seed": "0", "optimize step": "0", "add learners": "20", "sweep parallel": "1",
    "sweep progress": "True", "train progress": "True", "resume progress": "True", "video every": "1", "view port": "0",
    "replay backend": "Backend(workers=0)", "replay_from_learner backend": "Backend(workers=0)",
    "debug_stage backend": "Backend(workers=0)", "materialise backend": "Backend(workers=0)", "debug_stage step": "0",
    "sweep step": "0", "fitted_baselines step": "0", "train_sweep parallel": "1", "output k": "0", "rollouts k": "0",
    "samples k": "0", "adapted k": "0", "transitions update": "0", "xarray k": "0", "ref k": "0", "in_group step": "0",
    "unfinished_folder mode": "511", "check_python version": "sys.version_info[:2]", "parse_table scale": "1",
}  # fmt: skip


def defaults(file: Path) -> Iterator[tuple[str, str]]:
    """Find what public functions of a file do unless told otherwise, where that is a number or a yes or no."""
    for function in ast.walk(ast.parse(file.read_text("utf-8"))):
        if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
            continue
        given = function.args
        named = [*given.posonlyargs, *given.args][-len(given.defaults) :] if given.defaults else []
        with_defaults = [*named, *given.kwonlyargs], [*given.defaults, *given.kw_defaults]
        for argument, value in zip(*with_defaults, strict=True):
            constants = [part.value for part in ast.walk(value or ast.Pass()) if isinstance(part, ast.Constant)]
            if any(isinstance(constant, bool | int | float) for constant in constants):
                yield f"{function.name} {argument.arg}", ast.unparse(value)


def test_nothing_is_done_unasked_that_is_not_listed_here(pytestconfig):
    places = ("flows/operations", "flows/commands", "flows/cli", "storage")
    files = [file for place in places for file in pytestconfig.rootpath.joinpath(place).rglob("*.py")]
    found = {told for file in files for told in defaults(file) if told[1] != "False"}
    assert found == {*DEFAULTS.items()}
