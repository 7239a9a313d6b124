"""Runs under object storage, against a real S3 server process: written, killed, fenced out, damaged, forgotten."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
import s3fs
from viewing import TOKEN, Viewer, visit

from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import Observer, resume, train
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.viewer import pages
from metaloom.flows.views.run_info import list_run_row
from metaloom.pipeline.config.run import build_config
from metaloom.storage import StageRef
from metaloom.storage.format.sessions import newest_session
from metaloom.storage.format.stages import OFF_POLICY
from metaloom.storage.remote.log import RemoteLog
from metaloom.storage.remote.objects import ObjectFolder
from metaloom.storage.remote.session import RemoteSession

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("credentials", "warm"),
    # botocore's own, of what its next version will ask for.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore", "ignore::DeprecationWarning:aiobotocore"),
]

CREATION = {"config": {"seed": 1}, "config_digest": "abc", "environment": {"code": "none"}}
URL = "s3://bucket/runs"
SETTINGS = {
    "env": {"name": "point-corner", "options": {"reward": "dense"}},
    "algorithm": {"name": "promp", "num_epochs": 1, "tasks_per_chunk": 2},
    "policy": {"hidden_sizes": [4]},
    "iterations": 2,
    "num_tasks": 2,
    "episodes_per_task": 2,
    "max_episode_steps": 4,
    "seed": 7,
}
KILLED_TRAINER = """
import os, signal, sys
from pathlib import Path
from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.viewer import pages
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.config.input import load_config
from metaloom.storage.remote.objects import ObjectFolder

put_new, count = ObjectFolder.put_new, 0

def put_until_killed(self, key, content):
    global count
    count += 1
    if count == int(sys.argv[2]) and sys.argv[3] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    stored = put_new(self, key, content)
    if count == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return stored

ObjectFolder.put_new = put_until_killed
train(build_config(load_config(Path(sys.argv[1]))), storage.folder_of(sys.argv[4]), backend=Backend(workers=0))
"""


def digests(run):
    return {ref: run.record(ref).digest for ref in run.refs()}


def test_every_command_works_on_a_run_that_another_process_trained(bucket, tmp_path, other_machine, capsys):
    def metaloom(*arguments):
        assert cli.run(list(arguments)) == 0
        return capsys.readouterr().out

    Path("tiny.json").write_text(json.dumps(SETTINGS))
    command = [sys.executable, "-m", "metaloom.flows.cli", "train", "tiny.json", "--run", "first", "--workers", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"run             {URL}/first" in done.stdout
    train(build_config({**SETTINGS, "iterations": 3}), tmp_path / "local", backend=Backend(workers=0))
    other_machine("second")
    assert "2 / 2" in metaloom("ls")
    assert "every file is intact" in metaloom("verify", "first")
    assert json.loads(metaloom("show", "first", "--json"))["path"] == f"{URL}/first"
    assert "all identical" in metaloom("replay", f"{URL}/first@1")
    forked = metaloom("fork", "first@1", "--run", "second")
    assert "all was uploaded" in forked
    assert f"metaloom resume {URL}/second" in forked
    metaloom("resume", "first", "--iterations", "3", "--workers", "0")
    assert Path("reports/first/report.html").exists()
    run, local = storage.open_run(f"{URL}/first"), storage.open_run("local")
    assert digests(run) == digests(local)
    assert run.episodes() == local.episodes()
    assert run.metrics() == local.metrics()
    start = pinned(build_config({**SETTINGS, "init_from": {"run": "first"}})).init_from
    assert start is not None
    assert start.run == f"{URL}/first"


def test_small_objects_are_read_with_one_request_each(bucket, monkeypatch):
    folder, asked, call = ObjectFolder(f"{URL}/first"), [], s3fs.S3FileSystem._call_s3
    folder.put_all({"a": b"1", "b": b"2"})

    async def counted(self, method, *arguments, **others):
        asked.append(method)
        return await call(self, method, *arguments, **others)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
    assert folder.get_all(["a", "b", "c"]) == [b"1", b"2", None]
    assert asked == ["get_object"] * 3
    asked.clear()
    assert folder.get_all(["a"], num_bytes=2**27) == [b"1"]  # as large ones are read in parts
    assert asked == ["head_object", "get_object"]


def test_the_page_over_runs_follows_those_under_a_url(bucket, other_machine, monkeypatch):
    monkeypatch.setattr(pages, "REMOTE_SECONDS", 0.0)
    seen: list[StageRef] = []
    stop = Observer(should_stop=lambda: bool(seen and seen[-1].iteration), stage_started=seen.append)
    train(build_config(SETTINGS), storage.folder_of(f"{URL}/first"), backend=Backend(workers=0), observer=stop)
    here = os.environ["METALOOM_CACHE"]
    other_machine("reader")
    viewer = Viewer(storage.folder_of(URL))
    assert viewer.get("run", "first", "curves")["iterations"] == [0]
    monkeypatch.setenv("METALOOM_CACHE", here)
    resume(storage.folder_of(f"{URL}/first"), backend=Backend(workers=0))
    other_machine("reader")
    assert viewer.get("run", "first", "curves")["iterations"] == [0, 1]
    assert viewer.get("place")["place"] == URL
    assert not [answer.text for answer in visit(viewer.app, TOKEN) if answer.status_code >= 500]
    (command, *_) = viewer.get("run", "first", "iteration", 1)["commands"]
    assert command.endswith(f" show {URL}/first@1")
    assert Viewer(storage.folder_of(f"{URL}/first")).get("place")["only"] == "first"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The digests of a run that nothing interrupted."""
    path = tmp_path_factory.mktemp("whole") / "run"
    train(build_config(SETTINGS), path, backend=Backend(workers=0))
    return digests(storage.open_run(path))


