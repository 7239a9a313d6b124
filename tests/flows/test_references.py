"""`metaloom reference`: runs that ship with the project, and what recomputing them shows."""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows.cli import run as command
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.thin import materialise
from metaloom.flows.commands.train import resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.graph.runner import Runner
from metaloom.flows.recipes import load_settings
from metaloom.flows.references.archive import add, extract, opened
from metaloom.flows.references.index import INDEX, find, read_index, shipped, write_index
from metaloom.flows.references.verify import verify
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.trust import UntrustedRun
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.storage import StageRef
from metaloom.storage.format.canonical import read_sealed, render, sealed

SERIAL = Backend(workers=0)
ITERATIONS, EVERY = 6, 3


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config):
    """A run, and a folder with a reference of it."""
    folder = tmp_path_factory.mktemp("made")
    train(tiny_config(iterations=ITERATIONS), folder / "tiny", backend=SERIAL)
    add(folder / "tiny", folder / "references", learners=EVERY)
    return folder


@pytest.fixture(autouse=True)
def _no_power_cut(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def references(made, tmp_path):
    """A copy of the folder of references, to spoil."""
    return Path(shutil.copytree(made / "references", tmp_path / "references"))


@pytest.fixture
def extracted(made, tmp_path):
    return extract(made / "references", find(made / "references", "tiny"), tmp_path / "tiny")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "writer.lock"}


def test_a_run_stays_as_it_is_when_a_reference_is_made_of_it(made, tmp_path):
    before = contents(made / "tiny")
    add(made / "tiny", tmp_path, "again", learners=EVERY)
    assert contents(made / "tiny") == before


def test_a_reference_has_the_learners_of_some_iterations_and_all_records_and_tables(made, extracted):
    original, reference = storage.open_run(made / "tiny"), storage.open_run(extracted)
    assert storage.verify_run(extracted) == []
    stored = [i for i in range(ITERATIONS + 1) if not reference.is_thinned(reference.learner_ref(i))]
    assert stored == [0, EVERY, 2 * EVERY]
    assert reference.refs() == original.refs()
    assert all(reference.record(ref).content() == original.record(ref).content() for ref in original.refs())
    assert reference.metrics().equals(original.metrics())
    assert reference.episodes().equals(original.episodes())
    assert [reference[i].metrics() for i in range(ITERATIONS)] == [original[i].metrics() for i in range(ITERATIONS)]
    with pytest.raises(storage.StageThinned, match="materialise"):
        reference[2].learner()


@pytest.mark.parametrize("iteration", range(ITERATIONS))
def test_every_iteration_can_be_recomputed_from_the_nearest_learner(extracted, iteration):
    outcome = verify(extracted, iteration)
    assert outcome.identical
    start = iteration // EVERY * EVERY
    # Seven stages an iteration, and before the first one the stage that makes its learner.
    assert (outcome.start, outcome.stages) == (start, 7 * (iteration - start + 1) + (start == 0))
    assert str(outcome).endswith("all identical")


def test_a_whole_reference_can_be_recomputed(extracted):
    assert verify(extracted, None).stages == len(storage.open_run(extracted).refs())


def test_replay_takes_a_reference_as_any_run(extracted):
    assert all(outcome.identical for outcome in replay(extracted))
    assert all(outcome.identical for outcome in replay(extracted, 5, stage="adapt"))


def test_everything_comes_back_with_its_old_digest(made, extracted):
    assert len([*materialise(extracted)]) == 5 * ITERATIONS + 4
    original, back = storage.open_run(made / "tiny"), storage.open_run(extracted)
    assert back.thinned_iterations() == []
    assert storage.verify_run(extracted) == []
    for i in range(ITERATIONS):
        params = original[i].learner().params
        assert all(np.array_equal(params[name], value) for name, value in back[i].learner().params.items())


def test_one_iteration_with_its_learner_comes_back_alone(extracted):
    assert [ref.stage for ref in materialise(extracted, 4)].count("meta_optimize") == 1
    run = storage.open_run(extracted)
    assert not run.is_thinned(run.learner_ref(5))
    assert run.is_thinned(run.learner_ref(4))


def test_a_reference_goes_on_as_its_run_does(made, extracted, tmp_path, digests):
    original = shutil.copytree(made / "tiny", tmp_path / "original")
    for path in (original, extracted):
        resume(path, iterations=ITERATIONS + 2, backend=SERIAL)
    assert digests(original) == digests(extracted)


def test_a_fork_begins_where_a_learner_is(extracted, tmp_path):
    fork(extracted, EVERY, tmp_path / "forked")
    assert len(storage.open_run(tmp_path / "forked").iterations) == EVERY
    with pytest.raises(storage.StageThinned):
        fork(extracted, 2, tmp_path / "none")


