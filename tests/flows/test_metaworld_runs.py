"""Runs of Meta-World: classes to train on and to test with, success counted twice, the same bits with any workers."""

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("metaworld", reason="`make metaworld` installs it")

from metaworld.policies import ENV_POLICY_MAP

import metaloom
from metaloom.flows import cli
from metaloom.flows.films.painters import drawable, painter_of
from metaloom.flows.results.class_returns import success_rows
from metaloom.flows.results.evaluation import summarize_steps
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.metaworld.names import BENCHMARKS, CLASSES
from metaloom.pipeline.envs.metaworld.package import official_classes

pytestmark = pytest.mark.usefixtures("warm")

EXAMPLES = Path(__file__).parents[2] / "examples"
HERE = metaloom.Backend(workers=0)
SIZES = {"iterations": 2, "num_tasks": 4, "episodes_per_task": 2, "max_episode_steps": 6}
EVALUATION = {"every": 2, "evenly_by": "class", "test_episodes": 3}


def settings(recipe="promp-metaworld-ml10", **changed):
    small = {"policy": {"hidden_sizes": [8]}, "evaluation": EVALUATION}
    return metaloom.load_settings(recipe) | SIZES | small | changed


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("metaworld") / "run"
    metaloom.train(metaloom.build_config(settings()), path, backend=HERE)
    return metaloom.open_run(path)


def test_training_has_tasks_of_its_classes_and_evaluation_of_the_others(run):
    trained, tested = BENCHMARKS["ml10"]
    for iteration in (0, 1):
        assert len({*run[iteration].tasks().params[:, 0]}) == SIZES["num_tasks"]  # four of ten, none twice
    table = run.class_returns().to_pandas()
    assert {*table["class"]} == {*trained, "balanced"}
    outcome = metaloom.evaluate(run, test_episodes=3)
    assert [returns.names for returns in outcome.by_class()] == [tested, tested]
    assert outcome.by_class()[0].num_tasks == (1,) * 5


def test_a_run_replays_verifies_and_tells_success_twice(run, capsys):
    assert cli.run(["replay", str(run.path)]) == 0
    assert cli.run(["verify", str(run.path)]) == 0
    assert cli.run(["report", str(run.path)]) == 0
    capsys.readouterr()
    assert cli.run(["evaluate", str(run.path), "--workers", "0", "--num-tasks", "20"]) == 0
    shown = capsys.readouterr().out
    assert "official success rate" in shown
    assert "success by class of task" in shown


@pytest.mark.parametrize("sizes", [{"num_tasks": 20, "test_episodes": 2}, {"num_tasks": 15}, {}])
def test_fewer_tasks_or_episodes_than_the_official_evaluator_has_give_no_official_rate(run, sizes):
    outcome = metaloom.evaluate(run, **sizes)
    assert "official_success_rate" not in outcome.summary()[0].facts
    rows = success_rows(outcome.evaluation, outcome.classes)
    assert rows
    assert all("success_rate" in row and "official_success_rate" not in row for row in rows)


def test_a_multi_task_benchmark_has_no_official_rate(run):
    """The package evaluates it in one environment per class, where no episode is passed over."""
    outcome = metaloom.evaluate(run, num_tasks=20)
    told, without_classes = (summarize_steps(outcome.evaluation, c)[0].facts for c in (outcome.classes, None))
    assert "official_success_rate" in told
    assert "official_success_rate" not in without_classes
    multi_task = replace(outcome.classes, held_out=())
    assert "official_success_rate" not in summarize_steps(outcome.evaluation, multi_task)[0].facts
    assert all("official_success_rate" not in row for row in success_rows(outcome.evaluation, multi_task))


def test_a_run_stopped_midway_and_resumed_has_the_same_bits(run, tmp_path):
    config = metaloom.build_config(settings(iterations=1))
    metaloom.train(config, tmp_path / "run", backend=HERE)
    metaloom.resume(tmp_path / "run", iterations=2, backend=HERE)
    assert cli.run(["diff", str(run.path), str(tmp_path / "run")]) == 0


