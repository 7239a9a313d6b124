"""The notebooks run from their first cell to the last, and are kept without outputs."""

import ast
import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))

pytestmark = pytest.mark.slow


def cells(notebook: Path) -> list[dict]:
    return [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def displayed(source: str, names: dict[str, object]) -> object:
    """Run a cell; return the value that a notebook would show under it, None after a semicolon."""
    tree = ast.parse(source)
    if not isinstance(tree.body[-1], ast.Expr):
        exec(source, names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "cell", "exec"), names)
    value = eval(compile(ast.Expression(tree.body[-1].value), "cell", "eval"), names)
    return None if source.rstrip().endswith(";") else value


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_what_it_shows_is_small(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("METALOOM_RUNS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    with mpl.rc_context({"backend": "agg"}):
        for cell in cells(notebook):
            value = displayed("".join(cell["source"]), names)
            shown = value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
            assert len(shown) < 10_000, cell["source"]
        plt.close("all")
    if notebook.stem == "debugging_an_iteration":
        assert all(stage.identical for stage in names["stages"])
        assert abs(names["expected"] - names["samples"].returns).max() < 1e-4


def test_a_notebook_can_be_run_again():
    """What trains a run under a name that the notebook fixes would find the run of the first time."""
    for notebook in NOTEBOOKS:
        calls = [
            n
            for cell in cells(notebook)
            for n in ast.walk(ast.parse("".join(cell["source"])))
            if isinstance(n, ast.Call)
        ]
        trained = [call for call in calls if ast.unparse(call.func) == "metaloom.train"]
        assert trained
        assert not any(isinstance(name, ast.Constant) for call in trained for name in call.args[1:])


def test_there_are_three_notebooks_without_outputs():
    assert len(NOTEBOOKS) == 3
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for path in NOTEBOOKS for cell in cells(path))