@pytest.mark.parametrize("recipe", ["dql", "rl2-navigation-2d"])
def test_runs_of_other_kinds_can_be_references(recipe, tmp_path):
    sizes = ["iterations=4", "max_episode_steps=6", "policy.hidden_sizes=[4]", "evaluation.every=2"]
    if recipe == "dql":
        sizes += ["algorithm.num_init_memory_steps=40", "algorithm.memory_size=70", "algorithm.batch_size=6"]
    else:
        sizes += ["num_tasks=2"]
    train(build_config(override(load_settings(recipe), sizes)), tmp_path / "run", backend=SERIAL)
    reference = add(tmp_path / "run", tmp_path / "references", learners=3)
    with opened(tmp_path / "references", reference) as path:
        assert verify(path, None).identical
        assert verify(path, 2).identical


def test_the_same_run_folder_gives_the_same_archive(references, extracted):
    from metaloom.flows.references.archive import _packed

    assert _packed(extracted, references / "again.zip").read_bytes() == (references / "tiny.zip").read_bytes()


def test_the_commands_list_show_verify_and_extract(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    at = ["--from", str(made / "references")]
    assert command(["reference", "ls", *at]) == 0
    assert "tiny" in capsys.readouterr().out
    assert command(["reference", "ls", *at, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    metrics = storage.open_run(made / "tiny")[ITERATIONS - 1].metrics()
    assert (row["algorithm"], row["last_return"]) == ("promp", metrics["step_1.average_return"])
    assert command(["reference", "show", "tiny", *at]) == 0
    out = capsys.readouterr().out
    assert "return by class of task" in out
    assert "tiny.zip" in out
    assert command(["reference", "show", "tiny", *at, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(Path(at[1]) / "tiny.zip")
    assert command(["reference", "show", "tiny@2", *at, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["stages"]
    assert [stage["thinned"] for stage in shown] == [False, *[True] * 5, False]  # it led to learner 3
    assert command(["reference", "verify", "tiny@4", *at, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["start"] == EVERY
    assert command(["reference", "extract", "tiny", "--run", "mine", *at]) == 0
    assert storage.verify_run(tmp_path / "runs" / "mine") == []
    assert command(["reference", "extract", "tiny", "--run", "mine", *at]) == 2
    assert "already" in capsys.readouterr().err
    assert command(["reference", "add", str(made / "tiny"), "--name", "second", "--to", str(tmp_path / "more")]) == 0
    assert [reference.name for reference in read_index(tmp_path / "more")] == ["second"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ls --from nowhere", "no references here"),
        ("verify tny@2", "did you mean tiny"),
        ("verify tiny@best", "found 'best' after the @"),
        ("extract tiny@2", "found an iteration"),
    ],
)
def test_what_there_is_not_is_told_with_what_there_is(made, words, said, capsys):
    place = [] if "--from" in words else ["--from", str(made / "references")]
    assert command(["reference", *words.split(), *place]) == 2
    assert said in capsys.readouterr().err


def test_an_iteration_that_is_not_there_is_told(made, capsys):
    assert command(["reference", "verify", "tiny@6", "--from", str(made / "references")]) == 1
    assert "nothing of iteration 6 is stored" in capsys.readouterr().err


def computes_otherwise(monkeypatch):
    """Have the rewards of iteration 4 be other ones."""
    right = Runner.run

    def wrong(stages, ref, inputs):
        value = right(stages, ref, inputs)
        if ref != StageRef(4, "process_samples", 1):
            return value
        return dataclasses.replace(value, advantages=value.advantages * np.float32(1.5))

    monkeypatch.setattr(Runner, "run", wrong)


def test_a_difference_is_told_where_it_is_and_how_far_it_leads(made, monkeypatch, capsys):
    computes_otherwise(monkeypatch)
    assert command(["reference", "verify", "tiny@5", "--from", str(made / "references"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["first_difference"] == {"iteration": 4, "stage": "process_samples", "step": 1}
    assert (told["stages"], told["differs"]) == (21, [])
    recorded, computed = told["returns"]
    assert recorded == storage.open_run(made / "tiny")[5].metrics()["step_1.average_return"] != computed
    assert command(["reference", "verify", "tiny@5", "--from", str(made / "references")]) == 1
    assert "NOT identical from iteration 4, process_samples" in capsys.readouterr().out
    assert command(["reference", "verify", "tiny@3", "--from", str(made / "references")]) == 0


def test_on_another_processor_a_difference_is_no_error_and_the_class_is_told(extracted, monkeypatch):
    from metaloom.flows.references import verify as module

    computes_otherwise(monkeypatch)
    monkeypatch.setattr(module, "system", lambda: {"cpu": "x", "cpu_flags": "fpu new", "libc": "glibc 9.9"})
    outcome = verify(extracted, 4)
    assert not outcome.identical
    assert "promised for the same versions and kind of processor only" in str(outcome)
    assert "glibc 9.9 now" in str(outcome)
    assert "with new" in str(outcome)


def test_a_run_that_is_not_complete_or_others_could_not_compute_is_refused(made, tmp_path, monkeypatch):
    folder = made / "references"
    with pytest.raises(UsageError, match="a reference tiny already"):
        add(made / "tiny", folder)
    fork(made / "tiny", 1, tmp_path / "half")
    with pytest.raises(UsageError, match="1 of 6 iterations; required a complete run"):
        add(tmp_path / "half", folder)
    monkeypatch.setattr("metaloom.flows.references.archive.names_of_run", lambda run: ["my_envs:Reach"])
    with pytest.raises(UsageError, match="settings that name my_envs:Reach"):
        add(made / "tiny", folder, "own")


def test_runs_under_a_url_are_refused(made, capsys):
    at = ["--from", str(made / "references")]
    assert command(["reference", "extract", "tiny", "--run", "s3://bucket/runs/tiny", *at]) == 2
    assert "found s3://bucket/runs/tiny; required a run in a folder" in capsys.readouterr().err
    assert command(["reference", "add", "s3://bucket/runs/tiny", "--to", "more"]) == 2
    assert "required a run in a folder" in capsys.readouterr().err


def test_damage_is_found_before_anything_is_unpacked(references, tmp_path):
    reference = find(references, "tiny")
    raw = bytearray((references / "tiny.zip").read_bytes())
    raw[len(raw) // 2] ^= 1
    (references / "tiny.zip").write_bytes(raw)
    with pytest.raises(storage.DamagedRun, match="SHA-256"):
        extract(references, reference, tmp_path / "run")
    (references / "tiny.zip").unlink()
    with pytest.raises(storage.DamagedRun, match="is missing"):
        extract(references, reference, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    index = (references / INDEX).read_text()
    (references / INDEX).write_text(index.replace('"seed": 7', '"seed": 8'))
    with pytest.raises(storage.DamagedRun, match=INDEX):
        read_index(references)


def repack(references, files):
    """Put an archive of somebody's own in place of a reference, in the index too."""
    with ZipFile(references / "tiny.zip", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    raw = (references / "tiny.zip").read_bytes()
    return dataclasses.replace(find(references, "tiny"), size=len(raw), sha256=hashlib.sha256(raw).hexdigest())


def test_an_archive_writes_nothing_outside_of_its_run(references, tmp_path):
    reference = repack(references, {"../outside": "x", "/outside": "x", "run.json": "{}"})
    inside = tmp_path / "deep" / "run"
    inside.parent.mkdir()
    extract(references, reference, inside)
    assert [path for path in tmp_path.rglob("outside") if inside not in path.parents] == []
    with pytest.raises(storage.StoreError):
        verify(inside, 0)


def test_an_archive_that_is_none_or_too_large_is_refused(references, tmp_path, monkeypatch):
    reference = repack(references, {"run.json": "{}" * 1000})
    monkeypatch.setattr("metaloom.flows.references.archive._LARGEST_RUN", 1999)
    with pytest.raises(storage.DamagedRun, match="more than any reference"):
        extract(references, reference, tmp_path / "run")
    (references / "tiny.zip").write_bytes(b"no zip")
    none = dataclasses.replace(reference, sha256=hashlib.sha256(b"no zip").hexdigest())
    with pytest.raises(storage.DamagedRun, match="cannot be unpacked"):
        extract(references, none, tmp_path / "run")
    assert [*tmp_path.iterdir()] == [references]


@pytest.mark.parametrize(
    "change", [{"name": "../x"}, {"archive": "../x.zip"}, {"learners": 0}, {"seed": "x"}, {"metrics": 3}]
)
def test_an_index_that_says_what_cannot_be_is_refused(references, change):
    document = read_sealed(references / INDEX, indented=True)
    document["references"][0] |= change
    (references / INDEX).write_bytes(render(sealed(document), indented=True))
    with pytest.raises(storage.StoreError):
        read_index(references)


def test_a_reference_that_names_a_module_is_not_imported(references, extracted, tmp_path):
    document = read_sealed(extracted / "run.json", indented=True)
    document["config"]["env"]["name"] = "os:system"
    (extracted / "run.json").write_bytes(render(sealed(document), indented=True))
    files = {path.relative_to(extracted).as_posix(): raw for path, raw in contents(extracted).items()}
    write_index(references, [repack(references, files)])
    with opened(references, find(references, "tiny")) as path, pytest.raises((UntrustedRun, storage.StoreError)):
        verify(path, 0)


def test_the_references_of_the_project_are_those_of_their_index_and_small():
    references = read_index(shipped())
    archives = {path.name for path in shipped().glob("*.zip")}
    assert {reference.archive for reference in references} == archives
    for reference in references:
        raw = (shipped() / reference.archive).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (reference.size, reference.sha256)
    assert sum(reference.size for reference in references) <= 25_000_000


def test_an_iteration_of_a_reference_of_the_project_has_its_bits_or_another_processor_is_told():
    reference = find(shipped(), "dense-maml-ppo-seed-1")
    with opened(shipped(), reference) as path:
        outcome = verify(path, 20)
    assert outcome.identical or outcome.differs
    recorded, computed = outcome.returns or (0.0, 0.0)
    assert computed == pytest.approx(recorded, rel=0.01)
