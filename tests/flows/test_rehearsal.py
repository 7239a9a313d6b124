"""The rehearsal before a run and the witness in it: an episode owes nothing to the copy it was played on."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box
from small_envs import Legacy

from metaloom import storage
from metaloom.flows.cli import run as run_command
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.graph.run_stages import config_of
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.observer import IterationReport, Observer, strict
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.rollouts.rehearsal import settled
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views.run_info import output_info
from metaloom.pipeline.config.run import build_config, build_stored
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.rehearsal import Rehearsal, missed_box
from metaloom.stages.faults import StageFault

pytestmark = pytest.mark.usefixtures("warm")

HERE = Backend(workers=0)


@pytest.fixture
def planted(monkeypatch, tmp_path, request):
    folder = str(request.config.rootpath / "tests" / "hostile")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder, prepend=":")

    def build(kind, **settings):
        options = {"kind": kind, "file": str(tmp_path / "file")}
        return EnvConfig.model_validate({"name": "planted_envs:Planted", "options": options, **settings})

    return build


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("counter", "earlier episodes of its copy (observations after reset of episode 2)"),
        ("cache", "earlier episodes of its copy (observations at step 0 of episode 2)"),
        ("generator made once", "4 reset seeds gave the same"),
        ("simulator built once", "earlier episodes of its copy"),
        ("task applied late", "4 tasks gave the same"),
        ("statistics", "earlier episodes of its copy"),
    ],
)
def test_an_environment_whose_copies_remember_gets_a_new_copy_for_every_episode(kind, words, planted):
    found = Rehearsal(planted(kind), 20).find()
    assert found["copies"] == "fresh"
    assert words in "\n".join(found["notes"])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("global generator", "and one stepped alone (observations at step 0 of episode 0), gave different results"),
        ("global generator", "Planted.reset_global_generator, line "),
        ("wall clock", "two new copies (observations at step 0 of episode 0) gave different results"),
        ("file on disk", "two new copies (observations at step 0 of episode 0) gave different results"),
    ],
)
def test_an_environment_whose_new_copies_disagree_is_refused_with_the_step_and_the_array(kind, words, planted):
    assert words in Rehearsal(planted(kind), 20).find()["refusal"]


def test_an_environment_that_depends_on_the_order_of_hashes_is_refused_before_a_run_exists(
    planted, tiny_config, tmp_path
):
    config = tiny_config(env=planted("hash order").model_dump(mode="json", exclude={"copies"}))
    with pytest.raises(EnvError, match=r"planted_envs:Planted: two processes \(in episode 0\) gave different results"):
        train(config, tmp_path / "run", backend=HERE)
    assert not (tmp_path / "run").exists()
    train(tiny_config(env=planted("hash order", copies="kept").model_dump()), tmp_path / "run", backend=HERE)


HONEST = [
    "plain", "no noise", "ends at random", "own generator", "simulator built late", "cache emptied",
    "cache of what is always so", "statistics not shown", "file read", "task in the drift",
]  # fmt: skip


@pytest.mark.parametrize("kind", HONEST)
def test_an_honest_environment_keeps_its_copies_and_hears_nothing(kind, planted):
    found = Rehearsal(planted(kind), 20).find()
    assert (found["copies"], found["notes"]) == ("kept", [])


def test_what_no_rehearsal_can_find_the_witness_of_an_iteration_names_once(
    planted, tiny_config, tmp_path, caplog, capsys
):
    settings = {"env": planted("late counter", action_scale=10).model_dump(exclude={"copies"}), "iterations": 12}
    train(tiny_config(**settings, num_tasks=2, episodes_per_task=2), tmp_path / "run", backend=HERE)
    run = storage.open_run(tmp_path / "run")
    assert run.config["env"]["copies"] == "kept"
    reproduced = [run[i].metrics()["witness_reproduced"] for i in range(12)]
    first = reproduced.index(0)
    assert reproduced == [1] * first + [0] * (12 - first)
    (warning,) = [record.message for record in caplog.records if "when it was replayed" in record.message]
    assert run_command(["show", str(tmp_path / "run")]) == 0
    assert f"12 episodes played again, {first} reproduced bit for bit" in capsys.readouterr().out
    assert f"iteration {first}, k=" in warning
    assert "observations after reset" in warning
    assert "fork with --set env.copies=fresh" in warning
    about = ["--set", "env.options.kind=late counter", "--set", "env.action_scale=10"]
    sizes = [f"--set={size}" for size in ("num_tasks=2", "episodes_per_task=2", "max_episode_steps=5", "iterations=99")]
    where = ["--run", str(tmp_path / "strict"), "--workers", "0", "--strict"]
    assert run_command(["train", "promp", "--set", "env=planted_envs:Planted", *about, *sizes, *where]) == 1
    assert run_command(["train", "promp-point-corner", *where]) == 2  # nothing of it is played again
    stopped = storage.open_run(tmp_path / "strict")
    assert stopped[-1].metrics()["witness_reproduced"] == 0
    assert {stopped[i].metrics()["witness_reproduced"] for i in range(len(stopped) - 1)} == {1}


def test_strict_training_ends_where_the_stages_of_a_run_leave_nothing_to_play_again():
    for metrics, words in (
        ({}, "found no episode to replay"),
        ({"witness_reproduced": 0.0}, "differed when it was replayed"),
    ):
        with pytest.raises(StageFault, match=words):
            strict(Observer()).iteration_done(IterationReport(3, 4, metrics, {}, 0.0, None))
    strict(Observer()).iteration_done(IterationReport(3, 4, {"witness_reproduced": 1.0}, {}, 0.0, None))


@pytest.mark.dask
def test_new_copies_give_the_same_bits_here_on_workers_resumed_replayed_and_evaluated(
    planted, tiny_config, tmp_path, digests
):
    env = planted("counter").model_dump(mode="json", exclude={"copies", "action_scale"})
    config = tiny_config(env=env, evaluation={"every": 2})
    train(config, tmp_path / "here", backend=HERE)
    shorter = config.model_copy(update={"iterations": 1})
    train(shorter, tmp_path / "there", backend=HERE)
    resume(tmp_path / "there", iterations=config.iterations, backend=Backend(workers=2))
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    assert all(outcome.identical for outcome in replay(tmp_path / "there"))
    run = storage.open_run(tmp_path / "here")
    assert run.config["env"]["copies"] == "fresh"
    again = evaluate(tmp_path / "here", 2).evaluation
    np.testing.assert_array_equal(again.test_returns, run[1].evaluation().test_returns)


def test_runs_of_earlier_versions_keep_their_copies_and_their_seeds_and_have_no_witness(tiny_config):
    stored = tiny_config(env="CartPole-v1", algorithm="a2c").model_dump(mode="json")
    for name in ("copies", "integer_observations", "seed_bits", "witness"):
        del stored["env"][name]
    env = build_stored(stored).env
    assert (env.copies, env.seed_bits, env.witness, env.integer_observations) == ("kept", 64, False, False)
    assert env.decisive().keys() == stored["env"].keys() - {"diagnostics", "facts", "observed", "wrappers"}
    ours = EnvConfig(name="half-cheetah-dir")
    assert (ours.copies, ours.seed_bits, ours.witness) == ("kept", 64, False)


def test_an_environment_that_takes_seeds_of_32_bits_trains_and_can_be_reproduced(tiny_config, tmp_path):
    train(tiny_config(env="small_envs:Legacy"), tmp_path / "run", backend=HERE)
    assert all(outcome.identical for outcome in replay(tmp_path / "run"))
    run = storage.open_run(tmp_path / "run")
    assert config_of(run).env.seed_bits == 32
    record = run.record(run.last_ref(0))
    shown = [(item["stage"], item["step"]) for item in output_info(run, record.ref)["inputs"]]
    assert len({*shown}) == len(shown) < len(record.inputs)  # of which one is the witness


def test_an_environment_registered_in_the_calling_script_alone_is_refused(tiny_config, tmp_path):
    gymnasium.register("OnlyHere-v0", entry_point=Legacy)
    try:
        with pytest.raises(EnvError, match=r"'OnlyHere-v0' is registered only in this process"):
            train(tiny_config(env="OnlyHere-v0", algorithm="a2c"), tmp_path / "run", backend=HERE)
    finally:
        del gymnasium.registry["OnlyHere-v0"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0, 512, "50% of its actions"),
        (0, 1, "50% of its actions"),
        (1.597, 5, "94% of its actions"),
        (-512, 512, "reaches 0.59%"),
        (-30.18, 30.18, "reaches 9.9% of it"),
        (-30, 30, "reaches 10% of it"),
        (-20, 20, ""),
        (-1, 1, ""),
        (-0.4, 0.4, ""),
        (-np.inf, 1, ""),
    ],
)
def test_a_box_that_a_new_policy_misses_is_named(low, high, words):
    found = missed_box(Box(low, high, (2,), np.float32))
    assert words in found
    assert bool(found) == bool(words)


def test_a_note_tells_how_long_copies_take_to_make_and_to_play(monkeypatch):
    rehearsal, ticks = Rehearsal(EnvConfig(name="Pendulum-v1"), 5), iter([1.0, 1.2503, 1.7503])
    with monkeypatch.context() as patch:
        patch.setattr("metaloom.pipeline.envs.rehearsal.time.perf_counter", lambda: next(ticks))
        rehearsal.alone(0)
    assert "which takes 250 of 750 ms for 5 steps" in next(rehearsal._notes("observations after reset of episode 1"))


@pytest.mark.parametrize("bits", [32, 64])
def test_seeds_of_a_rehearsal_have_as_many_bits_as_those_of_a_run(bits):
    seeds = Rehearsal(EnvConfig(name="Pendulum-v1", seed_bits=bits), 5).seeds.tolist()
    assert 2 ** (bits - 8) < max(seeds) < 2**bits


def test_what_nobody_set_is_named_where_most_episodes_end_by_it(tiny_config, tmp_path, caplog):
    settings = tiny_config(env={"name": "small_envs:Unlimited", "action_scale": None}).model_dump(
        exclude={"max_episode_steps"}
    )
    settings["env"]["copies"] = "auto"
    train(build_config(settings), tmp_path / "run", backend=HERE)
    said = "\n".join(record.message for record in caplog.records)
    assert "24 of 24 episodes of iteration 0 ended at max_episode_steps=100, the default" in said
    assert "Unlimited: actions lie in Box(0.0, 512.0, (1,), float32). A new policy" in said


NORMALIZERS = """
import gymnasium
from gymnasium.wrappers import ClipReward, NormalizeObservation, NormalizeReward

