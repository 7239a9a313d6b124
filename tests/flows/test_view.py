"""What the page over runs is told: the numbers of the readers, of whole, growing, thinned, packed and damaged runs."""

import io
import os
import shlex
import shutil
import signal
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from viewing import TOKEN, Viewer

from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.train import Observer, resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.recipes import new_config
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.viewer import curves as viewer_curves
from metaloom.flows.viewer import filming, outputs, pages
from metaloom.flows.viewer.curves import Curves
from metaloom.flows.viewer.outputs import principal_components
from metaloom.flows.viewer.values import episode_length
from metaloom.flows.views.history import load_history
from metaloom.flows.views.run_charts import BAND_NOTE
from metaloom.storage import StageRef

SERIAL = Backend(workers=0)
ROLLOUTS = ("collect_rollouts", 1)


@pytest.fixture
def runs(tmp_path, copy_tiny_run):
    """A folder with one run of three iterations."""
    copy_tiny_run(tmp_path / "runs" / "tiny")
    return tmp_path / "runs"


@pytest.fixture
def viewer(runs):
    return Viewer(runs)


def flip(path, place):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def numbers(answer):
    """[rows, columns] of a slice."""
    assert answer.status_code == 200, answer.text
    shape = [int(part) for part in answer.headers["x-shape"].split(",")]
    return np.frombuffer(answer.content, "<f8").reshape(shape)


def test_the_list_has_every_run_as_ls_tells_it(runs, viewer, capsys, monkeypatch):
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{}")
    found = viewer.get("runs")
    assert {row["name"]: row["state"] for row in found["runs"]} == {"tiny": "complete", "broken": "damaged"}
    monkeypatch.setenv("METALOOM_RUNS", str(runs))
    assert cli.run(["ls", "--json"]) == 0
    listed = capsys.readouterr().out
    (tiny,) = (row for row in found["runs"] if row["name"] == "tiny")
    assert all(str(tiny[name]) in listed for name in ("started", "last_return", "bytes"))
    shutil.rmtree(runs / "tiny")
    assert [row["name"] for row in viewer.get("runs")["runs"]] == ["broken"]


def test_a_single_run_is_shown_by_itself(runs):
    shutil.copytree(runs / "tiny", runs / "other")
    viewer = Viewer(runs / "tiny")
    place = viewer.get("place")
    assert (place["place"], place["only"]) == (str(runs / "tiny"), "tiny")
    assert [row["name"] for row in viewer.get("runs")["runs"]] == ["tiny"]
    assert viewer.api("run", "other").status_code == 404


def test_curves_are_the_history_of_the_run_and_say_what_their_bands_are(runs, viewer, monkeypatch):
    found = viewer.get("run", "tiny", "curves")
    history = load_history(storage.open_run(runs / "tiny"))
    assert found["iterations"] == [0, 1, 2]
    np.testing.assert_allclose(found["env_steps"], history.env_steps)
    learning, *_ = found["charts"]
    assert learning["note"] == BAND_NOTE  # four tasks rarely have all four corners among them
    after = learning["panels"][0]["series"][-1]
    assert after["label"] == "after adaptation"
    np.testing.assert_allclose(after["values"], history.task_returns[:, -1].mean(axis=1), rtol=1e-6)
    assert viewer.get("run", "tiny", "spark")["values"] == after["values"]
    monkeypatch.setattr(viewer_curves, "SPARK_POINTS", 2)
    assert viewer.get("run", "tiny", "spark")["values"] == after["values"][::2]
    np.testing.assert_allclose(after["low"], np.quantile(history.task_returns[:, -1], 0.25, axis=1), rtol=1e-6)
    titles = [chart["title"] for chart in found["charts"] if chart["section"] == "By class of task"]
    assert titles == ["Return by class of task, after adaptation", "Return by class of task, before adaptation"]
    np.testing.assert_allclose(found["metrics"]["step_0.entropy"], history.metrics["step_0.entropy"], rtol=1e-6)