@pytest.mark.parametrize(
    ("put_number", "moment", "elsewhere"),
    [(2, "before", False), (9, "before", True), pytest.param(9, "after", False, marks=pytest.mark.sweep)],
)
def test_a_trainer_killed_in_the_middle_of_an_upload_resumes_to_equal_digests(
    bucket, whole, other_machine, put_number, moment, elsewhere
):
    Path("tiny.json").write_text(json.dumps(SETTINGS))
    child = [sys.executable, "-c", KILLED_TRAINER, "tiny.json", str(put_number), moment, f"{URL}/killed"]
    assert subprocess.run(child, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    if elsewhere:
        other_machine("second")
    folder = storage.folder_of(f"{URL}/killed")
    if not storage.run_exists(folder):
        assert put_number == 2
        train(build_config(SETTINGS), folder, backend=Backend(workers=0))
    elif elsewhere:
        with pytest.raises(storage.RunLocked, match="--take-over"):
            resume(folder, backend=Backend(workers=0))
        resume(folder, backend=Backend(workers=0), take_over=True)
    else:
        resume(folder, backend=Backend(workers=0))
    assert digests(storage.open_run(folder)) == whole
    other_machine("third")
    assert storage.verify_run(f"{URL}/killed") == []


def test_a_second_writer_is_refused_here_and_elsewhere(make_remote, other_machine):
    url = make_remote("first")
    with storage.open_writer(url):
        with pytest.raises(storage.RunLocked, match="no other writer"):
            storage.open_writer(url)
        other_machine("second")
        with pytest.raises(storage.RunLocked, match=rf"{socket.gethostname()} has been writing it since"):
            storage.open_writer(url)
    storage.open_writer(url).close()


def test_what_a_session_computed_with_is_known_on_another_machine(make_remote, batches, put, other_machine):
    url = make_remote("first")
    with storage.open_writer(url) as writer:
        writer.describe({"code": "changed"})
        put(writer, batches.iteration(1))
    other_machine("second")
    run = storage.open_run(url)
    assert [run.environment_of(StageRef(i, "meta_optimize"))["code"] for i in (0, 1)] == ["none", "changed"]
    session = newest_session(run.path, 0)
    assert session is not None
    assert session.head is not None
    assert session.head.ref == StageRef(1, "meta_optimize")  # without which nobody there would miss the newest record
    assert storage.verify_run(url) == []


def test_a_run_is_not_created_over_one_that_another_machine_has_stored(make_remote, other_machine):
    url = make_remote("first")
    other_machine("second")
    with pytest.raises(storage.RunExists):
        storage.create_run(url, capacity=4, **CREATION)


def test_a_creation_that_died_elsewhere_is_told_from_a_run(bucket, other_machine, monkeypatch):
    with monkeypatch.context() as network:
        network.setattr(RemoteSession, "commit", _fail)
        network.setattr(RemoteSession, "end", lambda _: None)
        network.setattr(RemoteSession, "commit_all", _fail)
        with pytest.raises(storage.StorageFailed, match="no route"):
            storage.create_run(f"{URL}/first", capacity=1, **CREATION)
    other_machine("second")
    with pytest.raises(storage.RunLocked, match="had not even created the run: remove s3://bucket/runs/first"):
        storage.create_run(f"{URL}/first", capacity=1, **CREATION)


def test_a_writer_that_lost_the_run_without_knowing_commits_nothing_more(make_remote, batches, put, other_machine):
    url = make_remote("first")
    zombie = storage.open_writer(url)
    other_machine("second")
    with storage.open_writer(url, take_over=True) as heir:
        put(heir, batches.iteration(1, rounds=1))
        heir.flush()
        before = digests(storage.open_run(url))
        put(zombie, batches.iteration(1, rounds=1)[:1])
        with pytest.raises(storage.FencedOut):
            zombie.flush()
        with pytest.raises(storage.FencedOut):
            zombie.close()
        put(heir, batches.iteration(2, rounds=1))
    other_machine("third")
    run = storage.open_run(url)
    assert len(run.iterations) == 3
    assert {ref: digest for ref, digest in digests(run).items() if ref.iteration < 2} == before
    assert storage.verify_run(url) == []


def test_damaged_objects_are_named_when_read_and_by_verification_and_can_be_computed_again(
    make_remote, batches, put, other_machine, bucket
):
    url = make_remote("first", iterations=2)
    before = digests(storage.open_run(url))
    changed = next(key for key in bucket.find("bucket/runs/first/_objects") if "rollouts_0/rewards/c.1" in key)
    missing = next(key for key in bucket.find("bucket/runs/first/_objects") if "samples_0/returns/c.0" in key)
    raw = bucket.cat_file(changed)
    bucket.pipe_file(changed, raw[:-1] + bytes([raw[-1] ^ 1]))
    bucket.rm(missing)
    here = {str(damage).split(": ")[0] for damage in storage.verify_run(url)}
    other_machine("second")
    with pytest.raises(storage.DamagedRun, match=r"rollouts_0/rewards/c.1.*SHA-256"):
        storage.open_run(url)[1].rollouts(0)
    with pytest.raises(storage.DamagedRun, match=r"samples_0/returns/c.0.*: missing"):
        storage.open_run(url)[0].samples(0)
    found = storage.verify_run(url)
    assert {str(damage).split(": ")[0] for damage in found} == here
    assert {(damage.iteration, damage.stage, damage.array) for damage in found} == {
        (1, "collect_rollouts", "rollouts_0/rewards"),
        (0, "process_samples", "samples_0/returns"),
    }
    same = type(batches)()
    outputs = [output for i in range(2) for output in same.iteration(i, rounds=1)]
    with storage.open_writer(url, repair=True) as writer:
        lost = [output for output in outputs if not writer.contains(output[0])]
        assert {output[0].stage for output in lost} == {"collect_rollouts", "process_samples", "meta_optimize"}
        put(writer, lost)
    other_machine("third")
    assert storage.verify_run(url) == []
    assert digests(storage.open_run(url)) == before


def test_what_another_machine_computed_anew_replaces_what_is_cached_here(
    make_remote, batches, put, other_machine, bucket
):
    other_machine("here")
    url = make_remote("first")
    known = storage.open_run(url)[0].rollouts(0).rewards
    other_machine("there")
    bucket.rm(next(key for key in bucket.find("bucket/runs/first/_objects") if "rollouts_0/rewards/c.0" in key))
    with storage.open_writer(url, repair=True) as writer:
        put(writer, [o for o in type(batches)(seed=9).iteration(0, rounds=1) if not writer.contains(o[0])])
    found = storage.open_run(url)[0].rollouts(0).rewards
    assert (found != known).any()
    other_machine("here")
    assert (storage.open_run(url)[0].rollouts(0).rewards == found).all()


def _flip(content, dice):
    place = dice.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << dice.randrange(8)]) + content[place + 1 :]