class Observed(NormalizeObservation):
    def __init__(self):
        super().__init__(gymnasium.make("Pendulum-v1"))

class Paid(ClipReward):
    def __init__(self):
        super().__init__(NormalizeReward(gymnasium.make("Pendulum-v1")), -1, 1)
"""


@pytest.mark.parametrize(("env", "wrapper"), [("Observed", "Observed"), ("Paid", "NormalizeReward")])
def test_a_wrapper_that_keeps_statistics_is_refused_by_name_with_the_settings_that_keep_them(
    env, wrapper, tiny_config, tmp_path, monkeypatch
):
    (tmp_path / "normalizers.py").write_text(NORMALIZERS)
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny_config(env=f"normalizers:{env}", algorithm="a2c", iterations=1)
    required = rf"normalizers:{env}: {wrapper} normalizes by the statistics .* policy.normalize_observations=true"
    with pytest.raises(EnvError, match=required):
        train(config, tmp_path / "run", backend=HERE)
    assert not (tmp_path / "run").exists()
    kept = config.env.model_copy(update={"copies": "kept"})
    assert settled(kept, 5).config.copies == "kept"


def test_a_copy_that_is_asked_for_is_not_rehearsed(planted):
    for copies in ("kept", "fresh"):
        config = planted("wall clock", copies=copies, action_scale=10)
        assert settled(config, 20) == (config, ())


def test_a_scale_that_nobody_asked_for_is_left_out_where_actions_are_discrete(tmp_path, monkeypatch):
    (tmp_path / "fates.py").write_text(FATES)
    monkeypatch.syspath_prepend(tmp_path)
    config, notes = settled(EnvConfig(name="fates:Coin"), 5)
    assert config == EnvConfig(name="fates:Coin", action_scale=None, copies="kept")
    assert "4 reset seeds gave the same 5 steps" in notes[0]
    assert settled(config, 5) == (config, ())
    assert settled(EnvConfig(name="fates:Coin", action_scale=2), 5).config.action_scale == 2  # training refuses it
    for other in ("point-corner", "bernoulli-bandit"):
        assert settled(EnvConfig(name=other), 5) == (EnvConfig(name=other), ())
    assert settled(EnvConfig(name="Pendulum-v1"), 5).config == EnvConfig(name="Pendulum-v1", copies="kept")


@pytest.mark.parametrize(
    ("fate", "note"),
    [
        ("Deadly", "ended with status 3"),
        ("Endless", "ended with status 1"),
        ("Sleepy", "ended with status 1"),
        ("Nowhere", ""),
        ("Buggy", "Buggy.reset raised ValueError: my own bug); copies are reused"),
    ],
)
def test_an_environment_that_cannot_be_rehearsed_is_left_as_it_is_and_the_reason_is_given(
    fate, note, tmp_path, monkeypatch
):
    (tmp_path / "fates.py").write_text(FATES)
    monkeypatch.syspath_prepend(tmp_path)
    config = EnvConfig(name=f"fates:{fate}", action_scale=None)
    found, notes = settled(config, 5, timeout_seconds=3)
    assert found == config.model_copy(update={"copies": "kept"})
    assert note in "".join(notes)


def test_a_call_in_the_rehearsal_of_a_new_run_may_take_the_step_timeout(tiny_config, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "metaloom.flows.graph.warm_start.settled",
        lambda env, max_steps, timeout: (asked.append((max_steps, timeout)), (env, ()))[1],
    )
    for seconds in (None, 5.0):
        pinned(tiny_config(), step_timeout_seconds=seconds)
    assert asked == [(tiny_config().max_episode_steps, seconds) for seconds in (60, 5)]


def test_both_processes_tell_what_they_found_where_the_second_one_ends(tmp_path, monkeypatch):
    (tmp_path / "fates.py").write_text(FATES)
    monkeypatch.syspath_prepend(tmp_path)
    found, (first, second) = settled(EnvConfig(name="fates:Second"), 5)
    assert (found.copies, found.action_scale) == ("kept", None)
    assert "4 reset seeds gave the same 5 steps" in first
    assert second == (
        "fates:Second: the rehearsal's process ended with status 3; environment copies are reused across episodes"
    )
    unknown = EnvConfig(name="fates:Deadly")
    assert settled(unknown, 5).config.action_scale == unknown.action_scale
    assert unknown.action_scale is not None


def test_modules_of_the_folder_one_stands_in_are_not_found_before_installed_ones(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("open('RAN', 'w')")
    monkeypatch.chdir(tmp_path)
    settled(EnvConfig(name="Pendulum-v1", options={"g": 9.0}), 5)
    assert not (tmp_path / "RAN").exists()


FATES = """
import os
import time

import gymnasium
from gymnasium.spaces import Box, Discrete
from small_envs import Legacy


class Coin(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (1,)), Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, 0.0, False, False, {}


class Deadly(Coin):
    def __init__(self):
        os._exit(3)


class Second(Coin):
    def __init__(self):
        if os.environ["PYTHONHASHSEED"] == "0":
            os._exit(3)


class Endless(Coin):
    def __init__(self):
        time.sleep(3600)


class Sleepy(Coin):
    def reset(self, *, seed=None, options=None):
        time.sleep(3600)


class Buggy(Coin):
    def reset(self, *, seed=None, options=None):
        raise ValueError("my own bug")
"""
