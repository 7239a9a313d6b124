"""Sizes of a run are known before it is created: what is estimated, what real runs take, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from metaloom.flows.cli import run as main
from metaloom.flows.commands.evaluate import evaluate
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.train import resume, train
from metaloom.flows.estimate import limits
from metaloom.flows.estimate.forms import Forms
from metaloom.flows.estimate.sizes import TORCH_BYTES, estimate
from metaloom.flows.recipes import new_config
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.schema import ConfigError

HERE = Backend(workers=0)
FAMILIES = {
    "promp": ("promp-point-corner", "env.options={reward: dense}", "num_tasks=4", "policy.hidden_sizes=[32]"),
    "dice": ("vpg-dice-point-corner", "env.options={reward: dense}", "num_tasks=4", "episodes_per_task=20"),
    "ppo": ("ppo", "env=Pendulum-v1", "min_steps=4000", "episodes_per_task=40", "max_episode_steps=200"),
    "sac": (
        "sac-pendulum",
        "algorithm.num_init_memory_steps=2000",
        "algorithm.num_updates_per_step=4",
        "algorithm.critic_hidden_sizes=[300, 300]",
    ),
    "pearl": (
        "pearl-point-robot",
        "algorithm.num_updates=4",
        "algorithm.num_initial_steps=100",
        "algorithm.critic_hidden_sizes=[100]",
    ),
    "varibad": ("varibad-half-cheetah-dir", "env=navigation-2d", "num_tasks=8", "algorithm.decoded_steps=null"),
    "rl2": ("rl2-tabular-mdp", "num_tasks=20", "max_episode_steps=60", "algorithm.num_epochs=1"),
    "rl2-trpo": ("rl2-trpo-bandit", "num_tasks=200", "max_episode_steps=100", "algorithm.cg_iterations=2"),
    "own network": (
        "promp-point-corner",
        "env.options={reward: dense}",
        "num_tasks=4",
        "policy.network=own_networks_of_estimates:Wide",
    ),
}
HUGE = {
    "max_episode_steps": ("promp-point-corner", "max_episode_steps=100000000000000"),
    "hidden_sizes": ("promp-point-corner", "policy.hidden_sizes=[1000000, 1000000]"),
    "num_tasks": ("promp-point-corner", "num_tasks=1000000000"),
    "inner steps": ("promp-point-corner", "algorithm.inner_steps=1000000000"),
    "evaluation.adaptation_steps": (
        "promp-point-corner",
        "evaluation.adaptation_steps=1000000000",
        "evaluation.every=1",
    ),
    "iterations": ("promp-point-corner", "iterations=100000000"),
    "episodes_per_task": ("ppo", "env=Pendulum-v1", "min_steps=1000000000000", "episodes_per_task=1000000000"),
    "algorithm.memory_size": (
        "sac-pendulum",
        "algorithm.memory_size=1000000000000",
        "algorithm.num_init_memory_steps=1000000000000",
    ),
    "algorithm.num_updates_per_step": ("dql", "algorithm.num_updates_per_step=1000000000000"),
    "network q1": ("pearl-point-robot", "algorithm.critic_hidden_sizes=[1000000, 1000000]"),
    "algorithm.num_updates": ("pearl-point-robot", "algorithm.num_updates=1000000000000"),
    "num_extra_rl_steps_posterior": (
        "pearl-point-robot",
        "algorithm.num_extra_rl_steps_posterior=1000000000000",
    ),
    "policy.network": ("promp-point-corner", "policy.network=own_networks_of_estimates:Huge"),
    "algorithm.elbo_steps": ("varibad-half-cheetah-dir", "algorithm.elbo_steps=1000000000"),
    "policy.network_options": ("rl2-tabular-mdp", "policy.network_options={key_size: 1000000, value_size: 1000000}"),
    # The environment has options, which are no settings of the run's own.
    "max_episode_steps: found 10{14}": ("rl2-bandit", "max_episode_steps=100000000000000"),
    "algorithm.encoder_size": ("varibad-half-cheetah-dir", "algorithm.encoder_size=1000000"),
    "algorithm.decoder_layers": ("varibad-half-cheetah-dir", "algorithm.decoder_layers=[1000000, 1000000]"),
}
OWN_NETWORKS = """
import torch

class Wide(torch.nn.Sequential):
    def __init__(self, input_shape, output_size):
        super().__init__(torch.nn.Linear(input_shape[0], 200), torch.nn.Tanh(), torch.nn.Linear(200, output_size))