SMALL = {
    "rl2-metaworld-ml10": {
        "policy": {"network": "gru", "hidden_sizes": [8]},
        "episodes_per_task": 2,
        "algorithm": {"name": "rl2", "episodes_per_trial": 2, "num_epochs": 1},
    },
    "varibad-metaworld-ml1-reach": {
        "task_sampling": "uniform",
        "episodes_per_task": 2,
        "algorithm": {"name": "varibad", "episodes_per_trial": 2, "num_epochs": 1, "encoder_size": 8},
        "evaluation": {"every": 2, "num_tasks": 2, "test_episodes": 1},
    },
    "sac-metaworld-mt10": {
        "num_tasks": 1,
        "episodes_per_task": 1,
        "algorithm": {"name": "sac", "num_init_memory_steps": 8, "batch_size": 4, "num_updates_per_step": 2},
        "evaluation": {},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SMALL)
def test_recipes_train_at_sizes_of_a_test(recipe, tmp_path):
    run = metaloom.train(metaloom.build_config(settings(recipe, **SMALL[recipe])), tmp_path / "run", backend=HERE)
    assert run.metrics().column("env_steps").to_pylist()[-1] > 0
    assert cli.run(["replay", str(tmp_path / "run")]) == 0


@pytest.mark.slow
def test_a_film_shows_what_is_stored(run, tmp_path):
    done = metaloom.video(run, tmp_path / "film.gif", renderer="flat", size=(160, 120))
    assert done.largest_difference == 0
    assert done.frames == 1 + SIZES["max_episode_steps"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Constant")
def test_a_film_of_the_scripted_expert_shows_the_puck_lifted_to_its_goal():
    env = drawable(EnvConfig(name="metaworld-mt10", action_scale=None))
    painter, expert = painter_of(env, (160, 120), "flat"), ENV_POLICY_MAP["pick-place-v3"]()
    env.set_task(np.array(env.unwrapped.task_set[100]))
    observation, _ = env.reset(seed=0)
    pictures, succeeded = [painter.draw()], False
    while not succeeded:
        observation, *_, info = env.step(expert.get_action(observation[:39]))
        succeeded = info["facts"]["success"]
    pictures.append(painter.draw())

    def places(picture, near, *color):  # rows and columns of what has about this color
        return np.argwhere((np.abs(picture.astype(int) - color) < near).all(-1)).mean(0)

    green, red = (40, 60, 160, 75), (60, 240, 0, 0)
    before, after = (np.linalg.norm(places(p, *red) - places(p, *green)) for p in pictures)
    assert before > 20  # pixels
    assert after < 10


@pytest.mark.dask
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.sweep) for n in (1, 4))])
def test_any_number_of_workers_gives_the_same_bits(run, workers, tmp_path):
    # Each makes the environment for itself, which takes long where they outnumber the processor's cores.
    backend = metaloom.Backend(workers=workers, step_timeout_seconds=600)
    metaloom.train(metaloom.build_config(settings()), tmp_path / "run", backend=backend)
    assert cli.run(["diff", str(run.path), str(tmp_path / "run")]) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Constant")
def test_the_example_shows_that_the_packages_evaluator_reports_too_much(capsys):
    official_classes()  # lets the package work with this MuJoCo
    runpy.run_path(str(EXAMPLES / "metaworld_evaluation_bias.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "metaworld.evaluation.evaluation: success rate 1.00" in shown
    assert "success rate 0.25" in shown
    page = (EXAMPLES.parent / "docs" / "environments" / "metaworld.md").read_text(encoding="utf-8")
    assert f"```text\n{shown}```" in page


def test_success_by_class_is_the_share_of_test_episodes(run):
    outcome = metaloom.evaluate(run, num_tasks=20, test_episodes=3)
    facts = dict(outcome.evaluation.test_facts)
    facts["success"] = np.zeros_like(facts["success"])
    drawer_open = outcome.tasks.params[:, 0].tolist().index(CLASSES.index("drawer-open"))
    facts["success"][drawer_open, :, 0] = True  # the first episode of one of its four tasks
    facts["steps_until_success"] = np.where(facts["success"], 2, 6).astype(np.float32)
    rows = success_rows(replace(outcome.evaluation, test_facts=facts), outcome.classes)
    first, *_, balanced = (row for row in rows if row["adaptation_steps"] == 1)
    assert (first["class"], first["num_tasks"], first["success_rate"]) == ("drawer-open", 4, pytest.approx(1 / 12))
    assert first["official_success_rate"] == pytest.approx(1 / 3)  # of those over after 2, 6 and 6 steps
    assert balanced["success_rate"] == pytest.approx(1 / 60)