@pytest.mark.parametrize(("most", "every", "shown"), [(3, 1, [0, 1, 2]), (2, 2, [0, 2]), (1, 4, [0])])
def test_curves_of_long_runs_show_iterations_at_equal_distances(viewer, monkeypatch, most, every, shown):
    monkeypatch.setattr(viewer_curves, "MOST_POINTS", most)
    found = viewer.get("run", "tiny", "curves")
    assert (found["iterations_done"], found["every"], found["iterations"]) == (3, every, shown)


def test_curves_and_state_follow_a_run_that_goes_on(tmp_path, tiny_config):
    def stop_in_iteration(i):
        seen = []
        return Observer(should_stop=lambda: bool(seen and seen[-1].iteration >= i), stage_started=seen.append)

    path = tmp_path / "runs" / "growing"
    evaluated = {"every": 1, "num_tasks": 2, "test_episodes": 2}
    train(tiny_config(evaluation=evaluated), path, backend=SERIAL, observer=stop_in_iteration(1))
    viewer = Viewer(tmp_path / "runs")
    assert viewer.get("run", "growing", "curves")["iterations"] == [0]
    live = viewer.get("run", "growing", "live")
    assert (live["state"], live["iterations_done"], live["iterations"]) == ("stopped", 1, 3)
    assert (live["algorithm"], live["env"], live["seed"]) == ("promp", "point-corner", 7)
    assert viewer.get("runs")["runs"][0]["state"] == "stopped"
    with storage.open_writer(path):
        assert viewer.get("run", "growing", "live")["state"] == "training"
        assert viewer.get("runs")["runs"][0]["state"] == "training"
    resume(path, backend=SERIAL)
    followed = viewer.get("run", "growing", "curves")
    assert followed == Viewer(tmp_path / "runs").get("run", "growing", "curves")
    assert followed["iterations"] == [0, 1, 2]
    assert [chart["iterations"] for chart in followed["charts"] if chart["section"] == "Evaluation"] == [[0, 1, 2]] * 2
    assert viewer.get("runs")["runs"][0]["state"] == "complete"
    assert len(viewer.get("run", "growing", "spark")["values"]) == 3


