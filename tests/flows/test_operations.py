"""Command, Python function, Prefect flow and JSON of an operation have the same options, types and defaults."""

import ast
import inspect
import json
import os
import subprocess
import sys
from inspect import Parameter
from pathlib import Path

import numpy as np
import pytest
from cyclopts import App
from prefect.utilities.callables import parameter_schema

import metaloom
from metaloom.flows import cli
from metaloom.flows.errors import UsageError
from metaloom.flows.operations import REFERENCE, Operation, operations
from metaloom.flows.operations.options import Iteration, is_backend, is_python_only, parameters_of
from metaloom.flows.prefect_app import deployments
from metaloom.flows.prefect_app.generated import make_flow
from metaloom.flows.rollouts.backend import Backend

NAMED = {
    "overrides": "set",
    "new_run": "run",
    "form": "format",
    "steps": "step",
    "everything": "all",
    "folder": "from",
    "many": "yes",
}
"""Names of parameters on the command line that another word is better for."""
WRITTEN = [operation for operation in operations().values() if operation.run]
GROUPED = [*((operation, cli.app, metaloom) for operation in WRITTEN)]
GROUPED += [(operation, cli.app["reference"], metaloom.reference) for operation in REFERENCE]
each = pytest.mark.parametrize(("operation", "app", "module"), GROUPED, ids=lambda it: getattr(it, "run", ""))


def of_command(app: App, operation: Operation) -> dict[str, object]:
    """Name of every option of a command, and its default."""
    return {
        next(name for name in argument.names if not name.startswith("--no-"))
        .strip("-")
        .replace("-", "_")
        .lower(): argument.field_info.default
        for argument in app[operation.name].assemble_argument_collection()
        if argument.names and argument.show
    }


@each
def test_a_command_and_its_python_function_have_the_same_options_and_defaults(operation, app, module):
    command = of_command(app, operation)
    assert [name for name, default in command.items() if default is True] == []  # flags are off unless given
    backend = {
        option for option in command if option in inspect.signature(Backend).parameters or option == "step_timeout"
    }
    for parameter in parameters_of(operation.function):
        if is_python_only(parameter.annotation):
            assert parameter.name not in command
        elif is_backend(parameter.annotation):
            assert backend == {"workers", "threads", "scheduler", "step_timeout", "retries"}
        else:
            default = command.pop(NAMED.get(parameter.name, parameter.name))
            assert default == parameter.default or default is Parameter.empty is parameter.default, parameter
    assert command.pop("json", None) is (False if operation.has_json else None)
    terminal = inspect.signature(metaloom.flows.operations.resolve(operation.terminal)) if operation.terminal else None
    extras = {NAMED.get(name, name) for name in terminal.parameters} - {"call", "as_json"} if terminal else set()
    assert terminal is None or ("as_json" in terminal.parameters) == operation.has_json
    assert {*command} - backend == extras
    assert {*operation.of_terminal} == extras


DEFAULTS = {
    ("compare", "last"): 10,
    ("optimize", "step"): 0,
    ("resume", "progress"): True,
    ("serve", "port"): 4200,
    ("sweep", "parallel"): 1,
    ("sweep", "progress"): True,
    ("train", "progress"): True,
    ("video", "every"): 1,
    ("view", "port"): 0,
}


def test_defaults_are_those_that_the_documentation_states():
    found = {name: inspect.signature(operations()[name[0]].function).parameters[name[1]].default for name in DEFAULTS}
    assert found == DEFAULTS
    assert inspect.signature(metaloom.reference.add).parameters["learners"].default == 20


def test_commands_that_ask_serve_or_write_what_they_name_print_no_json():
    found = {operation.name for operation in WRITTEN if "json" not in of_command(cli.app, operation)}
    assert found == {"cancel", "fork", "graph", "policy", "report", "rm", "serve", "video", "view"}