DAMAGES = (_flip, lambda content, dice: content[: dice.randrange(len(content))], lambda content, dice: None)
"""A bit flipped, an object cut short, an object lost."""


@pytest.mark.parametrize("trials", [2, pytest.param(300, marks=[pytest.mark.sweep, pytest.mark.timeout(0)])])
def test_after_any_damage_of_objects_a_run_is_whole_or_says_what_is_gone(
    bucket, other_machine, trials, tmp_path, record_property
):
    train(build_config(SETTINGS), storage.folder_of(f"{URL}/first"), backend=Backend(workers=0))
    runs = [{key: bucket.cat_file(key) for key in bucket.find("bucket/runs/first")}]
    with storage.open_writer(f"{URL}/first") as writer:
        writer.pack()
    runs.append({key: bucket.cat_file(key) for key in bucket.find("bucket/runs/first")})
    train(build_config({**SETTINGS, "iterations": 3}), tmp_path / "local", backend=Backend(workers=0))
    expected, outcomes = digests(storage.open_run("local")), Counter[str]()
    for number in range(trials):
        dice, whole = random.Random(number), runs[number % 2]  # as it is, and packed
        bucket.rm("bucket/runs", recursive=True)
        bucket.pipe(whole)
        damaged = dice.sample([key for key in whole if whole[key]], k=dice.choice((1, 1, 2, 3)))
        for key in damaged:
            changed = dice.choice(DAMAGES)(whole[key], dice)
            if changed is None and key == max(name for name in whole if "/_log/" in name):
                changed = b""  # without its newest entry a log is that of a writer that is still at work
            if changed is None:
                bucket.rm_file(key)
            else:
                bucket.pipe_file(key, changed)
        other_machine(f"reader {number}")
        told = ""
        try:
            assert storage.verify_run(f"{URL}/first") != [], damaged
            result = resume(storage.folder_of(f"{URL}/first"), iterations=3, repair=True, backend=Backend(workers=0))
            assert result.damage == [], damaged
        except storage.StoreError as error:
            told = str(error)
        if told:
            # The log says which objects there are: without an entry of it nothing can be known behind it.
            named = {Path(key).name for key in damaged if "/_log/" in key or key.endswith("run.json")}
            assert any(name in told for name in named), (damaged, told)
        else:
            other_machine(f"judge {number}")
            assert digests(storage.open_run(f"{URL}/first")) == expected, damaged
            assert storage.verify_run(f"{URL}/first") == [], damaged
        outcomes["told" if told else "repaired"] += 1
        for name in ("reader", "judge"):
            shutil.rmtree(tmp_path / f"{name} {number}", ignore_errors=True)
    record_property("outcomes", dict(outcomes))