def test_the_list_follows_a_writer_that_is_killed_and_reads_a_run_at_rest_only_once(runs, viewer, monkeypatch):
    def states():
        return [row["state"] for row in viewer.get("runs")["runs"]]

    (runs / "tiny" / "_commits" / "00000000.meta_optimize.0.json").unlink()
    is_open, opened = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            storage.open_writer(runs / "tiny")
            os.write(opened, b"yes")
            signal.pause()
        finally:
            os._exit(1)
    os.close(opened)
    try:
        assert os.read(is_open, 3) == b"yes"
        assert states() == ["training"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(is_open)
    assert states() == ["killed"]
    monkeypatch.setattr(pages, "list_run_row", lambda folder: {"name": folder.name, "state": "read again"})
    assert states() == ["killed"]


def test_an_iteration_under_way_tells_the_returns_that_its_table_will_have(tmp_path, tiny_config):
    path, calls = tmp_path / "runs" / "tiny", []
    # The first learner, and all of iteration 0 but its last stage.
    observer = Observer(should_stop=lambda: len(calls) > 6, stage_started=calls.append)
    train(tiny_config(), path, backend=SERIAL, observer=observer)
    under_way = Viewer(tmp_path / "runs").get("run", "tiny", "iteration", 0)
    assert not under_way["complete"]
    newest = Viewer(tmp_path / "runs").get("run", "tiny", "live")["newest"]
    assert newest == {"iteration": 0, "label": "process_samples k=1"}
    run, ref = storage.open_run(path), StageRef(0, *ROLLOUTS)
    assert episode_length(run, ref, 3, 2) == 10
    for task, episode in ((4, 0), (0, 3)):
        with pytest.raises(UsageError, match=f"task {task}, episode {episode} is not stored"):
            episode_length(run, ref, task, episode)
    resume(path, backend=SERIAL)
    whole = Viewer(tmp_path / "runs").get("run", "tiny", "iteration", 0)
    assert whole["complete"]
    assert (under_way["last"], whole["last"]) == (0, 2)
    assert {*under_way["returns"]["steps"]} == {*whole["returns"]["steps"]} == {"0", "1"}
    for k, step in under_way["returns"]["steps"].items():
        np.testing.assert_allclose(step["returns"], whole["returns"]["steps"][k]["returns"], rtol=1e-6)
        assert step["lengths"] == whole["returns"]["steps"][k]["lengths"]
    assert under_way["returns"]["tasks"] == whole["returns"]["tasks"]
    assert under_way["returns"]["classes"] == whole["returns"]["classes"]
    goals = run[0].tasks().params
    assert whole["returns"]["tasks"] == {"goal_x": goals[:, 0].tolist(), "goal_y": goals[:, 1].tolist()}
    corners = [f"{'upper' if y > 0 else 'lower'} {'right' if x > 0 else 'left'}" for x, y in goals]
    assert whole["returns"]["classes"] == corners
    assert [*whole["returns"]["colors"]] == ["lower left", "upper left", "lower right", "upper right"]
    assert [step["label"] for step in whole["returns"]["shown"]] == ["before adaptation", "after adaptation"]
    assert whole["returns"]["trial"] == 1


def test_a_slice_of_an_array_is_the_stored_one(runs, viewer):
    batch = storage.open_run(runs / "tiny")[2].rollouts(1)
    at = ("run", "tiny", "values", 2, *ROLLOUTS)
    observations = {"array": "rollouts_1/observations"}
    by_step = numbers(viewer.api(*at, **observations, at="3,2,0,0", rows=3, columns=2))
    np.testing.assert_array_equal(by_step, batch.observations[3, 2].T.astype(np.float64))
    transposed = numbers(viewer.api(*at, **observations, at="3,2,0,0", rows=2, columns=3))
    np.testing.assert_array_equal(transposed, by_step.T)
    one_row = numbers(viewer.api(*at, array="rollouts_1/rewards", at="1,0,0", columns=2))
    np.testing.assert_array_equal(one_row, batch.rewards[1, :1].astype(np.float64))
    by_task = numbers(viewer.api(*at, array="rollouts_1/lengths", at="0,0", rows=0, columns=1))
    np.testing.assert_array_equal(by_task, batch.lengths)
    assert viewer.get("run", "tiny", "array", 2, *ROLLOUTS, **observations)["names"] == {
        "observation": ["x (m)", "y (m)"]
    }
    goals = viewer.get("run", "tiny", "array", 2, "sample_tasks", 0, array="tasks/params")["names"]
    assert goals == {"task_field": ["goal_x (m)", "goal_y (m)"]}
    numbered = viewer.get("run", "tiny", "array", 2, *ROLLOUTS, array="rollouts_1/lengths")["names"]
    assert numbered == {}


@pytest.mark.parametrize(("most", "every"), [(30, (1, 1)), (29, (1, 2)), (15, (1, 2)), (14, (1, 4))])
def test_of_a_slice_of_more_numbers_than_a_page_shows_it_has_some_at_equal_distances(
    viewer, runs, monkeypatch, most, every
):
    monkeypatch.setattr("metaloom.flows.viewer.values.MOST_NUMBERS", most)
    rewards = storage.open_run(runs / "tiny")[2].rollouts(1).rewards[1].astype(np.float64)
    assert rewards.shape == (3, 10)
    query = {"array": "rollouts_1/rewards", "at": "1,0,0"}
    for axes, expected, apart in (((1, 2), rewards, every), ((2, 1), rewards.T, every[::-1])):
        answer = viewer.api("run", "tiny", "values", 2, *ROLLOUTS, **query, rows=axes[0], columns=axes[1])
        assert answer.headers["x-every"] == ",".join(map(str, apart))
        np.testing.assert_array_equal(numbers(answer), expected[:: apart[0], :: apart[1]])


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"array": "rollouts_1/rewards", "at": "0,0", "columns": 2}, "2 indices"),
        ({"array": "rollouts_1/rewards", "at": "0,0,0", "columns": 3}, "the axes"),
        ({"array": "rollouts_1/rewards", "at": "9,0,0", "columns": 2}, "task must be an index from 0 to 3, got 9"),
        ({"array": "../../run.json", "at": "0", "columns": 0}, "choose one of rollouts_1/"),
        ({"array": "rollouts_1/rewards", "at": "x", "columns": 0}, "invalid literal"),
    ],
)
def test_a_slice_that_is_not_there_is_refused_with_what_is(viewer, query, told):
    answer = viewer.api("run", "tiny", "values", 2, *ROLLOUTS, **query)
    assert answer.status_code == 422
    assert told in answer.json()["problem"]