class Huge(torch.nn.Sequential):
    def __init__(self, input_shape, output_size):
        super().__init__(torch.nn.Linear(input_shape[0], 10**6), torch.nn.Linear(10**6, 10**6),
                         torch.nn.Linear(10**6, output_size))
"""
MEASURE = """
import sys
from pathlib import Path
from metaloom.flows.commands.train import train
from metaloom.flows.recipes import new_config
from metaloom.flows.rollouts.workers import Backend
recipe, folder, *settings = sys.argv[1:]
train(new_config(recipe, settings), Path(folder), backend=Backend(workers=0))
(line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(line.split()[1]) * 1024)  # ru_maxrss would begin with what pytest has had
"""


@pytest.fixture(autouse=True)
def own_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "own_networks_of_estimates.py").write_text(OWN_NETWORKS)
    monkeypatch.delitem(sys.modules, "own_networks_of_estimates", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize("setting", HUGE)
def test_what_cannot_fit_is_refused_by_its_setting_before_anything_is_created(setting: str, tmp_path: Path) -> None:
    recipe, *settings = HUGE[setting]
    with pytest.raises(ConfigError, match=setting):
        train(new_config(recipe, settings), tmp_path / "run", backend=HERE)
    assert not (tmp_path / "run").exists()


def test_the_number_that_is_said_to_fit_fits_and_the_next_one_does_not(tmp_path: Path) -> None:
    settings = ("iterations=1", "num_tasks=100000000")
    with pytest.raises(ConfigError, match=r"required at most (\d+)") as refused:
        train(new_config("promp-point-corner", settings), tmp_path / "run", backend=HERE)
    most = int(str(refused.value).split("required at most ")[1].split(",")[0])
    forms, machine = Forms.of(new_config("promp-point-corner", settings)), limits.Machine.here(tmp_path)
    sized = [estimate(new_config("promp-point-corner", ("iterations=1", f"num_tasks={n}")), forms) for n in
             (most - most // 100, most + most // 100)]  # fmt: skip
    assert [machine.excess(found) > 1 for found in sized] == [False, True]


def test_an_evaluation_of_one_task_per_class_is_counted_so() -> None:
    settings = [
        "evaluation.adaptation_steps=2",
        "episodes_per_task=4",
        "max_episode_steps=7",
        "evaluation.every=1",
        "evaluation.test_episodes=3",
        "evaluation.tasks=[[-2, -2], [-2, 2], [-2, 1]]",
    ]

    def steps(*more: str) -> int:
        config = new_config("promp-point-corner", [*settings, *more])
        return estimate(config, Forms.of(config)).evaluation_steps

    a_task = 7 * (2 * 4 + 3 * 3)
    assert steps() == 3 * a_task
    assert steps("evaluation.evenly_by=goal_x") == a_task
    assert steps("evaluation.evenly_by=goal_x", "evaluation.num_tasks=2") == 2 * a_task


def test_resuming_forking_and_evaluating_refuse_what_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = new_config("promp-point-corner", ("iterations=1", "num_tasks=2", "episodes_per_task=2"))
    train(config, tmp_path / "run", backend=HERE)
    with pytest.raises(ConfigError, match=r"evaluation\.adaptation_steps: found 1000000000"):
        evaluate(tmp_path / "run", adaptation_steps=10**9, num_tasks=2)
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**6))
    with pytest.raises(ConfigError, match=r"iterations: found 10000, .* 1 MB are free"):
        resume(tmp_path / "run", iterations=10_000, backend=HERE)
    with pytest.raises(ConfigError, match=r"iterations: found 10000, .* 1 MB are free"):
        fork(tmp_path / "run", 1, tmp_path / "fork", ("iterations=10000",))
    assert not (tmp_path / "fork").exists()
    resume(tmp_path / "run", iterations=2, backend=HERE)


def test_a_budget_of_bytes_begins_what_the_disk_could_not_hold_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**7))
    config = new_config("promp-point-corner", ("iterations=100000", "num_tasks=2", "retention.max_bytes=1000000"))
    limits.check_sizes(config, tmp_path, HERE)
    with pytest.raises(ConfigError, match=r"retention\.max_bytes to stop in time"):
        limits.check_sizes(new_config("promp-point-corner", ("iterations=100000", "num_tasks=2")), tmp_path, HERE)


def test_what_is_large_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = new_config("promp-point-corner", ("iterations=1", "num_tasks=2"))
    limits.check_sizes(config, tmp_path, HERE)
    assert not caplog.messages
    found = estimate(config, Forms.of(config))
    monkeypatch.setattr(limits, "machine_memory", lambda: int(1.5 * found.memory_bytes))
    limits.check_sizes(config, tmp_path, HERE)
    (line,) = caplog.messages
    assert line.startswith("this run is large: up to ")
    assert "\n" not in line


def test_a_dry_run_prints_sizes_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    arguments = ["train", "promp-point-corner", "--dry-run", "--set", "iterations=3", "--set", "num_tasks=2"]
    assert main([*arguments, "--workers", "0"]) == 0
    assert "environment steps" in capsys.readouterr().out
    assert main([*arguments, "--workers", "0", "--probe", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 2 * 20 * 100 * 2
    assert found["iteration_seconds"] > 0
    assert found["run_seconds"] == 3 * found["iteration_seconds"]
    assert not (tmp_path / "runs").exists()
    assert main(["train", "promp-point-corner", "--probe"]) == 2


def test_a_dry_run_of_what_cannot_fit_prints_sizes_and_then_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    arguments = ["train", "promp-point-corner", "--dry-run", "--probe", "--set", "num_tasks=1000000000"]
    assert main([*arguments, "--workers", "0"]) == 2
    output = capsys.readouterr()
    assert "environment steps" in output.out
    assert output.err.startswith("metaloom: num_tasks: found 1000000000, with which this run takes up to ")
    assert main([*arguments, "--workers", "0", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["memory_bytes"] > found["machine_memory_bytes"]
    assert found["refusal"].startswith("num_tasks: found 1000000000")
    assert found["iteration_seconds"] is None


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ((), ", or retention.keep_last or retention.keep_every to keep fewer batches, or retention.max_bytes"),
        (("retention.keep_last=90",), ", or a smaller retention.keep_last to keep fewer batches, or retention."),
        (("retention.keep_every=2",), ", or a larger retention.keep_every to keep fewer batches, or retention."),
        (("num_tasks=100000000",), ""),  # too much memory as well
        (("retention.keep_last=0", "iterations=100000"), ", or retention.max_bytes to stop in time"),
    ],
)
def test_what_to_keep_is_advised_only_where_it_makes_the_run_fit(
    settings: tuple[str, ...], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda folder: SimpleNamespace(free=5 * 10**7))
    config = new_config("promp-point-corner", ("iterations=100", *settings))
    with pytest.raises(ConfigError) as refused:
        limits.check_sizes(config, tmp_path, HERE)
    message = str(refused.value)
    assert advice in message
    assert message.count(", or ") == advice.count(", or ")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_disk_that_is_estimated_is_what_a_run_takes_within_a_tenth_or_100_kB(family: str, tmp_path: Path) -> None:
    recipe, *settings = FAMILIES[family]
    config = new_config(recipe, (*settings, "iterations=2"))
    train(config, tmp_path / "run", backend=HERE)
    stored = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    # Beside arrays, a run of such a size is records and tables, and descriptions that are written once.
    assert estimate(config, Forms.of(config, act=True)).run_bytes == pytest.approx(stored, rel=0.1, abs=100_000)


@pytest.mark.parametrize(
    "family", [name if name == "promp" else pytest.param(name, marks=pytest.mark.sweep) for name in FAMILIES]
)
def test_the_memory_that_is_estimated_is_what_a_run_takes_within_half_of_it(family: str, tmp_path: Path) -> None:
    recipe, *settings = FAMILIES[family]
    large = (*settings, "iterations=2", *(["num_tasks=10", "episodes_per_task=80"] if family == "promp" else []))
    command = [sys.executable, "-c", MEASURE, recipe, str(tmp_path / "run"), *large]
    taken = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    config = new_config(recipe, large)
    assert 1 / 1.5 < estimate(config, Forms.of(config)).trainer_bytes / taken < 1.5


def test_workers_that_compute_need_torch_and_hold_their_share_of_an_iteration() -> None:
    config = new_config("promp-half-cheetah-dir", ("iterations=1",))
    forms = Forms.of(config)
    sampling, computing = (estimate(config, forms, 2, computing=computing) for computing in (False, True))
    assert computing.trainer_bytes == sampling.trainer_bytes
    more = computing.worker_bytes - sampling.worker_bytes
    batches = 2 * config.num_tasks * config.episodes_per_task * config.max_episode_steps * (17 + 2 * 6 + 4) * 4
    assert TORCH_BYTES + batches < more < TORCH_BYTES + 6 * batches