def test_a_sound_copy_in_the_cache_mends_a_damaged_object(make_remote, bucket, other_machine):
    url = make_remote("first")
    bucket.rm(next(key for key in bucket.find("bucket/runs/first/_objects") if "rollouts_0/rewards/c.0" in key))
    with storage.open_writer(url, repair=True) as writer:
        assert writer.contains(StageRef(0, "collect_rollouts", 0))
    other_machine("second")
    assert storage.verify_run(url) == []


def test_a_changed_or_missing_entry_of_the_log_is_named(make_remote, bucket, other_machine):
    url = make_remote("first")
    entry = "bucket/runs/first/_log/00000003.json"
    raw = bucket.cat_file(entry)
    bucket.pipe_file(entry, raw.replace(b"commit", b"comm1t"))
    assert [damage.file for damage in storage.verify_run(url)] == ["_log/00000003.json"]
    other_machine("second")
    with pytest.raises(storage.DamagedRun, match=r"_log/00000003.json"):
        storage.open_run(url)


def test_a_damaged_copy_in_the_cache_is_replaced_by_verification(make_remote):
    url = make_remote("first")
    copy = next(storage.folder_of(url).glob("data.zarr/rollouts_0/rewards/c.*"))
    copy.write_bytes(b"x" * copy.stat().st_size)
    with pytest.raises(storage.DamagedRun):
        storage.open_run(url)[0].rollouts(0)
    assert storage.verify_run(url) == []
    storage.open_run(url)[0].rollouts(0)


def test_only_what_is_asked_for_is_fetched_and_the_cache_may_be_removed_at_any_time(
    make_remote, other_machine, tmp_path
):
    url = make_remote("first", iterations=2)
    expected = storage.open_run(url)[1].rollouts(0).rewards
    other_machine("second")
    run = storage.open_run(url)
    assert list(run.path.rglob("c.*")) == []
    assert (run[1].rollouts(0).rewards == expected).all()
    assert {path.name.split(".")[1] for path in run.path.rglob("c.*")} == {"1"}
    shutil.rmtree(run.path)
    assert (storage.open_run(url)[1].rollouts(0).rewards == expected).all()
    shutil.rmtree(tmp_path / "second")
    assert (storage.open_run(url)[1].rollouts(0).rewards == expected).all()