def test_an_array_that_would_fill_the_memory_is_refused_before_it_is_read(viewer, monkeypatch):
    monkeypatch.setattr("metaloom.flows.viewer.values.MOST_BYTES", 100)
    monkeypatch.setattr("metaloom.storage.read.committed.decode_chunk", None)
    monkeypatch.setattr("metaloom.storage.read.committed.decode_parts", None)
    answer = viewer.api("run", "tiny", "values", 2, *ROLLOUTS, array="rollouts_1/observations", at="0,0,0,0", columns=2)
    assert answer.status_code == 422
    assert "more than the 100 that this page can read" in answer.json()["problem"]


def test_what_would_fill_the_memory_is_left_out_of_the_page_of_adaptation(viewer, monkeypatch):
    monkeypatch.setattr("metaloom.flows.viewer.values.MOST_BYTES", 100)
    found = viewer.get("run", "tiny", "adaptation", 2)
    for part in ("ways", "policies"):
        assert "more than the 100 that this page can read" in found[part]["problem"]


def test_an_output_without_episodes_is_not_called_damaged(viewer):
    answer = viewer.api("run", "tiny", "episode", 2, "adapt", 0, task=0, episode=0)
    assert (answer.status_code, answer.json()["kind"]) == (422, "UsageError")
    assert "adapt(i=2, k=0) has no episodes" in answer.json()["problem"]


def test_an_episode_of_more_numbers_than_a_page_shows_says_so(viewer, monkeypatch):
    monkeypatch.setattr("metaloom.flows.viewer.values.MOST_NUMBERS", 1)
    found = viewer.get("run", "tiny", "episode", 2, *ROLLOUTS, task=3, episode=1)
    assert found["signals"] == []
    assert "values in an episode; the page shows at most 1" in found["problems"][0]


def test_padding_is_left_out_of_slices_and_episodes(tmp_path, tiny_config):
    config = tiny_config(env="CartPole-v1", algorithm={"name": "ppo"}, num_tasks=1, max_episode_steps=40, iterations=1)
    train(config, tmp_path / "runs" / "poles", backend=SERIAL)
    viewer, batch = Viewer(tmp_path / "runs"), storage.open_run(tmp_path / "runs" / "poles")[0].rollouts(0)
    at = (0, "collect_rollouts", 0)
    rewards = numbers(
        viewer.api("run", "poles", "values", *at, array="rollouts_0/rewards", at="0,0,0", rows=1, columns=2)
    )
    assert batch.lengths.min() < batch.lengths.max()
    np.testing.assert_array_equal(np.isfinite(rewards).sum(axis=1), batch.lengths[0])
    values = numbers(
        viewer.api("run", "poles", "values", *at, array="rollouts_0/observations", at="0,0,0,0", rows=1, columns=2)
    )
    np.testing.assert_array_equal(np.isfinite(values).sum(axis=1), batch.lengths[0] + 1)
    shortest = int(batch.lengths[0].argmin())
    told = viewer.get("run", "poles", "episode", *at, task=0, episode=shortest)
    assert told["length"] == told["return"] == batch.lengths[0, shortest]
    lengths = {signal["name"]: len(signal["values"][0]) for signal in told["signals"]}
    assert lengths["observations"] == told["length"] + 1
    assert lengths["rewards"] == lengths["advantages"] == told["length"]