LATE = (
    "trust", "workers", "threads", "scheduler", "step_timeout", "retries", "log", "film_every",
    "metrics_port", "json",
)  # fmt: skip


@each
def test_help_lists_what_many_commands_have_after_all_others_in_one_order(operation, app, module):
    names = [*of_command(app, operation)]
    late = [name for name in LATE if name in names]
    assert names[len(names) - len(late) :] == late


@each
def test_every_option_is_described_and_python_calls_the_function_of_the_table(operation, app, module):
    described = inspect.getdoc(operation.function).partition("\nArgs:\n")[2]
    assert getattr(module, operation.name) is operation.function
    for parameter in inspect.signature(operation.function).parameters.values():
        assert f"\n    {str(parameter).partition(':')[0]}: " in f"\n{described}", parameter


def test_editors_know_the_function_of_every_operation():
    tree = ast.parse(Path(metaloom.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    typed = {name.asname: f"{node.module}:{name.name}" for node in imports for name in node.names}
    assert {operation.name: typed.get(operation.name) for operation in WRITTEN} == {
        operation.name: operation.run for operation in WRITTEN
    }


@pytest.mark.parametrize("name", ["evaluate", "replay"])
def test_a_prefect_form_has_the_options_of_the_python_function(name):
    function, flow = operations()[name].function, getattr(deployments, name)
    form = parameter_schema(flow).model_dump_for_openapi()["properties"]
    for parameter in parameters_of(function):
        if is_backend(parameter.annotation):
            assert form.pop("workers")["default"] in (0, None)
        elif parameter.annotation is Iteration or not is_python_only(parameter.annotation):
            field = form.pop(parameter.name)
            assert field.get("default", Parameter.empty) == parameter.default
            assert field["description"]
            assert parameter.name != "run" or "A name under the runs folder" in field["description"]
    assert form == {}


TRY = """
import json, sys
import metaloom
from metaloom.flows import cli
from metaloom.flows.prefect_app.generated import flow_longest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object

codes = [cli.run(["--help"]), cli.run(["longest", sys.argv[1], "--top", "2", "--json"])]
found = metaloom.longest(sys.argv[1], top=2)
try:
    metaloom.longest(sys.argv[1], top=0)
except ValueError as problem:
    assert "longest: got top=0; expected an integer >= 1" in str(problem), problem
assert metaloom.the_longest is metaloom.longest and {"longest", "the_longest"} < {*dir(metaloom)}
assert import_object("metaloom.flows.prefect_app.generated.flow_the-longest").name == "the-longest"
form = parameter_schema(flow_longest).model_dump_for_openapi()["properties"]
state = flow_longest.fn(sys.argv[1])
page = cli.app.generate_docs()
print(json.dumps([codes, found.lengths, str(found), [*form], form["top"]["minimum"], state.name, page]))
"""


def test_an_installed_package_adds_a_command_from_one_file(tmp_path, copy_tiny_run):
    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
    file = page.partition("<!-- save as: longest_episodes.py -->\n```python\n")[2].partition("```")[0]
    points = page.partition('[project.entry-points."metaloom.operations"]\n')[2].partition("```")[0]
    assert len(file.splitlines()) <= 40
    (tmp_path / "longest_episodes.py").write_text(file)
    installed = tmp_path / "longest_episodes-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: longest-episodes\nVersion: 1.0\n")
    points = f"[metaloom.operations]\n{points}the_longest = longest_episodes:longest\n".replace('"', "")
    (installed / "entry_points.txt").write_text(points)
    run = copy_tiny_run(tmp_path / "run")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", TRY, str(run)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    help_text, _, shown = done.stdout.partition("- Installed -")
    assert "longest      Show the lengths of the longest episodes of a run." in shown
    assert "the-longest  Show the lengths of the longest episodes of a run." in shown
    assert "longest" not in help_text
    codes, lengths, text, form, least, state, reference = json.loads(done.stdout.splitlines()[-1])
    assert (codes, len(lengths), text) == ([0, 0], 2, ", ".join(map(str, lengths)))
    assert f'"lengths": [\n    {lengths[0]},\n    {lengths[1]}\n  ]' in done.stdout
    assert (form, least, state) == (["run", "top"], 1, "Completed")
    assert "metaloom longest" in reference


BROKEN = {
    "raising": ("boom", 'raise RuntimeError("no such library")\n'),
    "unbound": ("gone", "other = 1\n"),
    "number": ("seven", "seven = 7\n"),
    "unspoken": ("spoken", "def spoken(*, as_json: bool = False) -> None:\n    'Speak.'\n"),
    "takes_train": ("train", "def train() -> None:\n    'Train.'\n"),
    "takes_run": ("open_run", "def open_run() -> None:\n    'Open.'\n"),
    "dashed": ("-h", "def show() -> None:\n    'Show.'\n"),
    "quoted": (
        "quoted",
        "from __future__ import annotations\nfrom metaloom.flows.operations.options import Natural\n"
        "def quoted(*, top: Natural = 3) -> int:\n    'Quote.'\n    return top\n",
    ),
}
TRY_BROKEN = """
import json
import metaloom
from metaloom.flows import cli

commands = [["--help"], ["ls"], ["boom", "--x", "y"], ["quoted", "--top", "5", "--json"], ["quoted", "--top", "-1"]]
print(json.dumps([[cli.run(tokens) for tokens in commands], metaloom.open_run.__module__]))
"""


def test_a_broken_operation_of_a_package_is_named_and_every_other_command_works(tmp_path):
    for module, (name, text) in BROKEN.items():
        (tmp_path / f"{module}.py").write_text(text)
        installed = tmp_path / f"{module}-1.0.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (installed / "entry_points.txt").write_text(f"[metaloom.operations]\n{name} = {module}:{name}\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "METALOOM_RUNS": str(tmp_path / "runs")}
    done = subprocess.run([sys.executable, "-c", TRY_BROKEN], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 0, 2, 0, 2], "metaloom.flows.opened"]
    shown = " ".join(done.stdout.split("- Installed -")[1].replace("|", "").split())
    for name, problem in {"boom": "no such library", "gone": "AttributeError", "seven": "TypeError"}.items():
        assert f"{name} the installed operation {name!r}" in shown
        assert problem in shown
    assert "(unspoken:spoken) cannot be used" in shown
    assert "(raising:boom) cannot be used: RuntimeError: no such library" in done.stderr
    for module, name in (("takes_train", "train"), ("takes_run", "open_run"), ("dashed", "-h")):
        assert f"{module}: skipped the operation {name!r}" in done.stderr


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (
            lambda run: metaloom.thin(run, keep_last=-1),
            "thin: got keep_last=-1; expected an integer >= 0",
        ),
        (lambda run: metaloom.thin(run, keep_every=0), "keep_every=0; expected an integer >= 1 or None"),
        (lambda run: metaloom.view(run, port=70000), "port=70000; expected an integer from 0 to 65535$"),
        (lambda run: metaloom.ls(status="done"), "status='done'; expected one of complete, .*, unreadable or None$"),
        (lambda run: metaloom.ls(sort=True), "sort=True; expected one of started"),
        (lambda run: metaloom.ls(limit=2.0), "limit=2.0; expected an integer"),
        (lambda run: metaloom.ls(reverse=1), "reverse=1; expected True or False$"),
        (lambda run: metaloom.logs(run, level=None), "level=None; expected one of debug"),
        (lambda run: metaloom.graph(str(run), form="png"), "form='png'; expected one of text, mermaid, svg$"),
        (lambda run: metaloom.replay(run, True), "replay: got iteration=True; expected an integer or None$"),
        (lambda run: metaloom.replay(run, "0"), "iteration='0'; expected an integer or None$"),
        (lambda run: metaloom.replay(5), "run=5; expected text, a Path or a Run$"),
        (lambda run: metaloom.replay(run, backend="dask"), "backend='dask'; expected a Backend$"),
        (lambda run: metaloom.replay(run, replayed=1), "replayed=1; expected a function or None$"),
        (lambda run: metaloom.train(7), "recipe=7; expected text or a RunConfig$"),
        (lambda run: metaloom.train("sac", log="wandb"), r"log='wandb'; expected a list .*; write log=\['wandb'\]$"),
        (lambda run: metaloom.train("sac", log=[1]), r"log=\[1\]; expected a list whose items are each text$"),
        (lambda run: metaloom.iterate(3), "iterate: got recipe=3; expected text, a RunConfig or a Run$"),
        (lambda run: metaloom.compare([run, 3]), r", 3\]; expected .* or a list whose items are each text, a Path or"),
        (lambda run: metaloom.compare(run, group="seed"), r"group='seed'; expected .*; write group=\['seed'\]$"),
        (lambda run: metaloom.evaluate(run, tasks=[[1.0, "x"]]), r"tasks=\[\[1.0, 'x'\]\]; expected text, a list "),
        (
            lambda run: metaloom.evaluate(run, episodes=np.True_),
            "episodes=.*True.*; expected an integer >= 1",
        ),
        (
            lambda run: metaloom.video(run, "x.gif", size=(1, 2, 3)),
            "size=.*; expected text or a tuple of 2: an integer",
        ),
        (lambda run: metaloom.sweep("sac", grid={"seed": 3}), "grid={'seed': 3}; expected .* or a mapping$"),
        (lambda run: metaloom.optimize(run, 0, overrides="seed=2"), r"; write overrides=\['seed=2'\]$"),
        (
            lambda run: metaloom.reference.add(run, learners=0),
            "add: got learners=0; expected an integer >= 1",
        ),
    ],
)
def test_an_argument_that_its_annotation_does_not_allow_is_refused_with_what_is_required(call, found, tmp_path):
    with pytest.raises(UsageError, match=found):
        call(tmp_path / "run")


