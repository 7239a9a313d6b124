"""Facts that environments tell: declared, checked, stored, in tables, metrics, evaluations, exports, and as a stop."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr
from small_envs import Reach

import metaloom
from metaloom.flows import cli, exports
from metaloom.flows.commands.train import resume, train
from metaloom.flows.recipes import new_config
from metaloom.pipeline.config.sections import StoppingConfig
from metaloom.pipeline.envs.answers import RowFault, check_facts, declared_facts
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import BatchStep, EnvError, Fact
from metaloom.pipeline.envs.registry import make_batch_env, make_env
from metaloom.pipeline.schema import ConfigError
from metaloom.stages.rollouts.faults import RolloutError

pytestmark = pytest.mark.usefixtures("warm")

HERE = metaloom.Backend(workers=0)
RADIUS = 0.6


def settings(**changed):
    env = {"name": "point-corner", "options": {"reward": "dense", "success_radius": RADIUS}}
    sizes = {"iterations": 2, "num_tasks": 3, "episodes_per_task": 4, "max_episode_steps": 20}
    recipe = metaloom.load_settings("promp-point-corner")
    return recipe | sizes | {"env": env, "policy": {"hidden_sizes": [8]}} | changed


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("facts") / "run"
    evaluation = {"every": 2, "adaptation_steps": 1, "test_episodes": 2}
    metaloom.train(metaloom.build_config(settings(evaluation=evaluation)), path, backend=HERE)
    return metaloom.open_run(path)


def distances(episodes, tasks):
    places = episodes.observations[:, :, 1:].astype(np.float64)
    return np.linalg.norm(places - tasks.params[:, None, None], axis=-1)


def test_every_step_is_stored_with_what_the_environment_told_of_it(run):
    for k in (0, 1):
        episodes = run[1].rollouts(k)
        assert list(episodes.facts) == ["goal_distance", "success"]
        expected = distances(episodes, run[1].tasks())
        np.testing.assert_allclose(episodes.facts["goal_distance"], expected, atol=1e-5)
        clear = np.abs(expected - RADIUS) > 1e-4
        assert np.array_equal(episodes.facts["success"][clear], (expected <= RADIUS)[clear])
    stored = zarr.open(str(run.path / "data.zarr"))
    for name, dtype in (("success", "bool"), ("goal_distance", "float32")):
        array = stored[f"rollouts_0/facts.{name}"]
        assert array.metadata.dimension_names == ("iteration", "task", "episode", "t")
        assert array.dtype == dtype
    assert run.facts == {"success": "1", "goal_distance": "m"}


def test_tables_have_facts_of_steps_and_of_episodes(run):
    episodes = run[1].rollouts(1)
    table = run.episodes([1], steps=1).to_pandas()
    assert table["fact_success"].tolist() == episodes.facts["success"].any(axis=2).ravel().tolist()
    assert table["fact_goal_distance"].tolist() == episodes.facts["goal_distance"][:, :, -1].ravel().tolist()
    steps = run.steps([1], ["fact_success", "fact_goal_distance"], steps=1)
    assert steps["fact_success"].to_pylist() == episodes.facts["success"].ravel().tolist()
    assert steps.schema.field("fact_goal_distance").metadata == {b"unit": b"m"}
    data = run[1].xarray(1)
    assert data["facts.goal_distance"].dims == ("task", "episode", "t")
    assert data["facts.goal_distance"].attrs["units"] == "m"


def test_metrics_are_the_share_of_episodes_with_success_and_the_mean_of_last_distances(run):
    by_round = run.episodes().to_pandas().groupby(["iteration", "step"])["fact_success"].mean().unstack()
    metrics = run.metrics().to_pandas()
    for k in (0, 1):
        assert metrics[f"step_{k}.success_rate"].tolist() == pytest.approx(by_round[k].tolist())
        last = run[0].rollouts(k).facts["goal_distance"][:, :, -1]
        assert metrics[f"step_{k}.average_goal_distance"][0] == pytest.approx(last.mean(dtype=np.float64))


def test_evaluations_tell_success_by_adaptation_step(run, capsys):
    evaluation = run[1].evaluation()
    assert evaluation.test_facts["success"].shape == evaluation.test_returns.shape
    assert evaluation.adaptation_facts["success"].shape == evaluation.adaptation_returns.shape
    table = run.evaluations().to_pandas().query("test")
    assert table["fact_success"].tolist() == evaluation.test_facts["success"].ravel().tolist()
    outcome = metaloom.evaluate(run)
    assert [step.facts["success_rate"] for step in outcome.summary()] == pytest.approx(
        evaluation.test_facts["success"].mean(axis=(0, 2)).tolist()
    )
    assert cli.run(["evaluate", str(run.path), "--workers", "0", "--json"]) == 0
    assert '"success_rate"' in capsys.readouterr().out


def test_views_show_the_success_rate(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(run.path.parent))
    assert cli.run(["ls"]) == 0
    assert "success rate" in capsys.readouterr().out
    assert cli.run(["show", str(run.path)]) == 0
    assert "success_rate" in capsys.readouterr().out
    assert cli.run(["report", str(run.path), "--out", str(tmp_path)]) == 0
    assert ">Success rate</" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "success rates" in metaloom.open_run(run.path)._repr_html_()


def test_a_run_with_facts_replays_verifies_and_is_exported(run, tmp_path):
    assert cli.run(["replay", str(run.path)]) == 0
    assert cli.run(["verify", str(run.path)]) == 0
    exports.export(run, tmp_path / "parquet", "parquet")
    exports.export(run, tmp_path / "histories", "histories")
    assert pq.read_table(tmp_path / "parquet" / "episodes.parquet")["fact_success"].equals(
        run.episodes()["fact_success"]
    )
    histories = pq.ParquetFile(next((tmp_path / "histories").glob("*.parquet"))).read()
    assert "fact_success" in histories.column_names


def test_a_run_without_declared_facts_records_and_stores_none(tmp_path):
    env = {"name": "point-corner", "options": {"reward": "dense"}}
    config = metaloom.build_config(settings(env=env, iterations=1))
    assert "success_radius" not in config.env.options
    metaloom.train(config, tmp_path / "run", backend=HERE)
    run = metaloom.open_run(tmp_path / "run")
    assert run.config["env"]["options"] == {"reward": "dense"}
    assert "facts" not in run.info["environment"]
    assert not list((run.path / "data.zarr").glob("*/facts*"))
    assert not [name for name in run.episodes().column_names if name.startswith("fact_")]


def test_tables_made_from_disk_alone_equal_those_made_from_memory(run, tmp_path):
    """A process that ends between the rollouts and the update leaves the tables to the next one."""
    config = metaloom.build_config(settings())

    class Ended(Exception):
        pass

    def call(ref, inputs, compute):
        if ref.stage == "meta_optimize":
            raise Ended
        return compute()

    with pytest.raises(Ended):
        train(config, tmp_path / "run", backend=HERE, call=call)
    resume(tmp_path / "run", backend=HERE)
    assert metaloom.open_run(tmp_path / "run").episodes().equals(run.episodes())


def test_success_ends_a_run_early(tmp_path):
    """Every place within 4 m of a corner counts, so the first iteration is enough."""
    env = {"name": "point-corner", "options": {"reward": "dense", "success_radius": 4.0}}
    stop = {"metric": "success_rate", "at_least": 0.9}
    config = metaloom.build_config(settings(env=env, iterations=5, stop=stop))
    metaloom.train(config, tmp_path / "run", backend=HERE)
    run = metaloom.open_run(tmp_path / "run")
    assert len(run.iterations) == 1
    assert run.metrics()["step_1.success_rate"].to_pylist() == [1.0]


def test_a_metric_stops_where_it_reaches_its_bound():
    history = [{"step_0.success_rate": 1.0, "step_1.success_rate": 0.5, "step_1.average_goal_distance": 0.3}]
    assert StoppingConfig(metric="success_rate", at_least=0.5).met(history)
    assert not StoppingConfig(metric="success_rate", at_least=0.6).met(history)
    assert StoppingConfig(metric="step_0.success_rate", at_least=1.0).met(history)
    assert StoppingConfig(metric="average_goal_distance", at_most=0.3).met(history)
    assert not StoppingConfig(metric="average_goal_distance", at_most=0.2).met(history)
    with pytest.raises(ValueError, match="one of the two bounds"):
        StoppingConfig(metric="success_rate")
    with pytest.raises(ValueError, match="one of the two bounds"):
        StoppingConfig(samples=5, at_most=0.1)


def test_a_stop_by_a_metric_that_there_will_not_be_is_refused_before_the_run_begins(tmp_path):
    config = metaloom.build_config(settings(stop={"metric": "sucess_rate", "at_least": 0.9}))
    with pytest.raises(ConfigError, match=r"unknown metric 'sucess_rate'.*did you mean success_rate\?"):
        metaloom.train(config, tmp_path / "run", backend=HERE)
    assert not (tmp_path / "run").exists()


def own(tmp_path, wrong=""):
    env = {"name": "small_envs:Reach", "options": {"wrong": wrong}}
    metaloom.train(metaloom.build_config(settings(env=env, iterations=1)), tmp_path / "run", backend=HERE)
    return metaloom.open_run(tmp_path / "run")


def test_facts_of_episodes_and_optional_numbers_of_a_users_environment_are_kept(tmp_path):
    run = own(tmp_path)
    facts = run[0].rollouts(0).facts
    assert facts["success"][0, 0, :5].tolist() == [False, True, False, False, False]
    assert facts["moves"].shape == (3, 4)
    assert (facts["moves"] == 4).all()
    np.testing.assert_array_equal(facts["force"][0, 0, :5], np.array([np.nan, np.nan, 7, 7, 0], np.float32))
    stored = zarr.open(str(run.path / "data.zarr"))["rollouts_0/facts.moves"]
    assert stored.metadata.dimension_names == ("iteration", "task", "episode")
    table = run.episodes().to_pandas()
    assert table["fact_success"].all()
    assert (table["fact_force"] == 7).all()
    assert "fact_moves" not in run.steps().column_names
    metrics = run[0].metrics()
    assert metrics["step_0.success_rate"] == 1.0
    assert metrics["step_0.average_force"] == 7.0
    assert metrics["step_0.average_moves"] == 4.0
    assert cli.run(["replay", str(run.path)]) == 0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("missing", r"has|got \['force', 'success'\]; expected the facts that the environment declares"),
        ("undeclared", r"got \['force', 'height', 'moves', 'success'\]"),
        ("nan", "got nan as fact moves; expected a finite number within float32; only an optional fact"),
        ("shape", "as fact force; expected one number"),
        ("flag", "got float 0.5 as fact success; expected True or False, or 1 or 0"),
        ("infinite", "got inf as fact force"),
    ],
)
def test_wrong_facts_are_refused_with_their_place(tmp_path, wrong, told):
    with pytest.raises(RolloutError, match=told) as caught:
        own(tmp_path, wrong)
    assert (caught.value.about["task"], caught.value.about["episode"], caught.value.about["env_step"]) == (0, 0, 1)


def test_facts_of_a_batch_are_checked_row_by_row():
    declared = (Fact("success", "flag"), Fact("force"))
    rows = np.array([3, 5])
    good = {"success": np.array([True, False]), "force": np.array([1.0, 2.0])}
    check_facts(good, declared, rows)
    for wrong in ({"force": np.zeros(3)}, {"success": np.zeros(2)}, {"force": np.array(["1", "2"])}):
        with pytest.raises(EnvError, match="got dtype"):
            check_facts(good | wrong, declared, rows)
    with pytest.raises(EnvError, match=r"got \['success'\]; expected .*'force'"):
        check_facts({"success": good["success"]}, declared, rows)
    with pytest.raises(RowFault, match="got nan as fact force") as caught:
        check_facts(good | {"force": np.array([1.0, np.nan])}, declared, rows)
    assert caught.value.row == 5


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ((Fact("a"), Fact("a")), "names must be unique"),
        ((Fact("a b"),), "letters, digits"),
        ((Fact("a", "bool"),), 'kind "flag" or "number"'),
        ((Fact("a", per="batch"),), 'per "step" or "episode"'),
        ((Fact("return"),), "every run already has the metric average_return"),
        ((Fact("a", "flag", optional=True),), "the flag a is optional"),
        (3, "expected a sequence of Fact"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(facts, told):
    env = Reach()
    env.facts = facts
    with pytest.raises(EnvError, match=told):
        declared_facts(env)


def test_what_gymnasium_environments_tell_in_info_is_kept_where_an_option_says_so():
    name = "small_envs:Gym"
    facts = {"success": "is_success", "distance": {"key": "far", "kind": "number"}}
    batch = make_batch_env(EnvConfig(name=name, facts=facts), 2)
    batch.reset(np.zeros((2, 0)), np.arange(2, dtype=np.uint64))
    told = batch.step(np.zeros((2, 1), np.float32), np.arange(2)).facts
    assert {key: value.tolist() for key, value in told.items()} == {"success": [True, True], "distance": [0.25, 0.25]}
    silent = make_batch_env(EnvConfig(name=name), 1)
    silent.reset(np.zeros((1, 0)), np.zeros(1, np.uint64))
    assert silent.step(np.zeros((1, 1), np.float32), np.arange(1)).facts == {}
    missing = make_batch_env(EnvConfig(name=name, facts={"success": "won"}), 1)
    missing.reset(np.zeros((1, 0)), np.zeros(1, np.uint64))
    with pytest.raises(RowFault, match=r"env\.facts: info has \['facts', 'far', 'is_success'\], but no 'won'"):
        missing.step(np.zeros((1, 1), np.float32), np.arange(1))
    with pytest.raises(EnvError, match=r"env\.facts has success, distance but point-corner is a MetaEnv"):
        make_env(EnvConfig(name="point-corner", facts=facts))


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_facts_are_kept_where_episodes_are_collected_in_blocks_and_fill_a_replay_buffer(tmp_path, algorithm):
    """Every place of an episode that there is has success in step 2; the empty ones have none."""
    sizes = {
        "ppo": ["min_steps=9", "episodes_per_task=8"],
        "sac": ["algorithm.num_init_memory_steps=20", "algorithm.batch_size=8", "algorithm.memory_size=200"],
    }
    assignments = ["env=small_envs:Reach", "iterations=2", "max_episode_steps=4", "policy.hidden_sizes=[4]"]
    train(new_config(algorithm, [*assignments, *sizes[algorithm]]), tmp_path / "run", backend=HERE)
    run = metaloom.open_run(tmp_path / "run")
    episodes = run[1].rollouts(0)
    assert np.array_equal(episodes.episode_facts["success"], episodes.real)
    assert (episodes.facts["moves"] == episodes.lengths).all()
    assert run[1].metrics()["step_0.success_rate"] == 1.0
    assert run.episodes()["fact_success"].to_numpy(zero_copy_only=False).all()
    if algorithm == "sac":
        assert run[0].memory_fill().episode_facts["success"].all()


def test_an_exported_dataset_of_episodes_tells_their_facts(run, tmp_path):
    minari = pytest.importorskip("minari.dataset.minari_storage")
    exports.export(run, tmp_path / "minari", "minari")
    (data,) = (tmp_path / "minari").glob("*/data")
    (about,) = minari.MinariStorage.read(data).get_episode_metadata([0])
    assert about["options"]["fact_success"] == run[0].rollouts(0).episode_facts["success"][0, 0]


def test_a_batch_step_without_facts_is_what_it_was():
    assert dict(BatchStep(np.zeros((1, 1)), {}, np.zeros(1, bool), np.zeros(1, bool)).facts) == {}
    assert EnvConfig(name="point-2d").decisive() == {"name": "point-2d", "options": {}, "action_scale": 10.0}