def test_an_episode_has_all_that_is_stored_of_its_steps(runs, viewer):
    run = storage.open_run(runs / "tiny")
    found = viewer.get("run", "tiny", "episode", 2, *ROLLOUTS, task=3, episode=0)
    assert (found["length"], found["tasks"], found["episodes"], found["problems"]) == (10, 4, [3] * 4, [])
    (row,) = run.episodes(2, 1, task=3, episode=0).to_pylist()
    assert found["return"] == pytest.approx(row["return"], rel=1e-6)
    signals = {signal["name"]: signal for signal in found["signals"]}
    assert "mask" not in signals
    assert signals["observations"]["labels"] == ["x (m)", "y (m)"]
    assert signals["rewards"]["labels"] == ["0"]
    assert (signals["rewards"]["unit"], signals["rewards"]["description"]) == ("1", "reward of step t")
    np.testing.assert_allclose(signals["actions"]["values"], run[2].rollouts(1).actions[3, 0].T, rtol=1e-6)
    np.testing.assert_allclose(signals["advantages"]["values"], [run[2].samples(1).advantages[3, 0]], rtol=1e-6)
    assert viewer.api("run", "tiny", "episode", 2, *ROLLOUTS, task=3, episode=9).status_code == 422


def test_lineage_leads_from_record_to_record_and_replays(runs, viewer, monkeypatch, capsys):
    run = storage.open_run(runs / "tiny")
    update = viewer.get("run", "tiny", "output", 1, "meta_optimize", 0)
    assert update["digest"] == run.record(StageRef(1, "meta_optimize")).digest
    followed = set()

    def follow(output):
        for item in output["inputs"]:
            at = (item["iteration"], item["stage"], item["step"])
            if at not in followed:
                followed.add(at)
                found = viewer.get("run", "tiny", "output", *at)
                assert found["digest"] == item["digest"]
                assert any(reader["label"] == output["label"] for reader in found["read_by"])
                follow(found)

    follow(update)
    assert (0, "initialize", 0) in followed
    (command,) = viewer.get("run", "tiny", "output", 1, *ROLLOUTS)["commands"]
    words = shlex.split(command)
    assert words[1:] == ["replay", f"{runs / 'tiny'}@1", "--stage", "collect_rollouts", "--step", "1"]
    assert cli.run(words[1:]) == 0
    assert "identical" in capsys.readouterr().out


def test_the_graph_links_every_output_of_an_iteration_with_its_digest(runs, viewer):
    graph, run = viewer.get("run", "tiny", "iteration", 1)["graph"], storage.open_run(runs / "tiny")
    for ref in run.refs():
        if ref.iteration == 1:
            assert f'href="#/run/tiny/output/1/{ref.stage}/{ref.step}"' in graph
            assert run.record(ref).digest[:12] in graph
            assert run.record(ref).digest[:13] not in graph
    earlier = [item for r in run.refs() if r.iteration == 1 for item in run.record(r).inputs if item.ref.iteration < 1]
    assert graph.count("stroke-dasharray") == len(earlier) > 0
    assert all(item.digest[:12] in graph and item.digest[:13] not in graph for item in earlier)
    assert graph.count("<path d=") == 1 + sum(len(run.record(r).inputs) for r in run.refs() if r.iteration == 1)


def test_parameters_of_inner_steps_are_compared_by_name_whatever_their_order():
    step = {"b": np.array([[1.0, 2]]), "a": np.array([[3.0]])}
    for start in (None, {"a": np.array([1.0]), "b": np.array([4.0, 9])}):
        found, reordered = (outputs._flat(adapted, start) for adapted in (step, dict(sorted(step.items()))))
        np.testing.assert_array_equal(found, reordered)
        assert sorted(found[0]) == ([1, 2, 3] if start is None else [-7, -3, 2])


def test_principal_components_find_the_plane_that_points_lie_in():
    rng = np.random.default_rng(0)
    axes, _ = np.linalg.qr(rng.normal(size=(7, 2)))
    plane = rng.normal(size=(5, 2)) * [10, 1]
    found, shares = principal_components(plane @ axes.T)
    assert shares.sum() == pytest.approx(1)
    np.testing.assert_allclose(found @ found.T, plane @ plane.T, atol=1e-9)
    one, share = principal_components(np.array([[3.0, 4.0]]))
    np.testing.assert_allclose((one, [share]), ([[5, 0]], [[1, 0]]))
    # The largest entry of each component is positive; what a third one explains is in neither share.
    found, shares = principal_components(np.diag([-3.0, 1, 0.5]))
    np.testing.assert_allclose(found, [[3, 0], [0, 1], [0, 0]], atol=1e-9)
    np.testing.assert_allclose(shares, np.array([9, 1]) / 10.25)
    found, _ = principal_components(np.diag([3.0, -1, -0.5]))
    np.testing.assert_allclose(found, [[3, 0], [0, 1], [0, 0]], atol=1e-9)
    for _ in range(8):
        found, _ = principal_components(rng.normal(size=(5, 7)))
        assert (found[np.abs(found).argmax(axis=0), [0, 1]] > 0).all()


