"""What certainly cannot fit is refused before a run is created; a dry run measures the rest."""

import json
import resource
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import metaloom.flows.commands.dry_run
import metaloom.flows.estimate
import metaloom.flows.views.report
from metaloom.flows.cli import run as main
from metaloom.flows.commands.dry_run import DryRun, Probe, dry_run
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.train import resume, train
from metaloom.flows.estimate import check_sizes, refusal_of
from metaloom.flows.formatting import size
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.recipes import new_config
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.usage import Sample, UsageSampler, kept_usage, most_memory, read_usage
from metaloom.flows.views.report import write_report
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.schema import ConfigError
from metaloom.storage import Run, verify_run

pytestmark = pytest.mark.usefixtures("warm")

HERE = Backend(workers=0)
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
    "min_steps": ("ppo", "env=Pendulum-v1", "min_steps=1000000000000", "episodes_per_task=1000000000"),
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
    "policy.network_options": ("rl2-tabular-mdp", "policy.network_options={key_size: 1000000, value_size: 1000000}"),
    # The environment has options, which are no settings of the run's own.
    "with max_episode_steps=10{14},": ("rl2-bandit", "max_episode_steps=100000000000000"),
    "algorithm.encoder_size": ("varibad-half-cheetah-dir", "algorithm.encoder_size=1000000"),
    "algorithm.decoder_layers": ("varibad-half-cheetah-dir", "algorithm.decoder_layers=[1000000, 1000000]"),
}
OWN_NETWORKS = """
import torch

class Huge(torch.nn.Sequential):
    def __init__(self, input_shape, output_size):
        super().__init__(torch.nn.Linear(input_shape[0], 10**6), torch.nn.Linear(10**6, 10**6),
                         torch.nn.Linear(10**6, output_size))
"""
ENDLESS = {
    "algorithm.num_epochs": ("promp-point-corner", "algorithm.num_epochs=1000000000"),
    "algorithm.elbo_steps": ("varibad-half-cheetah-dir", "algorithm.elbo_steps=1000000000"),
    "baseline.num_epochs": (
        "promp-point-corner",
        "baseline={name: value_network, num_epochs: 1000000000}",
    ),
    "algorithm.cg_iterations": ("rl2-trpo-bandit", "algorithm.cg_iterations=1000000000"),
}


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


@pytest.mark.parametrize("setting", ENDLESS)
def test_passes_that_cannot_end_are_refused_by_their_setting(setting: str) -> None:
    recipe, *settings = ENDLESS[setting]
    with pytest.raises(ConfigError, match=rf"{setting}.*less than or equal to 1000000"):
        new_config(recipe, settings)


def test_the_number_that_is_said_to_fit_fits_and_the_next_one_does_not() -> None:
    def refusal(num_tasks: int) -> str | None:
        return refusal_of(new_config("promp-point-corner", (f"num_tasks={num_tasks}",)))

    most = int((refusal(10**9) or "").split("use at most ")[1])
    assert refusal(most) is None
    assert (refusal(most + 1) or "").startswith(f"with num_tasks={most + 1}, the episodes of an iteration")


def test_episodes_that_may_end_early_count_by_the_steps_that_are_asked_for() -> None:
    # A limit of steps that an episode hardly ever reaches takes no memory where sampling ends at a number of steps.
    assert refusal_of(new_config("ppo", ("env=Pendulum-v1", "min_steps=4000", "max_episode_steps=100000"))) is None
    refused = refusal_of(new_config("ppo", ("env=Pendulum-v1", "min_steps=1000000000000")))
    assert refused is not None
    assert refused.startswith("with min_steps=1000000000000")


def test_resuming_forking_and_evaluating_refuse_what_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = new_config("promp-point-corner", ("iterations=1", "num_tasks=2", "episodes_per_task=2"))
    train(config, tmp_path / "run", backend=HERE)
    with pytest.raises(ConfigError, match=r"evaluation\.adaptation_steps=1000000000"):
        evaluate(tmp_path / "run", adaptation_steps=10**9, num_tasks=2)
    with pytest.raises(ConfigError, match=r"num_tasks=1000000000"):
        fork(tmp_path / "run", 1, tmp_path / "fork", ("num_tasks=1000000000",))
    assert not (tmp_path / "fork").exists()
    monkeypatch.setattr(metaloom.flows.estimate, "machine_memory", lambda: 10_000)
    with pytest.raises(ConfigError, match=r"use at most \d+"):
        resume(tmp_path / "run", iterations=2, backend=HERE)
    monkeypatch.undo()
    resume(tmp_path / "run", iterations=2, backend=HERE)


