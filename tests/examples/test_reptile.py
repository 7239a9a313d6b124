"""An algorithm outside of the package does all that one inside does; nothing of Metaloom knows it."""

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from metaloom import storage
from metaloom.flows.cli import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "reptile"
SMALL = [
    "iterations=2",
    "num_tasks=2",
    "episodes_per_task=2",
    "max_episode_steps=5",
    "policy.hidden_sizes=[4]",
    "env.options.reward=dense",
]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example as pip installs it: the module, and its entry points, on the path."""
    shutil.copy(EXAMPLE / "my_algos.py", tmp_path)
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "my_algos-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    points = (
        f"[{group}]\n" + "\n".join(f"{name} = {place}" for name, place in named.items()) for group, named in groups
    )
    (info / "entry_points.txt").write_text("\n".join(points))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_algos", None)


def command(*tokens: str) -> None:
    assert run(tokens) == 0, tokens


def train(recipe: str, name: str, *changes: str) -> storage.Run:
    assignments = [token for change in (*SMALL, *changes) for token in ("--set", change)]
    command("train", recipe, "--run", name, "--workers", "0", *assignments)
    return storage.open_run(Path("runs") / name)


def test_it_is_written_in_at_most_60_lines():
    assert len((EXAMPLE / "my_algos.py").read_text().splitlines()) <= 60


@pytest.mark.usefixtures("installed")
def test_it_trains_resumes_replays_forks_and_is_evaluated(capsys):
    run = train("reptile-point-corner", "first")
    command("resume", "first", "--iterations", "3", "--workers", "0")
    assert len(storage.open_run(run.path).iterations) == 3
    assert run.config["algorithm"]["name"] == "my_algos:Reptile"
    capsys.readouterr()
    command("replay", "first")
    assert "all identical" in capsys.readouterr().out
    command("fork", "first@1", "--run", "second", "--set", "algorithm.outer_lr=0.1")
    command("resume", "second", "--workers", "0")
    command("evaluate", "first", "--workers", "0")
    metrics = storage.open_run(run.path).metrics().to_pandas()
    assert (metrics["step_length"] > 0).all()


@pytest.mark.usefixtures("installed")
def test_any_recipe_takes_it_by_its_path_and_by_its_name():
    by_path = train("promp-point-corner", "path", "algorithm=my_algos:Reptile")
    by_name = train("promp-point-corner", "name", "algorithm=reptile", "algorithm.inner_lr=0.2")
    assert [run.config["algorithm"]["name"] for run in (by_path, by_name)] == ["my_algos:Reptile", "reptile"]


@pytest.mark.usefixtures("installed")
def test_it_is_listed_beside_the_built_in_ones(capsys):
    command("recipes")
    assert "reptile-point-corner" in capsys.readouterr().out
    code = "from metaloom.flows.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--help"], capture_output=True, text=True, check=True, env=os.environ
    )
    assert "reptile-point-corner" in done.stdout


def test_a_replay_says_that_its_file_has_changed(installed, caplog):
    run = train("reptile-point-corner", "first")
    assert {*run.info["environment"]["plugins"]} == {"my_algos:Reptile", "my_algos:ReptileLearner"}
    command("replay", "first@0", "--stage", "adapt")
    assert caplog.messages == []
    with (installed / "my_algos.py").open("a") as file:
        file.write("# changed\n")
    importlib.reload(sys.modules["my_algos"])
    command("replay", "first@0", "--stage", "adapt")
    (told,) = caplog.messages
    assert "the source of my_algos:Reptile, my_algos:ReptileLearner had the SHA-256" in told