def test_adaptation_is_told_from_the_learner_and_ways_from_observations(runs, viewer, monkeypatch):
    run = storage.open_run(runs / "tiny")
    found = viewer.get("run", "tiny", "adaptation", 2)
    start, adapted = run[2].learner().params, run[2].adapted(0).params
    moved = [np.sqrt(sum(((adapted[n][b] - start[n]) ** 2).sum() for n in start)) for b in range(4)]
    assert found["policies"]["from_learner"]
    assert found["policies"]["steps"] == [1]  # gradient steps, of which `adapted(0)` has had one
    np.testing.assert_allclose(found["policies"]["distances"][0], moved, rtol=1e-4)
    before, after = found["ways"]["rounds"]
    assert (before["label"], after["label"]) == ("before adaptation", "after adaptation")
    np.testing.assert_allclose(after["tasks"][1][2], run[2].rollouts(1).observations[1, 2].T, rtol=1e-6)
    np.testing.assert_allclose(found["ways"]["goals"], run[2].tasks().params)
    assert found["ways"]["unit"] == "m"
    monkeypatch.setattr(outputs, "MOST_TASKS", 2)
    monkeypatch.setattr(outputs, "MOST_EPISODES", 1)
    few = viewer.get("run", "tiny", "adaptation", 2)["ways"]
    assert few["goals"] == found["ways"]["goals"][:2]
    assert few["rounds"][1]["tasks"] == [ways[:1] for ways in after["tasks"][:2]]


def test_adapted_policies_are_shown_step_after_step(tmp_path, tiny_config):
    settings = {"algorithm": {"name": "promp", "num_epochs": 1, "inner_steps": 5}, "iterations": 1}
    train(tiny_config(**settings), tmp_path / "runs" / "deep", backend=SERIAL)
    found = Viewer(tmp_path / "runs").get("run", "deep", "adaptation", 0)["policies"]
    run = storage.open_run(tmp_path / "runs" / "deep")
    start, adapted = run[0].learner().params, [run[0].adapted(k).params for k in range(5)]
    assert found["steps"] == [1, 2, 3, 4, 5]
    moved = [[np.sqrt(sum(((of[n][b] - start[n]) ** 2).sum() for n in start)) for b in range(4)] for of in adapted]
    np.testing.assert_allclose(found["distances"], moved, rtol=1e-4)


def test_a_thinned_run_says_what_is_gone_and_shows_what_is_left(runs):
    whole = Viewer(runs).get("run", "tiny", "curves")
    assert cli.run(["thin", str(runs / "tiny"), "--keep-last", "1"]) == 0
    viewer = Viewer(runs)
    assert viewer.get("run", "tiny")["thinned"] == {"spans": [[0, 1]]}
    assert viewer.get("run", "tiny", "curves") == whole
    page = viewer.get("run", "tiny", "iteration", 0)
    assert {s["label"] for s in page["stages"] if s["thinned"]} >= {"collect_rollouts k=0", "process_samples k=1"}
    assert page["returns"]["steps"]["1"]["returns"]
    gone = viewer.api("run", "tiny", "values", 0, *ROLLOUTS, array="rollouts_1/rewards", at="0,0,0", columns=2)
    assert gone.status_code == 410
    assert "--materialise" in gone.json()["problem"]
    assert "--materialise" in viewer.get("run", "tiny", "adaptation", 0)["policies"]["problem"]