def test_what_takes_half_of_the_memory_is_warned_of_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = new_config("promp-point-corner", ("num_tasks=2",))
    check_sizes(config)
    assert not caplog.messages
    bytes_of_episodes = 2 * 2 * 20 * 100 * 4 * (2 + 2 + 1)
    monkeypatch.setattr(metaloom.flows.estimate, "machine_memory", lambda: int(1.5 * bytes_of_episodes))
    check_sizes(config)
    assert caplog.messages == [
        "the episodes of an iteration take at least 160 kB of this machine's 240 kB of memory",
    ]


def test_a_dry_run_prints_what_it_counts_and_measures_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    arguments = ["train", "promp-point-corner", "--dry-run", "--set", "iterations=3", "--set", "num_tasks=2"]
    assert main([*arguments, "--workers", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("not measured; use --probe") == 3
    reported: list[int] = []

    def write(run: Run, out: Path) -> None:
        reported.append(len(run.iterations))
        write_report(run, out)

    monkeypatch.setattr(metaloom.flows.views.report, "write_report", write)
    assert main([*arguments, "--workers", "0", "--probe", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 2 * 20 * 100 * 2
    probe = found["probe"]
    assert (found["workers"], probe["worker_bytes"]) == (0, 0)
    assert found["run_seconds"] == probe["sample"]["first_seconds"] + 2 * probe["sample"]["iteration_seconds"] > 0
    assert probe["trainer_bytes"] > 10**8
    assert reported == [3]  # a real run writes one too, and its charts take memory
    assert not (tmp_path / "runs").exists()
    config = new_config("promp-point-corner", ("iterations=3", "num_tasks=2"))
    train(config, tmp_path / "run", backend=HERE)
    stored = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert found["run_bytes"] == pytest.approx(stored, rel=0.1)
    assert main(["train", "promp-point-corner", "--probe"]) == 2


@pytest.mark.parametrize(
    ("backend", "workers"), [(Backend(), 2), (Backend(workers=3), 3), (Backend(scheduler="tcp://127.0.0.1:1"), 0)]
)
def test_a_dry_run_counts_the_workers_of_this_machine(backend: Backend, workers: int, tmp_path: Path) -> None:
    assert dry_run(new_config("promp-point-corner", ()), tmp_path / "run", backend).workers == workers


@pytest.mark.parametrize(
    ("seconds", "iterations", "measured"),
    [(1.0, 10, True), (2.5, 9, True), (15.0, 2, True), (120.0, 2, True), (121.0, 1, False)],
)
def test_a_probe_takes_ten_iterations_or_those_of_20_seconds_but_two_if_they_take_two_minutes(
    seconds: float, iterations: int, measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sampler:
        iterations = 0

        def add(self, run: None, report: None) -> None:
            self.iterations += 1

        def sample(self, run: None) -> Sample:
            return SAMPLE

    now, trained = [1000.0], list[int]()

    def train(config: RunConfig, path: Path, *, backend: Backend, observer: Observer) -> None:
        assert path.parent.stat().st_mode & 0o777 == 0o700
        for iteration in range(config.iterations):
            trained.append(iteration)
            now[0] += seconds
            observer.iteration_done(None)
            if observer.should_stop():
                break

    module = metaloom.flows.commands.dry_run
    for name, value in (
        ("time", SimpleNamespace(monotonic=lambda: now[0])),
        ("storage", SimpleNamespace(check_new_run=print, open_run=lambda path: None)),
        ("UsageSampler", Sampler),
        ("train", train),
        ("find_spec", lambda name: None),
    ):
        monkeypatch.setattr(module, name, value)
    found = dry_run(new_config("promp-point-corner", ()), tmp_path / "run", HERE, probe=True)
    assert trained == [*range(iterations)]
    assert found.probe is not None
    assert found.probe.sample == (SAMPLE if measured else None)


SAMPLE = Sample(3, 0, 5.0, 2.0, 10**6, array_bytes=10**6, table_bytes=10**6, record_bytes=10**6, log_bytes=0)


def test_people_are_shown_what_an_iteration_takes_and_what_the_whole_run_does() -> None:
    found = DryRun(4, 2, 1000, 8 * 10**9, 10**12, Probe(10**9, 2 * 10**9, SAMPLE))
    rows = {row[0]: row[1:] for row in zip(*(column._cells for column in found.table().columns), strict=True)}
    assert rows == {
        "environment steps, at most": ("1 k", "4 k", ""),
        "memory, trainer": (size(10**9), "", size(8 * 10**9)),
        "memory, workers": (f"2 workers of {size(2 * 10**9)}", "", ""),
        "disk": (size(3 * 10**6), size(13 * 10**6), f"{size(10**12)} free"),
        "time": ("2 s", "0:00:11", ""),
    }
    unknown = DryRun(4, 0, 1000, 8 * 10**9, 10**12, Probe(10**9, 0, None)).table().columns[1]._cells
    assert [*unknown][2:] == ["none", "longer than the probe", "longer than the probe"]


def test_a_run_keeps_what_its_first_iterations_predicted_and_what_all_of_its_sessions_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))

    def show() -> dict[str, dict[str, float]] | None:
        capsys.readouterr()
        assert main(["show", "run", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["usage"]

    train(new_config("promp-point-corner", ("iterations=6", "num_tasks=2")), tmp_path / "run", backend=HERE)
    first = show()
    assert first is not None
    assert first["predicted"]["after_iterations"] == 3
    assert first["predicted"]["disk_bytes"] == pytest.approx(first["taken"]["disk_bytes"], rel=0.1)
    assert 10**8 < first["predicted"]["memory_bytes"] <= first["taken"]["memory_bytes"]
    resume(tmp_path / "run", iterations=8, backend=HERE)
    second = show()
    assert second is not None
    assert second["taken"]["seconds"] > first["taken"]["seconds"] > 0
    assert second["predicted"]["seconds"] > first["predicted"]["seconds"]  # of eight iterations, by the same three
    assert main(["show", "run"]) == 0
    assert "in brackets, the prediction made after 3 iterations" in " ".join(capsys.readouterr().out.split())
    usage = tmp_path / "run" / "_operator" / "usage.json"
    usage.write_text(usage.read_text().replace("sample", "x"))
    assert show() is None  # it is no part of the run, and whoever can write there may have put anything
    assert verify_run(tmp_path / "run") == []


def test_the_memory_that_packing_needs_counts_in_what_the_first_iterations_of_a_long_run_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = "metaloom.storage.write.packed_tables"
    train(new_config("promp-point-corner", ("iterations=1", "num_tasks=2")), tmp_path / "run", backend=HERE)
    for iterations, loaded in ((599, False), (600, True)):
        monkeypatch.delitem(sys.modules, tables, raising=False)
        with kept_usage(Run.open(tmp_path / "run"), iterations, Observer()):
            assert (tables in sys.modules) is loaded


def test_iterations_that_will_be_packed_are_predicted_without_their_tables_and_with_smaller_records() -> None:
    sample = Sample(3, 0, 1.0, 1.0, 7, array_bytes=100, table_bytes=10, record_bytes=60, log_bytes=0)
    assert sample.disk_bytes(599) == 7 + 599 * 170
    assert sample.disk_bytes(600) == 7 + 500 * (100 + 10) + 100 * 170
    assert replace(sample, log_bytes=10).disk_bytes(599) == 7 + 599 * 180
    # Of a log, the last five files of a megabyte are kept.
    assert replace(sample, log_bytes=10**6).disk_bytes(599) == 7 + 599 * 170 + 5 * 10**6


def test_what_an_iteration_takes_is_measured_from_the_second_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(iterations: int) -> Any:
        sizes = {"data.zarr/a": 1000, "data.zarr/b/c": 500, "tables/t": 100, "_operator/log": 10, "records/r": 60}
        files = {path: iterations * size for path, size in sizes.items()} | {"run.json": 7}
        return SimpleNamespace(files=SimpleNamespace(sizes=lambda: files))

    monkeypatch.setattr("metaloom.flows.usage.most_memory", lambda who: 99)
    sampler = UsageSampler()
    for iteration, elapsed in ((4, 5.0), (5, 7.0), (6, 10.0), (7, 12.0)):  # a resumed run
        sampler.add(stored(iteration + 1), IterationReport(iteration, 9, {}, {}, elapsed, None))
        assert sampler.iterations == iteration - 3
    assert sampler.sample(stored(8)) == Sample(4, 99, 5.0, 2.0, 7, 1500, 100, 60, 10)
    sampler, nothing = UsageSampler(), SimpleNamespace(files=SimpleNamespace(sizes=lambda: {"run.json": 7}))
    for iteration in range(2):
        sampler.add(cast(Run, nothing), IterationReport(iteration, 9, {}, {}, 3.0, None))
    assert sampler.sample(cast(Run, nothing)) == Sample(2, 99, 3.0, 0.0, 7, 0, 0, 0, 0)


@pytest.mark.parametrize(("iterations", "measured"), [(2, 2), (4, 2), (6, 3), (40, 10)])
def test_usage_is_predicted_after_half_of_the_iterations_but_two_to_ten_and_time_adds_up_over_sessions(
    iterations: int, measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    (tmp_path / "_operator").mkdir()
    monkeypatch.setattr("metaloom.flows.usage.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("metaloom.flows.usage.operator_folder", lambda run: run / "_operator")
    run: Any = SimpleNamespace(path=tmp_path, files=SimpleNamespace(sizes=dict))
    for session in (1, 2):
        with kept_usage(run, iterations, Observer()) as observer:
            for iteration in range(iterations):
                now[0] += 2
                observer.iteration_done(IterationReport(iteration, iterations, {}, {}, 2.0 * iteration, None))
        usage = read_usage(tmp_path)
        assert usage is not None
        assert usage.sample is not None
        assert (usage.sample.iterations, usage.seconds) == (measured, 2 * iterations * session)


def test_the_most_memory_is_told_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss={7: 1000}[who]))
    assert most_memory(7) == 1_024_000


@pytest.mark.parametrize(
    ("recipe", "settings", "told"),
    [
        # Four tasks with 3 episodes before and after two inner steps, of 10 steps of 20 bytes.
        ("promp-point-corner", ("num_tasks=4", "episodes_per_task=3", "algorithm.inner_steps=2"), "episodes 7.2 kB"),
        # An index of 8 bytes for each of 10 updates by the 256 transitions of a minibatch.
        ("sac-pendulum", ("algorithm.num_init_memory_steps=300",), "rows 20.5 kB"),
        # 600 steps at least before any update, of three observations, an action and a reward.
        ("sac-pendulum", ("algorithm.num_init_memory_steps=600", "algorithm.batch_size=5"), "episodes 12 kB"),
        # 4,000 steps in blocks of episodes.
        ("ppo", ("env=Pendulum-v1", "min_steps=4000"), "episodes 80 kB"),
        # The state of 64 numbers of each of two episodes at once.
        ("rl2-bandit", ("num_tasks=1", "episodes_per_task=2", "policy.hidden_sizes=[64]"), "memory 512 B"),
    ],
)
def test_an_iteration_needs_its_episodes_its_minibatches_and_the_memory_of_its_policy(
    recipe: str, settings: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metaloom.flows.estimate, "machine_memory", lambda: 10)
    refused = refusal_of(new_config(recipe, ("max_episode_steps=10", *settings))) or ""
    names = {
        "episodes": "the episodes of an iteration",
        "rows": "the rows drawn in an iteration",
        "memory": "the policy's memory during sampling",
    }
    name, _, size = told.partition(" ")
    assert f"{names[name]} need at least {size} of memory" in refused


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        # Three tasks with 7 test episodes at once, of 100 steps with two observations, two actions and a reward.
        (("episodes=5", "test_episodes=7", "adaptation_steps=2"), "the episodes of an evaluation need at least 42 kB"),
        (("episodes=7", "test_episodes=5", "adaptation_steps=2"), "the episodes of an evaluation need at least 42 kB"),
        (("episodes=7", "test_episodes=5", "adaptation_steps=0"), "the episodes of an evaluation need at least 30 kB"),
        # Three tasks with five tests of 40 episodes and four adaptations of 30, of which one number each is kept.
        (
            ("episodes=30", "test_episodes=40", "adaptation_steps=4"),
            "the returns of an evaluation need at least 7.68 kB",
        ),
    ],
)
def test_an_evaluation_alone_needs_its_episodes_and_its_returns(
    settings: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 1 if "returns" in told else 100
    sizes = (f"max_episode_steps={steps}", *(f"evaluation.{one}" for one in ("num_tasks=3", *settings)))
    monkeypatch.setattr(metaloom.flows.estimate, "machine_memory", lambda: 10)
    refused = refusal_of(new_config("promp-point-corner", sizes), evaluation_alone=True)
    assert told in (refused or "")


def test_a_dry_run_of_what_cannot_fit_prints_counts_and_then_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    arguments = ["train", "promp-point-corner", "--dry-run", "--probe", "--set", "num_tasks=1000000000"]
    assert main([*arguments, "--workers", "0"]) == 2
    output = capsys.readouterr()
    assert "environment steps" in output.out
    assert output.err.startswith("metaloom: with num_tasks=1000000000, the episodes of an iteration need ")
    assert output.err.count("metaloom: ") == 1  # it does not go on to train
    assert main([*arguments, "--workers", "0", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["refusal"].startswith("with num_tasks=1000000000")
    assert found["probe"] is None