def test_transitions_are_read_from_the_few_objects_that_hold_them(bucket, batches, put, other_machine):
    with storage.create_run(f"{URL}/first", capacity=1, stages=OFF_POLICY, **CREATION) as writer:
        put(writer, batches.off_policy_iteration(0))
    expected = storage.open_run(f"{URL}/first")[0].transitions(1, context=True)
    other_machine("second")
    run = storage.open_run(f"{URL}/first")
    assert run[0].transitions(1, context=True).equals(expected)
    assert run.stages.last == "update"
    assert not list(run.path.glob("data.zarr/*/initial_state/c.*"))
    assert storage.verify_run(f"{URL}/first") == []


def test_a_run_that_was_removed_from_the_store_is_not_taken_for_the_one_in_the_cache(make_remote, bucket):
    url = make_remote("first")
    bucket.rm("bucket/runs/first", recursive=True)
    with pytest.raises(storage.StoreError, match=r"remove .*first and .*first.log too"):
        storage.open_run(url)


def test_a_reader_sees_what_was_committed_since_it_last_opened_the_run(
    make_remote, batches, put, other_machine, monkeypatch
):
    url = make_remote("first")
    trainer = os.environ["METALOOM_CACHE"]
    other_machine("second")
    assert len(storage.open_run(url)) == 1
    monkeypatch.setenv("METALOOM_CACHE", trainer)
    with storage.open_writer(url) as writer:
        put(writer, batches.iteration(1, rounds=1))
        writer.flush()
        other_machine("second")
        assert len(storage.open_run(url)) == 2
        monkeypatch.setenv("METALOOM_CACHE", trainer)


def test_thinning_frees_the_store_and_can_be_undone(make_remote, batches, bucket, other_machine):
    url = make_remote("first", iterations=2)
    outputs = {ref: value for ref, value, _ in type(batches)().iteration(0, rounds=1)}
    size = sum(bucket.sizes(bucket.find("bucket/runs/first/_objects")))
    other_machine("second")
    reader = storage.open_run(url)
    with storage.open_writer(url) as writer:
        thinned = writer.thin([0])
        assert size - sum(bucket.sizes(bucket.find("bucket/runs/first/_objects"))) == thinned.num_bytes
    other_machine("third")
    with pytest.raises(storage.StageThinned):
        storage.open_run(url)[0].rollouts(0)
    with pytest.raises(storage.StageThinned):
        reader[0].rollouts(0)
    with storage.open_writer(url) as writer:
        writer.restore({ref: value for ref, value in outputs.items() if writer.run.is_thinned(ref)})
        other_machine("fourth")
        assert storage.open_run(url)[0].rollouts(0).rewards.size
    assert storage.verify_run(url) == []


@pytest.mark.parametrize("target", [f"{URL}/second", "local"])
def test_a_fork_has_everything_of_its_own(make_remote, batches, put, bucket, other_machine, target):
    url = make_remote("first", iterations=2)
    before = digests(storage.open_run(url))
    other_machine("second")
    storage.fork_run(storage.open_run(url), 1, target, capacity=4, **CREATION)
    bucket.rm("bucket/runs/first", recursive=True)
    other_machine("third")
    with storage.open_writer(target) as writer:
        put(writer, batches.iteration(1, rounds=1))
    fork = storage.open_run(target)
    assert {ref: digest for ref, digest in digests(fork).items() if ref.iteration < 1} == {
        ref: digest for ref, digest in before.items() if ref.iteration < 1
    }
    assert storage.verify_run(target) == []


def test_what_a_killed_session_uploaded_in_vain_is_removed_by_the_next(make_remote, bucket, other_machine):
    url = make_remote("first")
    writer = storage.open_writer(url)
    token = writer._session.token
    bucket.pipe_file(f"bucket/runs/first/_objects/{token}/00000099/tables/tasks/00000009.parquet", b"in vain")
    other_machine("second")
    storage.open_writer(url, take_over=True).close()
    assert bucket.find(f"bucket/runs/first/_objects/{token}") == []
    with pytest.raises(storage.FencedOut):
        writer.thin([0])
    writer.close()


def test_a_put_whose_answer_got_lost_is_not_taken_for_that_of_another_writer(make_remote, batches, put, monkeypatch):
    url = make_remote("first")
    put_new = ObjectFolder.put_new
    with storage.open_writer(url) as writer:
        monkeypatch.setattr(ObjectFolder, "put_new", lambda *request: put_new(*request) and put_new(*request))
        put(writer, batches.iteration(1, rounds=1))
    assert len(storage.open_run(url)) == 2