def test_a_packed_run_reads_as_before(runs):
    asked = [("run", "tiny", "curves"), ("run", "tiny", "iteration", 0), ("run", "tiny", "adaptation", 0)]
    before = [Viewer(runs).get(*parts) for parts in asked]
    viewer = Viewer(runs)
    assert viewer.get("run", "tiny")["packed"] == []
    assert cli.run(["pack", str(runs / "tiny")]) == 0
    assert viewer.get("run", "tiny")["packed"] == [[0, 1]]
    assert [viewer.get(*parts) for parts in asked] == before


def test_damage_is_told_in_its_place_and_the_rest_is_shown(runs, viewer):
    run = storage.open_run(runs / "tiny")
    record = run.record(StageRef(1, *ROLLOUTS))
    (chunk,) = (chunk for chunk in record.chunks if chunk.array == "rollouts_1/rewards")
    flip(runs / "tiny" / chunk.path, -6)
    damaged = viewer.api("run", "tiny", "values", 1, *ROLLOUTS, array="rollouts_1/rewards", at="0,0,0", columns=2)
    assert damaged.status_code == 422
    assert "metaloom verify" in damaged.json()["problem"]
    flip(runs / "tiny" / "_commits" / StageRef(1, "adapt").file_name, 40)
    page = viewer.get("run", "tiny", "iteration", 1)
    assert len(page["problems"]) == 1
    assert "adapt.0.json" in page["problems"][0]
    assert [stage["stage"] for stage in page["stages"]].count("collect_rollouts") == 2
    assert viewer.get("run", "tiny")["info"]["iterations_done"] == 3
    assert viewer.get("run", "tiny", "curves")["problems"] == []


def test_an_iteration_whose_table_is_damaged_is_left_out_of_curves_until_it_is_mended(runs, viewer):
    whole = Viewer(runs).get("run", "tiny", "curves")
    table = runs / "tiny" / "tables" / "episodes" / "00000001.parquet"
    sound = table.read_bytes()
    flip(table, 30)
    found = viewer.get("run", "tiny", "curves")
    assert found["iterations"] == [0, 2]
    assert [item["iteration"] for item in found["problems"]] == [1]
    assert "00000001.parquet" in found["problems"][0]["message"]
    assert viewer.get("run", "tiny", "iteration", 1)["returns"].keys() == {"problem"}
    table.write_bytes(sound)
    assert viewer.get("run", "tiny", "curves") == whole


def test_of_many_damaged_iterations_only_some_are_told(runs, viewer, monkeypatch):
    for i in (0, 1):
        flip(runs / "tiny" / "tables" / "episodes" / f"{i:08}.parquet", 30)
    monkeypatch.setattr(viewer_curves, "MOST_PROBLEMS", 1)
    found = viewer.get("run", "tiny", "curves")
    assert found["iterations"] == [2]
    assert [item["iteration"] for item in found["problems"]] == [0]


def test_what_curves_leave_out_is_told_in_the_order_of_iterations(runs, monkeypatch):
    curves = Curves(storage.open_run(runs / "tiny"))
    # As of an evaluation and of an earlier table that are damaged: evaluations are read first.
    monkeypatch.setattr(curves, "_read_on", lambda: curves._problems.update({2: "its evaluation", 0: "its table"}))
    told = [{"iteration": 0, "message": "its table"}, {"iteration": 2, "message": "its evaluation"}]
    assert curves.data()["problems"] == told


def test_another_run_under_the_same_name_is_opened_anew(runs, viewer, tiny_config):
    assert viewer.get("run", "tiny", "curves")["iterations"] == [0, 1, 2]
    shutil.rmtree(runs / "tiny")
    train(tiny_config(iterations=1, seed=8), runs / "tiny", backend=SERIAL)
    assert viewer.get("run", "tiny", "curves")["iterations"] == [0]


@pytest.mark.parametrize(
    "parts", [("nothing",), ("nothing", "curves"), ("tiny", "iteration", 9), ("tiny", "output", 0, "adapt", 7)]
)
def test_what_is_not_there_is_told_with_what_is(viewer, parts):
    answer = viewer.api("run", *parts)
    assert answer.status_code == 404
    assert answer.json()["problem"]


