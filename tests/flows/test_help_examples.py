"""The example in the help text of every command runs as it stands there; settings files and completion too."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from metaloom import storage
from metaloom.flows import cli, recipes
from metaloom.flows.commands.train import train
from metaloom.flows.prefect_app import serve
from metaloom.flows.recipes import RECIPES, new_config
from metaloom.flows.rollouts import backend
from metaloom.flows.rollouts.backend import Backend
from metaloom.flows.settings import settings_file
from metaloom.flows.viewer import pages
from metaloom.pipeline.config.run import RunConfig

SMALL = {"num_tasks": 2, "episodes_per_task": 2, "max_episode_steps": 4, "policy": {"hidden_sizes": [4]}}
CODES = {"diff": 1}
"""Exit codes other than 0: the two runs of the example differ."""

# Each makes what later ones use.
ORDER = (
    "train", "ls", "show", "watch", "cancel", "logs", "replay", "optimize", "evaluate", "verify", "report", "video",
    "export", "policy", "pack", "thin", "fork", "diff", "compare", "sweep", "reference", "du", "rm", "resume",
    "recipes", "graph", "doctor", "serve", "view",
)  # fmt: skip

THERMOSTAT = """
import gymnasium
import numpy as np


class Thermostat(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-100.0, 100.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, target=20.0):
        self.target = target

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = self.np_random.uniform(0.0, 10.0, 1).astype(np.float32)
        return self.state.copy(), {}

    def step(self, action):
        self.state = (self.state + action).astype(np.float32)
        return self.state.copy(), -abs(float(self.state[0]) - self.target), False, False, {}
"""


def examples(command: str) -> list[str]:
    return re.findall(r"Example: `([^`]+)`", cli.app[command].help)


def split(example: str) -> tuple[dict[str, str], list[str]]:
    """The environment variables before a command, and its words behind `metaloom`."""
    words = shlex.split(example)
    start = words.index("metaloom")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 1 :]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder, in which recipes are small and rollouts run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("METALOOM_RUNS", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(backend, "DEFAULT_WORKERS", 0)
    load = recipes.load_settings
    monkeypatch.setattr(recipes, "load_settings", lambda name: load(name) | SMALL)
    yield tmp_path
    sys.modules.pop("my_envs", None)  # other tests write modules of this name


def test_every_command_has_one_example_of_itself():
    assert {*ORDER} == {*cli.COMMANDS}
    for command in ORDER:
        (example,) = examples(command)
        assert split(example)[1][0] == command


@pytest.mark.slow
def test_the_example_of_every_command_runs(here, monkeypatch, capsys):
    served: list[int] = []
    # tests/flows/test_prefect_serve.py starts it; here nothing would end it.
    monkeypatch.setattr(serve, "serve", lambda folder, port, **options: served.append(port))
    # tests/flows/test_view_gate.py starts this one.
    monkeypatch.setattr(pages, "serve", lambda place, port, tell: served.append(port))
    (here / "my_envs.py").write_text(THERMOSTAT)
    for command in ORDER:
        variables, words = split(examples(command)[0])
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert cli.run(words) == CODES.get(command, 0), (command, capsys.readouterr())
    assert served == [4300, 8080]
    assert (len(storage.open_run("runs/first").iterations), Path("runs/second").exists()) == (40, False)
    assert all(Path(made).exists() for made in ("curve.png", "first-parquet", "first.safetensors"))


def test_every_recipe_comes_back_from_a_file(tmp_path):
    for name in RECIPES:
        config = new_config(name)
        for form in ("yaml", "toml", "json"):
            file = tmp_path / f"{name}.{form}"
            file.write_text(settings_file(config, form), encoding="utf-8")
            again = new_config(str(file))
            assert (again, again.digest()) == (config, config.digest()), file


def test_a_toml_file_trains_the_run_of_its_recipe(here, capsys):
    small = [word for name, value in SMALL.items() if name != "policy" for word in ("--set", f"{name}={value}")]
    small += ["--set", "policy.hidden_sizes=[4]", "--set", "iterations=1"]
    assert cli.run(["recipes", "promp-point-corner", "--format", "toml", *small]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text)["policy"]["hidden_sizes"] == [4]
    Path("mine.toml").write_text(text)
    assert cli.run(["train", "mine.toml", "--run", "first"]) == 0
    train(new_config("promp-point-corner", small[1::2]), here / "direct", backend=Backend(workers=0))
    first, direct = storage.open_run("runs/first"), storage.open_run("direct")
    assert first.info["config_digest"] == direct.info["config_digest"]
    assert {ref: first.record(ref).digest for ref in first.refs()} == {
        ref: direct.record(ref).digest for ref in direct.refs()
    }


def test_what_toml_has_no_words_for_is_refused_and_broken_toml_named(here, capsys):
    config = RunConfig.model_validate({"env": {"name": "x:Y", "options": {"a": [{"b": 1}]}}, "algorithm": "promp"})
    with pytest.raises(ValueError, match="a toml file cannot hold these settings"):
        settings_file(config, "toml")
    assert "a:\n" in settings_file(config, "yaml")
    Path("mine.toml").write_text("env = \n")
    assert cli.run(["train", "mine.toml"]) == 2
    assert "mine.toml as TOML: " in capsys.readouterr().err
    assert cli.run(["recipes", "--format", "toml"]) == 2
    assert "--format requires a recipe" in capsys.readouterr().err


def test_the_shell_completes_commands_runs_and_recipes(tmp_path, copy_tiny_run):
    copy_tiny_run(tmp_path / "runs" / "first")
    metaloom = Path(sys.executable).with_name("metaloom")
    script = tmp_path / "completion.bash"
    script.write_text(cli.app.generate_completion(shell="bash", prog_name="metaloom"))

    def complete(*words: str) -> list[str]:
        line = " ".join(shlex.quote(word) for word in (str(metaloom), *words))
        asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}"
        code = f"source {script}; {asked}; _metaloom; printf '%s\\n' ${{COMPREPLY[@]}}"
        done = subprocess.run(
            ["bash", "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "METALOOM_RUNS": str(tmp_path / "runs")},
        )
        assert done.stderr == ""
        return done.stdout.split()

    assert complete("wat") == ["watch"]
    assert complete("watch", "fi") == ["first"]
    assert complete("rm", "") == ["first"]
    assert "promp-point-corner" in complete("train", "promp-p")
    assert "--since" in complete("ls", "--si")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_installed(shell, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "metaloom.flows.cli", "--install-completion", "--shell", shell],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path), "SHELL": f"/bin/{shell}"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert any("watch" in file.read_text() for file in tmp_path.rglob("*") if file.is_file())


def test_completion_is_offered_for_the_shells_that_are_tried_and_no_other(capsys, monkeypatch):
    assert cli.run(["--install-completion", "--help"]) == 0
    assert "powershell" not in capsys.readouterr().out
    assert cli.run(["--install-completion", "--shell", "powershell"]) == 2
    monkeypatch.setattr("cyclopts.completion.detect.detect_shell", lambda: "powershell")
    assert cli.run(["--install-completion"]) == 2
    assert "pass --shell bash, zsh or fish" in capsys.readouterr().err
