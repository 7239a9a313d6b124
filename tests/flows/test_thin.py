"""`metaloom thin`, retention while training, and `metaloom replay --materialise`."""

import json

import pytest

from metaloom import storage
from metaloom.flows.cli import run as command
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.thin import materialise
from metaloom.flows.commands.train import resume, train
from metaloom.flows.graph.runner import Runner
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import ConfigError
from metaloom.storage import StageRef
from metaloom.storage.read.committed import CommittedFiles

pytestmark = pytest.mark.usefixtures("warm")

SERIAL = Backend(workers=0)


@pytest.fixture
def trained(tmp_path, tiny_config, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    train(tiny_config(), tmp_path / "run", backend=SERIAL)
    return tmp_path / "run"


def files_of(path):
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def data_of(path):
    return {name: content for name, content in files_of(path).items() if not name.startswith("_sessions")}


def test_what_was_thinned_is_computed_again_with_its_old_digest_byte_for_byte(trained, digests, capsys):
    before, data = digests(trained), data_of(trained)
    assert command(["thin", "run", "--keep-every", "2"]) == 0
    assert "removed: 1 iteration," in capsys.readouterr().out
    assert storage.open_run(trained).thinned_iterations() == [1]
    assert len(data_of(trained)) < len(data)
    assert command(["replay", "run@1", "--materialise"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"iteration 1, {stage}: stored again with the same digest"
        for k in (0, 1)
        for stage in (f"collect_rollouts k={k}", f"process_samples k={k}", "adapt k=0")[: 3 - k]
    ]
    assert data_of(trained) == data
    assert digests(trained) == before
    assert storage.verify_run(trained) == []
    assert command(["replay", "run@1", "--materialise"]) == 0
    assert "no outputs are thinned" in capsys.readouterr().out


def test_all_that_was_thinned_can_be_asked_for_at_once(trained, capsys):
    data = data_of(trained)
    assert command(["thin", "run", "--keep-last", "0"]) == 0
    assert command(["replay", "run", "--materialise", "--json"]) == 0
    assert data_of(trained) == data
    out = capsys.readouterr().out
    assert len(json.loads(out[out.index("[") :])) == 15


def test_a_run_to_which_nothing_is_missing_says_so_and_how_it_goes_on(trained, capsys):
    assert command(["resume", "run", "--workers", "0"]) == 0
    told = capsys.readouterr().out
    assert "nothing to do: the run already has its 3 iterations; for more: metaloom resume" in told
    assert command(["replay", "run@7"]) == 1
    assert "run --iterations 8` computes it" in capsys.readouterr().err


def test_a_dry_run_tells_what_would_go_reads_each_record_once_and_changes_nothing(trained, capsys, monkeypatch):
    before, read, record = files_of(trained), [], CommittedFiles.record
    with monkeypatch.context() as patch:
        patch.setattr(CommittedFiles, "record", lambda files, ref: (read.append(ref), record(files, ref))[1])
        assert command(["thin", "run", "--keep-last", "1", "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert len(read) == len({*read}) == 10
    assert files_of(trained) == before
    assert command(["thin", "run", "--keep-last", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**planned, "dry_run": False}
    assert planned["iterations"] == [0, 1]
    assert command(["thin", "run", "--keep-last", "1", "--dry-run"]) == 0
    assert "would remove: 0 iterations, 0 files" in capsys.readouterr().out


def test_thinning_needs_to_know_what_stays(trained, capsys):
    assert command(["thin", "run"]) == 2
    assert "pass --keep-every, --keep-last or both" in capsys.readouterr().err
    assert command(["replay", "run@0", "--materialise", "--stage", "adapt"]) == 2
    assert "whole iterations" in capsys.readouterr().err


def test_what_was_thinned_is_shown_and_replayed_from_inputs_computed_again(trained, capsys):
    command(["thin", "run", "--keep-last", "1"])
    capsys.readouterr()
    assert command(["show", "run"]) == 0
    assert "2 iterations" in capsys.readouterr().out
    assert command(["show", "run@0"]) == 0
    assert capsys.readouterr().out.count("thinned") == 5
    before = files_of(trained)
    assert command(["replay", "run@0", "--stage", "meta_optimize"]) == 0
    assert command(["replay", "run"]) == 0
    assert "22 stages replayed: all identical" in capsys.readouterr().out
    counted = {
        "process_samples": "1 of them was thinned and compared only with its record",
        "meta_optimize": "identical",
    }
    for stage, ending in counted.items():
        assert command(["replay", "run@0", "--stage", stage, "--step", "0"]) == 0
        assert capsys.readouterr().out.strip().endswith(ending)
    assert files_of(trained) == before


def test_a_replay_of_what_was_thinned_names_the_arrays_that_differ(trained, monkeypatch, capsys):
    command(["thin", "run", "--keep-last", "1"])
    original = Runner.run

    def changed(stages, ref, inputs):
        value = original(stages, ref, inputs)
        if ref == StageRef(0, "collect_rollouts", 1):
            value.rewards[0, 0, 0] += 1
        return value

    monkeypatch.setattr(Runner, "run", changed)
    capsys.readouterr()
    assert command(["replay", "run@0", "--stage", "collect_rollouts", "--step", "1", "--json"]) == 1
    (outcome,) = json.loads(capsys.readouterr().out)
    assert [difference["array"] for difference in outcome["differences"]] == ["rewards"]
    assert command(["replay", "run@0", "--stage", "process_samples", "--step", "1"]) == 1  # of this input
    assert "collect_rollouts(i=0, k=1): values in rewards that differ" in capsys.readouterr().err


def test_an_iteration_that_is_not_stored_cannot_be_materialised(trained, capsys):
    assert command(["replay", "run@9", "--materialise"]) == 1
    assert "no output of iteration 9 is stored" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--stage", "adapt"), ("--step", "0"), ("--until-diff",)])
def test_only_whole_iterations_are_materialised(trained, capsys, option):
    assert command(["replay", "run@0", "--materialise", *option]) == 2
    assert "remove --stage, --step and --until-diff" in capsys.readouterr().err


def test_retention_thins_while_training_and_changes_no_number(trained, tmp_path, tiny_config, digests):
    config = tiny_config(retention={"keep_last": 1, "keep_every": 2})
    assert config.digest() == tiny_config().digest()
    train(config, tmp_path / "thin", backend=SERIAL)
    run = storage.open_run(tmp_path / "thin")
    assert run.thinned_iterations() == [1]
    assert digests(tmp_path / "thin") == digests(trained)
    assert run.metrics().drop(["iteration"]).equals(storage.open_run(trained).metrics().drop(["iteration"]))
    assert storage.verify_run(tmp_path / "thin") == []


def test_a_run_stopped_by_its_limit_goes_on_under_a_larger_one(tmp_path, tiny_config, trained, digests):
    size = sum(map(len, files_of(trained).values()))
    path = tmp_path / "small"
    with pytest.raises(storage.BudgetReached, match=r"metaloom resume .*small --set retention.max_bytes"):
        train(tiny_config(retention={"max_bytes": size - 10_000}), path, backend=SERIAL)
    assert sum(map(len, files_of(path).values())) < size - 10_000
    assert digests(path).items() < digests(trained).items()
    assert storage.verify_run(path) == []
    with pytest.raises(storage.BudgetReached):
        resume(path, backend=SERIAL)
    # Of what waits to be stored as much is set aside as it can take at most.
    resume(path, retention=[f"retention.max_bytes={size * 3}"], backend=SERIAL)
    assert digests(path) == digests(trained)


def test_resume_changes_nothing_but_retention(trained, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"except retention.*metaloom fork"):
        resume(trained, retention=["seed=2"], backend=SERIAL)
    with pytest.raises(ConfigError, match="unknown key"):
        resume(trained, retention=["retention.keep=2"], backend=SERIAL)
    arguments = ["resume", "run", "--iterations", "4", "--workers", "0", "--set", "retention.keep_last=2"]
    assert command(arguments) == 0
    assert storage.open_run(trained).thinned_iterations() == [0, 1]


def test_a_stage_that_gives_other_bits_now_is_not_stored(trained, monkeypatch):
    command(["thin", "run", "--keep-last", "0"])
    before = files_of(trained)
    original = Runner.run

    def changed(stages, ref, inputs):
        value = original(stages, ref, inputs)
        if ref == StageRef(1, "collect_rollouts", 1):
            value.rewards[0, 0, 0] += 1
        return value

    monkeypatch.setattr(Runner, "run", changed)
    with pytest.raises(storage.DigestMismatch, match=r"collect_rollouts\(i=1, k=1\): values in rewards that differ"):
        list(materialise(trained, 1))
    after = files_of(trained)
    assert {name for name in before.keys() ^ after.keys() if not name.startswith("_sessions")} == set()
    assert storage.verify_run(trained) == []


def test_what_a_fork_took_from_its_parent_is_materialised_under_the_parents_settings(trained, tmp_path):
    fork(trained, 2, tmp_path / "child", ["algorithm.clip_eps=0.01", "algorithm.inner_lr=0.2"])
    resume(tmp_path / "child", backend=SERIAL)
    data = data_of(tmp_path / "child")
    command(["thin", "child", "--keep-last", "0"])
    assert len(list(materialise(tmp_path / "child"))) == 15
    assert data_of(tmp_path / "child") == data
    assert all(outcome.identical for outcome in replay(tmp_path / "child", 1))


def test_a_lost_record_of_a_thinned_iteration_ends_resuming_with_the_command_that_computes_it(trained, digests, capsys):
    before = digests(trained)
    assert command(["thin", "run", "--keep-last", "0"]) == 0
    (trained / "_commits" / "00000001.process_samples.0.json").unlink()
    assert command(["resume", "run"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "thinned" in line]
    assert "resume" in line
    assert "--repair" in line
    assert command(["resume", "run", "--repair"]) == 0
    assert digests(trained) == before


def test_how_often_records_are_listed_does_not_grow_with_the_run(trained, tmp_path, monkeypatch):
    listings, live_refs = [], CommittedFiles.live_refs

    def counted(files, iterations=None):
        listings.append(files.root)
        return live_refs(files, iterations)

    monkeypatch.setattr(CommittedFiles, "live_refs", counted)

    def count(name):
        counts = {}
        for words in ("thin run --keep-every 2 --dry-run", "thin run --keep-every 2", "replay run --materialise",
                      "du run", "verify run", "ls", f"export run --to parquet --out {tmp_path / name}"):  # fmt: skip
            listings.clear()
            assert command(words.split()) == 0
            counts[words.split(" --out")[0]] = len(listings)
        return counts

    short = count("short")
    resume(trained, iterations=9, backend=SERIAL)
    assert count("long") == short
