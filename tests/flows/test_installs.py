"""What works with the required packages, and with those that read runs: every other package is hidden."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = PROJECT["dependencies"]
# Finders say that there is no such package, as where it is not installed, to this process and those that it starts.
HIDE = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PathDistribution

modules, packages = {modules!r}, {packages!r}

class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in modules else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *args, **kwargs):
        found = super().find_distributions(*args, **kwargs)
        return (one for one in found if one.name.lower().replace("_", "-") not in packages)

sys.meta_path[sys.meta_path.index(PathFinder)] = Visible
"""


def closure(lines: Iterable[str]) -> set[str]:
    """Names of all packages that are installed with some."""
    names, seen, queue = set[str](), set[str](), [Requirement(line) for line in lines]
    while queue:
        requirement = queue.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        names.add(canonicalize_name(requirement.name))
        try:
            children = [Requirement(line) for line in distribution(requirement.name).requires or ()]
        except PackageNotFoundError:  # of another platform
            continue
        extras = ("", *requirement.extras)
        queue += [c for c in children if c.marker is None or any(c.marker.evaluate({"extra": x}) for x in extras)]
    return names


def environment(folder: Path, lines: Iterable[str]) -> dict[str, str]:
    """Variables of a process that finds these packages alone, and what they require."""
    there = {*closure(lines), "metaloom"}
    of_modules = packages_distributions()
    modules = {name for name, found in of_modules.items() if not there & {*map(canonicalize_name, found)}}
    modules = {name for name in modules if not name.startswith("__editable__")}
    packages = {canonicalize_name(name) for found in of_modules.values() for name in found} - there
    (folder / "sitecustomize.py").write_text(HIDE.format(modules=modules, packages=packages))
    return {**os.environ, "PYTHONPATH": str(folder), "METALOOM_RUNS": str(folder / "runs")}


def answers(env: dict[str, str], folder: Path, lines: Iterable[str], code: str = "") -> dict[str, tuple[int, str]]:
    """Run commands of Metaloom, then code, in one process; return exit codes and texts of the commands."""
    program = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from metaloom.flows.cli import run
told = {}
for line in json.loads(sys.argv[1]):
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = run(line.split())
    told[line] = code, said.getvalue()
exec(sys.argv[2])
print(json.dumps(told))
"""
    command = [sys.executable, "-c", program, json.dumps([*lines]), code]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


READ = """
import metaloom
opened = metaloom.open_run("first")
for table in (opened.episodes(), opened.steps(), opened.tasks(), opened.metrics(), opened.lineage()):
    assert list(table.to_pandas().columns) == table.column_names
assert opened[0].rollouts(0).rewards.size == opened[0].xarray().rewards.size > 0
assert metaloom.open_runs("*").metrics().num_rows == opened.metrics().num_rows
assert not {"torch", "mujoco", "gymnasium", "prefect", "dask"} & {*sys.modules}
"""


def test_the_packages_that_the_documentation_names_read_a_run_and_other_commands_say_what_is_missing(
    tmp_path, copy_tiny_run
):
    copy_tiny_run(tmp_path / "runs" / "first")
    page = (ROOT / "docs" / "installing.md").read_text()
    (packages,) = re.findall(r"^pip install (cyclopts .*)$", page, re.MULTILINE)
    assert not {"torch", "mujoco", "gymnasium", "prefect", "dask", "distributed"} & closure(packages.split())
    reading = ("ls", "show first", "show first@0", "du first", "verify first", "export first --to parquet --out out")
    others = ("replay first@0", "view first", "report first")
    found = answers(environment(tmp_path, packages.split()), tmp_path, (*reading, *others), READ)
    assert {line: code for line, (code, _) in found.items()} == {
        **dict.fromkeys(reading, 0),
        **dict.fromkeys(others, 2),
    }
    missing = " is not installed: this installation only reads runs. `pip install metaloom` installs it\n"
    assert found["replay first@0"][1].endswith(missing)
    assert found["view first"][1].endswith(missing)
    assert (
        found["report first"][1]
        == "metaloom: matplotlib is not installed; `pip install 'metaloom[view]'` installs it\n"
    )


def test_the_required_packages_train_replay_evaluate_verify_and_show_and_extras_are_named(tmp_path):
    small = "--set iterations=1 --set num_tasks=2 --set episodes_per_task=2 --workers 0"
    (tmp_path / "tasks.json").write_text("[[1, 1], [-1, 1]]")
    working = (
        f"train promp-point-corner --run first {small}",
        "resume first --iterations 2 --workers 0",
        "replay first@0",
        "evaluate first --adaptation-steps 1 --num-tasks 2",
        f"evaluate first --tasks {tmp_path / 'tasks.json'}",
        "verify first",
        "show first@1",
    )
    refused = {
        "report first": ("view", "matplotlib"),
        "compare first --plot out.png": ("view", "matplotlib"),
        "view first": ("view", "matplotlib"),
        "video first --out out.gif": ("view", "pillow"),
        "serve": ("view", "matplotlib"),
        "resume first --log wandb": ("wandb", "wandb"),
        "export first --to minari --out out": ("minari", "h5py"),
    }
    found = answers(environment(tmp_path, REQUIRED), tmp_path, (*working, *refused))
    for line in working:
        assert found[line][0] == 0, (line, found[line][1])
    assert "no report       matplotlib is not installed" in found[working[0]][1]
    for line, (extra, package) in refused.items():
        code, said = found[line]
        expected = f"metaloom: {package} is not installed; `pip install 'metaloom[{extra}]'` installs it"
        assert (code, said.splitlines()[-1]) == (2, expected), line


def test_every_module_imports_what_is_required_or_what_an_extra_brings():
    extras = PROJECT["optional-dependencies"]
    declared = {*REQUIRED, *(line for name in extras.keys() - {"all", "dev", "bench"} for line in extras[name])}
    there, of_modules = closure(declared), packages_distributions()
    unknown = set()
    for file in (file for part in ("flows", "pipeline", "stages", "storage") for file in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in {(name or "").partition(".")[0] for name in names} - {"", "metaloom"} - sys.stdlib_module_names:
                if not there & {canonicalize_name(found) for found in of_modules.get(name, [name])}:
                    unknown.add(f"{file.relative_to(ROOT)}: {name}")
    assert unknown == set()
