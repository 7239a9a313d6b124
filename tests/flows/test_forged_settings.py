"""Runs whose run.json says something else than their outputs: every command explains that in one line."""

import json
import shutil
from pathlib import Path

import pytest
from forging import forge

from metaloom.flows import cli

READ = (
    "verify forged", "ls", "du forged", "show forged", "show forged@0", "diff forged good", "diff good forged",
    "compare forged good", "export forged --to parquet --out parquet", "thin forged --keep-last 1 --dry-run",
)  # fmt: skip
COMPUTE = (
    "show forged@0 --stage process_samples", "policy forged --out policy.safetensors", "graph forged",
    "replay forged@0 --workers 0", "evaluate forged --workers 0", "optimize forged@0", "fork forged@1 --run mine",
    "report forged --static",
)  # fmt: skip


def put(*keys, value):
    def change(document):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


def renamed(name):
    return lambda info: next(s for s in info["stages"] if s["name"] == name).update(name="other")


def regrouped(info):
    next(s for s in info["stages"] if s["name"] == "collect_rollouts").update(group="other")


FORGERIES = {
    "sizes": put("config", "policy", "hidden_sizes", value=[7]),
    "first stage": renamed("initialize"),
    "inner stage": renamed("adapt"),
    "last stage": renamed("meta_optimize"),
    "group": regrouped,
    "algorithm": put("config", "algorithm", value="promp"),
    "no algorithm": lambda info: info["config"].pop("algorithm"),
    "components": put("environment", "components", value={"observation": [1], "action": {"names": [1], "units": []}}),
    "seed": put("config", "seed", value="a"),
    "ancestors": put("ancestors", value=[{"x": 1}]),
}


@pytest.fixture
def runs(copy_tiny_run, tmp_path, monkeypatch):
    """A folder with a run and another one to forge."""
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    copy_tiny_run(tmp_path / "runs" / "good")
    shutil.copytree("runs/good", "runs/forged")
    return tmp_path / "runs"


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("forgery", FORGERIES)
def test_every_command_explains_settings_that_are_not_those_of_the_outputs(forgery, capsys):
    forge(Path("runs/forged"), FORGERIES[forgery])
    computing = COMPUTE if forgery in ("sizes", "last stage", "no algorithm") else ()
    refusals = [explained(words, capsys) for words in (*READ, *computing)]
    assert any(refusals) or forgery == "components"  # which are not shown where they are none


@pytest.mark.usefixtures("runs")
def test_other_numbers_of_tasks_or_inner_steps_are_explained_where_a_run_computes(capsys):
    forge(Path("runs/forged"), put("config", "num_tasks", value=5))
    assert cli.run(["replay", "forged@0", "--workers", "0", "--json"]) == 1
    stages = json.loads(capsys.readouterr().out)
    assert [stage["stage"] for stage in stages if not stage["identical"]] == ["sample_tasks"]
    assert "expected shape (" in explained("resume forged --iterations 4 --workers 0", capsys)
    shutil.rmtree("runs/forged")
    shutil.copytree("runs/good", "runs/forged")
    forge(Path("runs/forged"), put("config", "algorithm", "inner_steps", value=2))
    assert "extra.inner_kl_coeff" in explained("resume forged --iterations 4 --workers 0", capsys)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("forgery", ["first stage", "inner stage", "last stage"])
def test_a_packed_run_with_a_renamed_stage_is_explained_and_not_taken_apart(forgery, capsys):
    assert cli.run(["pack", "forged"]) == 0
    (segment,) = Path("runs/forged/_segments").iterdir()
    forge(Path("runs/forged"), FORGERIES[forgery])
    assert "no stage " in explained("resume forged --repair --workers 0", capsys)
    assert cli.run(["verify", "forged"]) == 1
    assert "; the stages are " in capsys.readouterr().out
    assert (segment / "seal.json").exists()


def explained(words, capsys):
    """Run a command, which raises what nothing explains, and return the refusal, "" if there was none."""
    capsys.readouterr()
    code, said = cli.run(words.split()), capsys.readouterr()
    if not code or said.out:
        return ""
    *logged, line = said.err.splitlines()
    assert line.startswith("metaloom: "), (words, said)
    assert not any(text.startswith("Traceback") for text in logged)
    return line