def test_a_store_that_ignores_conditions_is_refused(bucket, monkeypatch):
    monkeypatch.setattr(ObjectFolder, "put_new", lambda self, key, content: self.put_all({key: content}) is None)
    with pytest.raises(storage.StorageFailed, match="ignores the condition of a put"):
        storage.create_run(f"{URL}/first", capacity=1, **CREATION)


def test_a_store_that_does_not_answer_ends_a_writer_with_one_message_and_what_it_committed_stays(
    make_remote, batches, put, monkeypatch
):
    url = make_remote("first")
    writer = storage.open_writer(url)
    with monkeypatch.context() as network:
        network.setattr(ObjectFolder, "put_all", _fail)
        put(writer, batches.iteration(1, rounds=1)[:1])
        with pytest.raises(storage.StorageFailed, match="no route to host"):
            writer.flush()
        with pytest.raises(storage.StorageFailed, match="no route to host"):
            writer.close()
    with storage.open_writer(url) as writer:
        put(writer, batches.iteration(1, rounds=1))
    assert len(storage.open_run(url)) == 2


def test_a_store_that_falls_silent_stops_the_training_in_time_and_it_resumes(
    bucket, server, whole, new_clients, monkeypatch, caplog
):
    monkeypatch.setenv("METALOOM_STORE_TIMEOUT", "2")
    monkeypatch.setenv("METALOOM_STORE_TRIES", "2")
    port = server.rpartition(":")[2]
    (moto,) = [child for child in psutil.Process().children() if child.cmdline()[-1:] == [port]]
    folder, observer = storage.folder_of(f"{URL}/silent"), Observer(iteration_done=lambda *_: moto.suspend())
    try:
        with pytest.raises(storage.StorageFailed, match=r"no (complete )?answer.*, 2 times.*metaloom resume"):
            train(build_config(SETTINGS), folder, backend=Backend(workers=0), observer=observer)
    finally:
        moto.resume()
    assert "trying again (2 of 2)" in caplog.text
    monkeypatch.delenv("METALOOM_STORE_TIMEOUT")
    s3fs.S3FileSystem.clear_instance_cache()
    resume(folder, backend=Backend(workers=0))
    assert digests(storage.open_run(folder)) == whole


@pytest.mark.usefixtures("new_clients")
def test_a_store_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("METALOOM_STORE_TRIES", "1")
    with pytest.raises(storage.StorageFailed, match=r"first: EndpointConnectionError.*Check bucket, network"):
        storage.open_run(f"{URL}/first")


def test_a_cache_that_cannot_be_written_is_named(make_remote, monkeypatch, tmp_path):
    url = make_remote("first")
    (tmp_path / "file").touch()
    monkeypatch.setenv("METALOOM_CACHE", str(tmp_path / "file"))
    with pytest.raises(storage.StorageFailed, match="METALOOM_CACHE"):
        storage.open_run(url)


def test_a_url_of_an_unknown_kind_is_refused():
    with pytest.raises(storage.StorageFailed, match="Protocol not known: gopher"):
        storage.open_run("gopher://bucket/runs/first")


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(make_remote, bucket, other_machine):
    make_remote("first")
    make_remote("second")
    bucket.pipe_file("bucket/runs/first/_log/00000001.json", b"{}")
    other_machine("second")
    rows = {row["name"]: row for row in map(list_run_row, storage.find_runs(storage.folder_of(URL)))}
    assert rows["second"]["path"] == f"{URL}/second"
    assert "_log/00000001.json" in rows["first"]["problem"]


def test_what_another_machine_stores_is_in_the_next_listing(bucket):
    folder = ObjectFolder(f"{URL}/first")
    for number in range(2):
        bucket.pipe_file(f"bucket/runs/first/{number}/key", b"x")  # by another client than the folder's
        assert folder.folders() == [str(n) for n in range(number + 1)]
        assert folder.below("") == [f"{n}/key" for n in range(number + 1)]


def test_runs_under_a_url_are_found_from_the_newest_to_the_oldest(monkeypatch):
    created = {"b": "2026-11-02", "a": None, "d": "2026-11-01", "c": "2026-11-03"}
    monkeypatch.setattr(ObjectFolder, "folders", lambda self: [*created])
    monkeypatch.setattr("metaloom.storage.run._created", lambda folder: created[folder.name])
    assert [folder.name for folder in storage.find_runs(storage.folder_of(URL))] == ["c", "b", "d"]