@pytest.mark.parametrize("operation", [*WRITTEN, *REFERENCE], ids=lambda it: it.run)
def test_the_arguments_of_every_operation_are_checked_and_its_signature_and_docstring_kept(operation):
    written = operation.function.__wrapped__
    assert inspect.signature(operation.function) == inspect.signature(written)
    assert operation.function.__doc__ == written.__doc__


def test_a_missing_or_unknown_argument_is_the_error_that_python_raises_itself():
    with pytest.raises(TypeError, match=r"diff\(\) missing 1 required positional argument: 'run_b'"):
        metaloom.diff("first")
    with pytest.raises(TypeError, match=r"ls\(\) got an unexpected keyword argument 'limits'"):
        metaloom.ls(limits=2)


def test_arrays_and_numbers_of_numpy_are_lists_and_numbers(copy_tiny_run, tmp_path):
    run = copy_tiny_run(tmp_path / "run")
    tasks = np.asarray(metaloom.open_run(run)[0].tasks().params)
    outcome = metaloom.evaluate(run, np.int64(1), tasks=tasks, test_episodes=np.int32(1))
    assert (outcome.updates, len(outcome.tasks)) == (1, len(tasks))


def test_an_iteration_counts_from_the_end_as_it_does_behind_an_at(copy_tiny_run, tmp_path):
    run = copy_tiny_run(tmp_path / "run")
    assert metaloom.show(run, -1) == metaloom.show(f"{run}@-1") == metaloom.show(run, len(metaloom.open_run(run)) - 1)
    assert metaloom.optimize(run, -1).ref == metaloom.optimize(f"{run}@latest").ref
    with pytest.raises(UsageError, match=r"@-9: \d iterations complete; expected at least 9"):
        metaloom.show(run, -9)


def test_a_flow_takes_required_parameters_after_those_with_defaults():
    form = parameter_schema(make_flow(operations()["policy"]))
    assert {*form.required} == {"run", "out"}