def test_an_array_and_an_episode_that_are_not_there_are_named(viewer):
    wrong = "episode must be an integer, got"
    for parts, query, message in (
        (("array", 2, *ROLLOUTS), {"array": "rollouts_0/rewards"}, "has no array 'rollouts_0/rewards'"),
        (("episode", 2, *ROLLOUTS), {"task": 4, "episode": 0}, "no stored episode 0 of task 4; the batch has 4 "),
        (("episode", 2, *ROLLOUTS), {"task": 3, "episode": 9}, "no stored episode 9 of task 3; "),
        (("episode", 2, *ROLLOUTS), {"task": 3, "episode": 10**9 - 1}, "no stored episode 999999999 of task 3; "),
        (("episode", 2, *ROLLOUTS), {"task": 3, "episode": 10**9}, f"{wrong} '1000000000'"),
        (("episode", 2, *ROLLOUTS), {"task": 3, "episode": "x"}, f"{wrong} 'x'"),
    ):
        answer = viewer.api("run", "tiny", *parts, **query)
        assert (answer.status_code, message in answer.json()["problem"]) == (422, True), answer.text


def test_films_of_long_episodes_show_at_most_120_pictures(monkeypatch):
    monkeypatch.setattr(filming, "_film", lambda *about: about)
    run = SimpleNamespace(info={"sha256": "0"}, location="there")
    found = [filming.sheet(run, 2, 1, 3, 0, length)[-1] for length in (10, 119, 120, 238, 239)]
    assert found == [1, 1, 2, 2, 3]  # the reset is a picture as well
    chosen = ("--task", "3", "--episode", "0", "--step", "1")
    assert filming.sheet(run, 2, 1, 3, 0, 10) == ("0", "there@2", chosen, 1)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("", "`metaloom video` ended with code 3"),
        (" no\x1b screen\n", "no\N{REPLACEMENT CHARACTER} screen"),
        (None, "no video of there@2 after 300 s; `metaloom video` waits longer"),
    ],
)
def test_a_film_that_fails_or_takes_too_long_is_reported(said, message, monkeypatch):
    def run(command, **options):
        if said is None:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return SimpleNamespace(stderr=said, returncode=3)

    monkeypatch.setattr(filming.subprocess, "run", run)
    with pytest.raises(UsageError) as error:
        filming.sheet(SimpleNamespace(info={"sha256": message}, location="there"), 2, 0, 0, 0, 5)
    assert str(error.value) == message


def test_an_address_that_leads_nowhere_links_to_the_runs(viewer):
    answer = viewer.answer(f"/{TOKEN}/nonsense")
    assert answer.status_code == 404
    assert f'href="/{TOKEN}/"' in answer.text


def test_an_empty_folder_says_which_command_trains_a_run_in_it(tmp_path):
    command = shlex.split(Viewer(tmp_path / "runs with space").get("place")["train"])
    assert command[1:] == ["train", "first-steps", "--run", f"{tmp_path / 'runs with space'}/first"]
    assert new_config(command[2]).iterations > 0


@pytest.mark.slow
def test_an_episode_is_filmed_as_a_sheet_of_pictures(viewer):
    answer = viewer.api("run", "tiny", "film", 2, *ROLLOUTS, task=1, episode=0)
    assert answer.status_code == 200, answer.text
    frames, columns = int(answer.headers["x-frames"]), int(answer.headers["x-columns"])
    assert (frames, columns, answer.headers["x-every"]) == (11, 10, "1")  # 10 steps, and what reset returned
    assert "observations agree with the stored ones" in answer.headers["x-told"]
    with Image.open(io.BytesIO(answer.content)) as sheet:
        assert (sheet.width % columns, sheet.height % 2) == (0, 0)
        first, last = (
            sheet.crop((0, 0, sheet.width // 10, sheet.height // 2)),
            sheet.crop((0, sheet.height // 2, sheet.width // 10, sheet.height)),
        )
        assert first.tobytes() != last.tobytes()
    refused = viewer.api("run", "tiny", "film", 2, *ROLLOUTS, task=9, episode=0)
    assert "no task 9" in refused.json()["problem"]