def test_a_limit_of_bytes_counts_what_the_store_holds(make_remote, batches, put, other_machine):
    url = make_remote("first")
    other_machine("second")
    limit = storage.open_run(url).files.num_bytes() + 1000
    writer = storage.open_writer(url, retention=storage.Retention(max_bytes=limit))
    with pytest.raises(storage.BudgetReached):
        put(writer, batches.iteration(1, rounds=1))
    writer.close()


def test_a_file_url_is_a_path(tmp_path):
    assert storage.folder_of(f"file://{tmp_path}/first") == tmp_path / "first"


def test_an_entry_that_names_a_file_outside_of_the_run_is_refused(make_remote, bucket, other_machine):
    url = make_remote("first")
    log = RemoteLog.of(storage.folder_of(url))
    log.pull()
    session = RemoteSession.begin(log, "0" * 16, take_over=False)
    raw = bucket.cat_file(f"bucket/runs/first/_log/{log.next - 1:08d}.json")
    from metaloom.storage.format.files import parse_sealed, render, sealed

    document = parse_sealed(raw) | {"sequence": log.next, "previous": log.last_hash, "kind": "commit"}
    for path in ("../outside.json", "/etc/passwd", "data.zarr/../../x/zarr.json"):
        forged = render(sealed(document | {"files": {path: {"text": "{}"}}}))
        bucket.pipe_file(f"bucket/runs/first/_log/{log.next:08d}.json", forged)
        with pytest.raises(storage.DamagedRun, match="which is not part of a run"):
            storage.open_run(url)
    bucket.rm(f"bucket/runs/first/_log/{log.next:08d}.json")
    session.end()


def test_a_commit_of_what_was_only_moved_is_an_entry_and_one_of_nothing_is_none(make_remote):
    folder = storage.folder_of(make_remote("first"))
    log = RemoteLog.of(folder)
    log.pull()
    session = RemoteSession.begin(log, "0" * 16, take_over=False)
    begun, name = log.next, "data.zarr/rollouts_0/rewards/c.0.0.0.0"
    session.commit({})
    session.commit({folder / "tables" / "nowhere.parquet": None})
    assert log.next == begun
    session.commit({folder / name.replace("c.0", "c.3"): folder / name})
    assert log.next == begun + 1
    assert log.files[name.replace("c.0", "c.3")].key == log.files[name].key
    session.end()


def test_what_makes_a_folder_a_run_is_sent_after_all_else(make_remote, monkeypatch):
    monkeypatch.setattr("metaloom.storage.remote.session._FILES_PER_ENTRY", 1)
    log = RemoteLog.of(storage.folder_of(make_remote("first", iterations=0)))
    log.pull()
    sent = [name for raw in log.cached_entries() for name in json.loads(raw).get("files", ())]
    created = sent[: sent.index("run.json") + 1]
    assert len(created) > 2
    assert "data.zarr/zarr.json" in created
    assert not {*sent[len(created) :]} - {name for name in sent if name.startswith("_sessions")}


def _fail(*_):
    raise storage.StorageFailed("s3", found="no route to host", required="an answer", action="Wait")


def test_another_machine_goes_on_with_a_memory_that_only_the_bucket_has(bucket, tmp_path, other_machine):
    settings = {
        **SETTINGS,
        "env": {"name": "Pendulum-v1"},
        "algorithm": {
            "name": "sac",
            "num_init_memory_steps": 8,
            "memory_size": 14,
            "batch_size": 3,
            "critic_hidden_sizes": [4],
        },
        "num_tasks": 1,
        "episodes_per_task": 1,
    }
    train(build_config(settings), storage.folder_of(f"{URL}/memory"), backend=Backend(workers=0))
    other_machine("second")
    resume(storage.folder_of(f"{URL}/memory"), iterations=4, backend=Backend(workers=0))
    train(build_config({**settings, "iterations": 4}), tmp_path / "local", backend=Backend(workers=0))
    assert digests(storage.open_run(f"{URL}/memory")) == digests(storage.open_run(tmp_path / "local"))
    other_machine("third")
    assert all(outcome.identical for outcome in replay(storage.folder_of(f"{URL}/memory"), 2))
