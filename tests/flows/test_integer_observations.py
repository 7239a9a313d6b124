"""Observations of an integer type, such as bytes of images, are kept as they are; networks see the same numbers."""

import minari
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium.spaces import Box
from small_runs import SMALL_RUNS
from wrapped_envs import Camera

import metaloom
from metaloom import storage
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.exports import export
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.spaces import observation_dtype
from metaloom.pipeline.schema import ConfigError
from metaloom.stages.rollouts.faults import RolloutError

pytestmark = pytest.mark.usefixtures("warm")

HERE = Backend(workers=0)
FLAT = ["FlattenObservation"]


@pytest.fixture(autouse=True)
def own_envs(monkeypatch, request):
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath / "tests" / "helpers"), prepend=":")


def bytes_env(name="Camera", **settings):
    return {"name": f"wrapped_envs:{name}", "action_scale": None, "copies": "kept", **settings}


@pytest.mark.parametrize(
    ("algorithm", "env", "policy"),
    [
        ("a2c", bytes_env(), {"network": "cnn"}),
        ("ppo", bytes_env(wrappers=FLAT), {}),  # by the kernel for plain networks
        ("promp", bytes_env(wrappers=FLAT), {}),  # with a linear fit to observations
        ("recurrent-a2c", bytes_env(wrappers=FLAT), {"network": "gru"}),
        ("varibad", bytes_env(wrappers=FLAT), {}),
        ("dql", bytes_env("Switches"), {}),
        ("sac", bytes_env(wrappers=FLAT, action_scale=1), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_same_is_learned_from_integers_as_from_their_float32(algorithm, env, policy, tmp_path):
    recipe, *settings = SMALL_RUNS[algorithm]
    small = {**override(load_settings(recipe), settings), "iterations": 2, "policy": {**policy, "hidden_sizes": [4]}}
    digests = {}
    for kept in (True, False):
        config = build_config({**small, "env": {**env, "integer_observations": kept}})
        train(config, tmp_path / str(kept), backend=HERE)
        run = storage.open_run(tmp_path / str(kept))
        digests[kept] = [run.record(run.learner_ref(updates)).digest for updates in (1, 2)]
        group = run.files.stages.group_of(next(ref for ref in run.refs() if ref.stage.startswith("collect")))
        assert run.files.spec(f"{group}/observations").dtype == ("uint8" if kept else "float32")
    assert digests[True] == digests[False]


@pytest.mark.dask
def test_integers_come_back_from_workers_replays_tables_and_exports(tiny_config, tmp_path, digests):
    config = tiny_config(algorithm="a2c", env=bytes_env(wrappers=FLAT, witness=True), iterations=2)
    train(config, tmp_path / "here", backend=HERE)
    train(config.model_copy(update={"iterations": 1}), tmp_path / "there", backend=HERE)
    resume(tmp_path / "there", iterations=2, backend=Backend(workers=2))
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    assert all(outcome.identical for outcome in replay(tmp_path / "there"))
    run = metaloom.open_run(tmp_path / "here")
    assert run[1].metrics()["witness_reproduced"] == 1
    batch = run[0].rollouts(0)
    assert batch.observations.dtype == np.uint8
    assert run.steps(0).schema.field("observation").type.value_type == pa.uint8()

    stored = storage.open_run(tmp_path / "here")
    seen = batch.observations[:, :, :-1][batch.mask != 0]
    export(stored, tmp_path / "parquet", "parquet")
    table = pq.read_table(tmp_path / "parquet" / "steps" / "iteration=0" / "stage=rollouts_0" / "steps.parquet")
    np.testing.assert_array_equal(table["observation"].combine_chunks().flatten().to_numpy(), seen.ravel())
    export(stored, tmp_path / "histories", "histories")
    export(stored, tmp_path / "minari", "minari")
    dataset = minari.MinariDataset(tmp_path / "minari" / "here-v0" / "data")
    assert dataset.observation_space == Box(0, 255, (192,), np.uint8)
    assert dataset[0].observations.dtype == np.uint8
    assert run.policy()(batch.observations[0, 0, :3]).dtype == np.float32

    with pytest.raises(ConfigError, match="the type of observations cannot change from uint8 to float32"):
        fork(tmp_path / "here", 1, tmp_path / "other", ["env.integer_observations=false"])
    fork(tmp_path / "here", 1, tmp_path / "forked")
    resume(tmp_path / "forked", backend=HERE)
    assert storage.open_run(tmp_path / "forked")[1].rollouts(0).observations.dtype == np.uint8


@pytest.mark.parametrize(
    ("space", "kept"),
    [
        (Box(0, 255, (2,), np.uint8), np.uint8),
        (Box(-5, 5, (2,), np.int16), np.int16),
        (Box(0, 2**31, (2,), np.uint32), np.uint32),
        (Box(0, 100, (2,), np.int32), np.int32),
        (Box(0, 2**24 + 1, (2,), np.int64), np.int64),
        (Box(0, 2**24, (2,), np.int64), np.float32),  # which holds them exactly, in half the bytes
        (Box(0, 2**40, (2,), np.int64), np.int64),
        (Box(0, 1, (2,), np.float64), np.float32),
    ],
)
def test_the_type_that_is_kept_holds_every_number_of_the_space(space, kept):
    assert observation_dtype(space, EnvConfig(name="Any-v0")) == kept
    assert observation_dtype(space, EnvConfig(name="Any-v0", integer_observations=False)) == np.float32


@pytest.mark.parametrize("wrong", [0.5, 256, -1])
def test_a_number_that_is_no_integer_of_the_space_is_refused_with_what_helps(wrong, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(Camera, "seen", lambda self: np.full((8, 8, 3), wrong, np.float32))
    settings = {"algorithm": "a2c", "iterations": 1, "policy": {"network": "cnn", "hidden_sizes": [4]}}
    with pytest.raises(RolloutError, match=rf"got {float(wrong)} in the observation; expected integers of type uint8"):
        train(tiny_config(env=bytes_env(), **settings), tmp_path / "run", backend=HERE)
    floats = bytes_env(integer_observations=False)
    train(tiny_config(env=floats, **settings), tmp_path / "other", backend=HERE)
