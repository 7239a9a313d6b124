"""`metaloom reference`: runs that ship with the project, and what recomputing them shows."""

import dataclasses
import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forging import forge

import metaloom
from metaloom import storage
from metaloom.flows import as_recorded
from metaloom.flows.cli import run as command
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.thin import materialise
from metaloom.flows.commands.train import resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import size
from metaloom.flows.graph.runner import Runner
from metaloom.flows.recipes import load_settings
from metaloom.flows.references.archive import add, extract, opened, pack
from metaloom.flows.references.index import INDEX, Added, as_archive_damage, find, read_index, shipped, write_index
from metaloom.flows.references.verify import Verified, verify
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.nn.device import arithmetic_facts
from metaloom.storage import StageRef
from metaloom.storage.format.arrays import crc32c
from metaloom.storage.format.files import read_file, read_sealed, render, sealed
from metaloom.storage.format.provenance import system
from metaloom.storage.read.parquet import parse_table

SERIAL = Backend(workers=0)
ITERATIONS, EVERY = 6, 3
CHOOSE_CODE = ("OPENBLAS_CORETYPE", "ATEN_CPU_CAPABILITY", "NPY_DISABLE_CPU_FEATURES")


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


def machine_code():
    """This process's CPU code paths as `verify` shows it when a run records the same."""
    acting = arithmetic_facts()
    named = {"blas": "BLAS", "torch": "torch", "numpy": "NumPy"}
    return ", ".join(f"{name} {acting[library]} (as recorded)" for library, name in named.items())


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "writer.lock"}


def test_a_run_stays_as_it_is_when_a_reference_is_made_of_it(made, tmp_path):
    before = contents(made / "tiny")
    add(made / "tiny", tmp_path, "again", learners=EVERY)
    assert contents(made / "tiny") == before


def test_metrics_without_a_value_are_not_among_those_of_a_reference(made, tmp_path, monkeypatch):
    right = storage.Run.metrics

    def more(run, iterations):
        return pa.Table.from_pylist(
            [row | {"nan": math.nan, "none": None} for row in right(run, iterations).to_pylist()]
        )

    monkeypatch.setattr(storage.Run, "metrics", more)
    reference = find(made / "references", "tiny")
    assert extract(made / "references", reference, tmp_path / "run").exists()


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
    earned = storage.open_run(extracted)[iteration].metrics()["step_1.average_return"]
    assert outcome.returns == (earned, earned)
    said, code = str(outcome).replace("\N{MINUS SIGN}", "-").splitlines()
    assert said.endswith(f": all identical; the average return of iteration {iteration} is {earned:.2f}")
    assert code == f"Computed with the CPU code paths {machine_code()}"


def test_a_whole_reference_can_be_recomputed(extracted, monkeypatch):
    seen, asked = [], []
    arithmetic = "metaloom.flows.references.verify.arithmetic_of"
    monkeypatch.setattr(arithmetic, lambda run, iterations: asked.append([*iterations]))
    found = verify(extracted, None, on_progress=lambda *place: seen.append(place))
    assert found.stages == len(storage.open_run(extracted).refs()) == len(seen)
    assert (seen[0], seen[-1]) == ((0, ITERATIONS - 1), (ITERATIONS - 1, ITERATIONS - 1))
    assert asked == [[*range(ITERATIONS)]]


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
    assert pack(extracted, references / "again.zip").read_bytes() == (references / "tiny.zip").read_bytes()
    with ZipFile(references / "again.zip") as archive:
        found = {(entry.date_time, entry.external_attr, entry.compress_type) for entry in archive.infolist()}
    assert found == {((1980, 1, 1, 0, 0, 0), 0o644 << 16, ZIP_DEFLATED)}


def test_only_the_command_asks_for_a_process_with_the_recorded_machine_code(made, monkeypatch):
    asked = []
    monkeypatch.setattr(as_recorded, "start_as_recorded", lambda run, iterations: asked.append([*iterations]))
    assert metaloom.reference.verify("tiny@1", folder=made / "references").identical
    assert asked == []
    assert command(["reference", "verify", "tiny@1", "--from", str(made / "references"), "--json"]) == 0
    assert asked == [[1]]


def test_the_commands_list_show_verify_and_extract(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    at = ["--from", str(made / "references")]
    assert command(["reference", "ls", *at]) == 0
    out = "".join(capsys.readouterr().out.split())  # which is broken into lines
    assert "tiny" in out
    assert f"verifyNAME@ITERATION--from{at[1]}`" in out
    assert command(["reference", "ls"]) == 0
    assert "--from" not in capsys.readouterr().out
    assert command(["reference", "ls", *at, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    metrics = storage.open_run(made / "tiny")[ITERATIONS - 1].metrics()
    assert (row["algorithm"], row["last_return"]) == ("promp", metrics["step_1.average_return"])
    assert metaloom.reference.ls(folder=at[1]).shown()[0] == "1 reference"
    added = Added(find(Path(at[1]), "tiny"), Path("more"))
    assert (added.as_dict(), str(added)) == (row, f"more/tiny.zip: {size(row['size'])}")
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
    mine = tmp_path / "new" / "folder" / "mine"
    assert command(["reference", "extract", "tiny", "--run", str(mine), *at]) == 0
    assert storage.verify_run(mine) == []
    assert command(["reference", "extract", "tiny", "--run", str(mine), *at]) == 2
    assert "already" in capsys.readouterr().err
    assert command(["reference", "add", str(made / "tiny"), "--name", "second", "--to", str(tmp_path / "more")]) == 0
    assert [reference.name for reference in read_index(tmp_path / "more")] == ["second"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ls --from nowhere", "contains no references"),
        ("verify tny@2", "did you mean tiny"),
        ("verify tiny@best", "got 'best' after the @"),
        ("extract tiny@2", "names an iteration"),
    ],
)
def test_what_there_is_not_is_told_with_what_there_is(made, words, said, capsys):
    place = [] if "--from" in words else ["--from", str(made / "references")]
    assert command(["reference", *words.split(), *place]) == 2
    assert said in capsys.readouterr().err


def test_an_iteration_that_is_not_there_is_told(made, capsys):
    for verb in ("show", "verify"):  # 1 would say that something differs
        assert command(["reference", verb, "tiny@6", "--from", str(made / "references")]) == 2
        assert "use one from tiny@0 to tiny@5" in capsys.readouterr().err


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
    out = " ".join(capsys.readouterr().out.split())
    assert "NOT identical from iteration 4, process_samples" in out
    assert f"the average return of iteration 5 is {computed:.8g}, recorded {recorded:.8g}." in out.replace("- ", "-")
    assert command(["reference", "verify", "tiny@3", "--from", str(made / "references")]) == 0


@pytest.mark.parametrize(("wrong", "told"), [(3, "records: a, b, c:"), (4, "records: a, b, c, and 1 more:")])
def test_of_many_records_that_are_wrong_three_are_named_and_the_rest_counted(wrong, told):
    verified = Verified("tiny", 3, 3, 7, "bit for bit", false_records=tuple("abcd"[:wrong]))
    assert told in str(verified)


def change_table(forged, name, change):
    """Store another table of iteration 4, which its record lists."""
    file = forged / "tables" / name / "00000004.parquet"
    table = change(parse_table(file.read_bytes(), file))
    file.unlink()
    pq.write_table(table, file, compression="zstd", use_dictionary=False)
    raw = file.read_bytes()
    about = {"path": f"tables/{name}/{file.name}", "size": len(raw), "crc32c": crc32c(raw)}

    def amend(record):
        return {"tables": [entry | about if entry["path"] == about["path"] else entry for entry in record["tables"]]}

    forge(forged, lambda document: None, amend)


@pytest.mark.parametrize(
    ("name", "column"),
    [("episodes", "return"), ("episodes", "length"), ("tasks", "task_goal_x"), ("metrics", "loss_after")],
)
def test_a_table_that_says_something_else_than_was_computed_is_told(made, tmp_path, name, column, capsys):
    forged = Path(shutil.copytree(made / "tiny", tmp_path / "forged"))

    def add_one(table):
        more = pa.array(table[column].to_numpy() + 1, table[column].type)
        return table.set_column(table.column_names.index(column), table.field(column), more)

    change_table(forged, name, add_one)
    assert storage.verify_run(forged) == []
    outcome = verify(forged, 4)
    assert outcome.false_tables == (name,)
    assert outcome.first_difference is None
    assert not outcome.identical
    assert f"but NOT recorded correctly by the run, in its tables of {name}" in str(outcome)
    assert verify(forged, 3).identical
    assert not verify(forged, None).identical
    files = {path.relative_to(forged).as_posix(): raw for path, raw in contents(forged).items()}
    folder = Path(shutil.copytree(made / "references", tmp_path / "references"))
    write_index(folder, [repack(folder, files)])
    assert command(["reference", "verify", "tiny@4", "--from", str(folder)]) == 1
    assert "but NOT" in capsys.readouterr().out


def type_of_returns(forged, as_type):
    """Store the returns of iteration 4 as numbers of another type."""

    def convert(table):
        column = pa.array(table["return"].to_numpy().astype(as_type))
        return table.set_column(table.column_names.index("return"), "return", column)

    change_table(forged, "episodes", convert)


@pytest.mark.parametrize("as_type", ["int64", "float32", "bool"])
def test_a_table_that_rounds_what_was_computed_is_told(made, tmp_path, as_type):
    forged = Path(shutil.copytree(made / "tiny", tmp_path / "forged"))
    type_of_returns(forged, as_type)
    assert verify(forged, 4).false_tables == ("episodes",)


def with_column(table, value):
    return table.append_column("more", pa.array([value] * table.num_rows, pa.float64()))


@pytest.mark.parametrize(
    ("change", "tables"),
    [
        (lambda table: table.slice(1), ("episodes",)),
        (lambda table: pa.concat_tables([table, table.slice(0, 1)]), ("episodes",)),
        (lambda table: with_column(table, 1.0), ("episodes",)),
        (lambda table: with_column(table, None), ()),  # as where only another iteration of the segment has it
    ],
    ids=["fewer rows", "more rows", "another column", "an empty column"],
)
def test_a_table_has_exactly_the_rows_that_were_computed(made, tmp_path, change, tables):
    forged = Path(shutil.copytree(made / "tiny", tmp_path / "forged"))
    change_table(forged, "episodes", change)
    assert verify(forged, 4).false_tables == tables


def exchange_classes(environment):
    environment["task_classes"]["names"].reverse()


def rename_component(environment):
    environment["components"]["observation"]["names"][0] = "speed"


def change_option(environment):
    environment["env"]["options"]["success_radius"] = 5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (exchange_classes, "task_classes"),
        (rename_component, "components.observation.names"),
        (change_option, "env.options.success_radius"),
    ],
)
def test_an_environment_that_is_recorded_as_another_is_told(made, tmp_path, change, told, monkeypatch, capsys):
    forged = Path(shutil.copytree(made / "tiny", tmp_path / "forged"))
    forge(forged, lambda document: change(document["environment"]))
    assert storage.verify_run(forged) == []
    outcome = verify(forged, 4)
    assert (outcome.false_facts, outcome.false_tables, outcome.identical) == ((told,), (), False)
    assert f"but NOT recorded correctly by the run, in what it records of its environment: {told}" in str(outcome)


def test_what_an_earlier_version_does_not_record_of_an_environment_is_no_matter(made, tmp_path):
    older = Path(shutil.copytree(made / "tiny", tmp_path / "older"))

    def forget(document):
        del document["environment"]["task_classes"], document["environment"]["components"]
        del document["environment"]["env"]["options"]["success_radius"]
        document["environment"]["env"]["class"] = "metaloom.earlier:PointCorner"  # modules are renamed

    forge(older, forget)
    assert verify(older, 4).identical


def test_an_iteration_under_way_is_not_called_identical(made, tmp_path):
    half = Path(shutil.copytree(made / "tiny", tmp_path / "half"))
    resume(half, iterations=ITERATIONS + 1, backend=SERIAL)
    (last,) = (half / "_commits").glob(f"*{ITERATIONS:08d}*meta_optimize*")
    last.unlink()
    with pytest.raises(UsageError, match=f"iteration {ITERATIONS} is incomplete; choose a complete one"):
        verify(half, ITERATIONS)
    assert verify(half, ITERATIONS - 1).identical


def test_on_another_processor_a_difference_is_no_error_and_the_class_is_told(extracted, monkeypatch):
    from metaloom.flows.graph import changes

    computes_otherwise(monkeypatch)
    monkeypatch.setattr(changes, "system", lambda: {"cpu": "x", "cpu_flags": "fpu new", "libc": "glibc 9.9"})
    outcome = verify(extracted, 4)
    assert not outcome.identical
    assert "only guaranteed with the same versions and type of processor" in str(outcome)
    assert "glibc 9.9 now" in str(outcome)
    assert "with new" in str(outcome)


def test_a_run_that_is_not_complete_or_others_could_not_compute_is_refused(made, tmp_path, monkeypatch):
    folder = made / "references"
    with pytest.raises(UsageError, match="already has a reference tiny"):
        add(made / "tiny", folder)
    fork(made / "tiny", 1, tmp_path / "half")
    with pytest.raises(UsageError, match="1 of 6 iterations complete; finish the run first"):
        add(tmp_path / "half", folder)
    monkeypatch.setattr("metaloom.flows.references.archive.names_of_run", lambda run: ["my_envs:Reach"])
    with pytest.raises(UsageError, match="settings name my_envs:Reach"):
        add(made / "tiny", folder, "own")


@pytest.mark.parametrize("name", ["notes.txt", "_sessions/000007.claim"])
def test_what_a_link_in_a_run_leads_to_is_not_published(made, tmp_path, name):
    (tmp_path / "secret").write_text("of mine")
    linked = Path(shutil.copytree(made / "tiny", tmp_path / "linked"))
    (linked / name).symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match=f"{name} is neither a file nor a folder"):
        add(linked, tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_what_is_no_file_or_no_part_of_a_run_is_refused_in_one_line(made, tmp_path, capsys, monkeypatch):
    odd = Path(shutil.copytree(made / "tiny", tmp_path / "odd"))
    os.mkfifo(odd / "pipe")
    assert command(["reference", "add", str(odd), "--to", str(tmp_path / "more")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (odd / "pipe").unlink()
    copied, copy = [], shutil.copyfile
    monkeypatch.setattr("shutil.copyfile", lambda *paths, **options: copied.append(paths[0].name) or copy(*paths))
    for place in (odd, odd / "tables" / "metrics"):
        (place / "notes.txt").write_text("mine")
        with pytest.raises(storage.DamagedRun, match=f"{place}/notes.txt: does not belong.*`metaloom verify {odd}`"):
            add(odd, tmp_path / "more")
        (place / "notes.txt").unlink()
    assert "notes.txt" not in copied
    add(odd, tmp_path / "more")
    assert "run.json" in copied


def test_damage_is_told_of_the_run_and_not_of_the_copy_that_goes_away(made, tmp_path):
    spoilt = Path(shutil.copytree(made / "tiny", tmp_path / "spoilt"))
    file = spoilt / "tables" / "metrics" / "00000002.parquet"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(storage.DamagedRun, match=f"^{file}.*`metaloom verify {spoilt}`"):
        add(spoilt, tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_a_run_that_has_met_its_end_is_complete(tiny_config, tmp_path):
    stop = {"metric": "average_return", "at_least": -1e9}
    train(tiny_config(stop=stop), tmp_path / "done", backend=SERIAL)
    reference = add(tmp_path / "done", tmp_path / "references")
    assert reference.learners == 20
    with opened(tmp_path / "references", reference) as path:
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert len(storage.open_run(path).iterations) == 1
        assert verify(path, None).identical


def test_learners_that_a_run_lacks_are_not_promised(extracted, tmp_path):
    with pytest.raises(UsageError, match="learner 2 was thinned, but one is needed every 2 iterations"):
        add(extracted, tmp_path / "more", learners=2)
    assert verify(extracted, ITERATIONS - 1).start == EVERY
    add(extracted, tmp_path / "more", learners=2 * EVERY)


def test_a_file_that_the_index_does_not_know_is_not_written_over(made, tmp_path):
    (tmp_path / "tiny.zip").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"tiny\.zip exists but is not in the index"):
        add(made / "tiny", tmp_path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("tiny.zip", b"mine")]


def test_references_that_are_added_at_once_are_all_in_the_index(made, tmp_path):
    with ThreadPoolExecutor(3) as threads:
        added = [*threads.map(lambda name: add(made / "tiny", tmp_path, name), "abc")]
    assert read_index(tmp_path) == added


def test_what_the_system_refuses_is_told_in_one_line(made, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    assert command(["reference", "add", str(made / "tiny"), "--to", str(tmp_path / "file")]) == 1
    assert "Not a directory" in capsys.readouterr().err

    def full(archive, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ZipFile, "extractall", full)
    with pytest.raises(storage.StorageFailed, match="No space left on device"):
        extract(made / "references", find(made / "references", "tiny"), tmp_path / "run")

    def refused(source, target, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr("shutil.copyfile", refused)
    capsys.readouterr()
    assert command(["reference", "add", str(made / "tiny"), "--to", str(tmp_path / "new")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r": \d+ files could not be copied, the first because of .*No space left on device", line)
    assert len(line) < 1000


def test_without_a_checkout_a_folder_is_asked_for(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("metaloom.flows.references.index.shipped", lambda: tmp_path / "site-packages")
    assert command(["reference", "add", str(made / "tiny")]) == 2
    assert "pass a folder with --to FOLDER" in capsys.readouterr().err


def test_runs_under_a_url_are_refused(made, capsys):
    at = ["--from", str(made / "references")]
    assert command(["reference", "extract", "tiny", "--run", "s3://bucket/runs/tiny", *at]) == 2
    assert "s3://bucket/runs/tiny is not a local folder" in capsys.readouterr().err
    assert command(["reference", "add", "s3://bucket/runs/tiny", "--to", "more"]) == 2
    assert "is not a local folder" in capsys.readouterr().err


def test_damage_is_found_before_anything_is_unpacked(references, tmp_path):
    reference = find(references, "tiny")
    raw = bytearray((references / "tiny.zip").read_bytes())
    raw[len(raw) // 2] ^= 1
    (references / "tiny.zip").write_bytes(raw)
    with pytest.raises(storage.DamagedRun, match="SHA-256"):
        extract(references, reference, tmp_path / "run")
    (references / "tiny.zip").unlink()
    with pytest.raises(storage.DamagedRun, match=": missing"):
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


def zipped(*files, **how):
    """A zip of names and contents, as somebody writes it who wants harm."""
    file = io.BytesIO()
    with ZipFile(file, "w", **how) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        for name in files:
            archive.writestr(name, b"x" * 1000)
    return file.getvalue()


def spoiled(name, payload, *, flags=0, size=1000):
    """A zip of one deflated file whose content or name is none."""
    name_size, sizes = len(name), (0, len(payload), size)
    head = struct.pack("<4s5H3L2H", b"PK\3\4", 20, flags, 8, 0, 33, *sizes, name_size, 0) + name + payload
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, flags, 8, 0, 33, *sizes, name_size, *[0] * 6) + name
    return head + entry + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(entry), len(head), 0)


HOSTILE = {
    "outside": (zipped("../outside"), "contains '../outside', which no reference does"),
    "absolute": (zipped("/outside"), "contains '/outside', which no"),
    "through itself": (zipped("a/../../outside"), "contains 'a/../../outside', which no"),
    "the same twice": (zipped("run.json", "run.json"), "contains several files with the same name"),
    "a file as a folder": (zipped("a", "a/outside"), "cannot be unpacked"),
    "deeper than Python can remove": (zipped("/".join(["a"] * 900), "/".join(["a"] * 1800)), "contains 'a/a/a"),
    "deeper than any run": (zipped("/".join(["a"] * 17)), "contains 'a/a/a"),
    "as deep as a run may be": (zipped("/".join(["a"] * 16)), "its run: "),
    "a method that expands without limit": (zipped("run.json", compression=ZIP_BZIP2), "contains 'run.json', which"),
    "more files than any run": (b"PK\1\2" * 10_001, "contains more than 10000 files"),
    "as many files as a run may have": (b"PK\1\2" * 10_000, "cannot be unpacked (BadZipFile"),
    "more bytes than any run": (spoiled(b"run.json", b"", size=2**30 + 1), "contains 1073741825 bytes, more than any"),
    "as many bytes as a run may have": (spoiled(b"run.json", b"", size=2**30), "run.json: not valid JSON"),
    "no content": (spoiled(b"run.json", b"\xff\xff\xff"), "cannot be unpacked"),
    "no name": (spoiled(b"\xff\xfe", b"", flags=0x800), "cannot be unpacked"),
}


@pytest.mark.parametrize(("raw", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_an_archive_that_no_reference_can_be_is_refused_and_writes_nothing(references, tmp_path, raw, problem):
    (references / "tiny.zip").write_bytes(raw)
    reference = dataclasses.replace(find(references, "tiny"), size=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    inside = tmp_path / "deep" / "run"
    inside.parent.mkdir()
    with pytest.raises(storage.DamagedRun, match=rf"tiny\.zip: {re.escape(problem)}"):
        extract(references, reference, inside)
    assert [*tmp_path.rglob("outside")] == [*inside.parent.iterdir()] == []


def test_an_archive_that_is_replaced_while_it_is_read_is_not_used(references, tmp_path, monkeypatch):
    def read_and_replace(path, *, limit):
        raw = read_file(path, limit=limit)
        path.write_bytes(zipped("run.json"))
        return raw

    monkeypatch.setattr("metaloom.flows.references.archive.read_file", read_and_replace)
    extract(references, find(references, "tiny"), tmp_path / "run")
    assert storage.verify_run(tmp_path / "run") == []


def test_two_that_extract_to_one_place_at_once_leave_one_whole_run(references, tmp_path):
    def attempt(number):
        try:
            return extract(references, find(references, "tiny"), tmp_path / "run")
        except storage.RunExists:
            return None

    with ThreadPoolExecutor(4) as threads:
        made = [path for path in threads.map(attempt, range(4)) if path is not None]
    assert len(made) == 1
    assert storage.verify_run(tmp_path / "run") == []
    assert {path.name for path in tmp_path.iterdir()} == {"references", "run"}


@pytest.mark.parametrize(
    "change",
    [
        {"env": "half-cheetah-dir"}, {"algorithm": "sac"}, {"seed": 8}, {"iterations": 0}, {"code": "0"},
        {"config_digest": "0"}, {"versions": {}}, {"metrics": {"step_1.average_return": 1.0}}, {"wall_seconds": 0.0},
        {"learners": 1}, {"learners": 2}, {"size": 1},
    ],
)  # fmt: skip
def test_a_run_that_is_not_the_one_of_the_index_is_refused(references, tmp_path, change):
    write_index(references, [dataclasses.replace(find(references, "tiny"), **change)])
    found = "the index records 1" if "size" in change else f"its index entry: {next(iter(change))}"
    with pytest.raises(storage.DamagedRun, match=found):
        extract(references, find(references, "tiny"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_archive_that_is_none_or_too_large_is_refused(references, tmp_path, monkeypatch):
    original = find(references, "tiny")
    os.truncate(references / "tiny.zip", 2**28 + 1)
    with pytest.raises(storage.DamagedRun, match="holds 268435457 bytes, more than the 268435456 allowed"):
        extract(references, original, tmp_path / "run")
    reference = repack(references, {"run.json": "{}" * 1000})
    monkeypatch.setattr("metaloom.flows.references.archive._LARGEST_RUN", 1999)
    with pytest.raises(storage.DamagedRun, match="more than any reference"):
        extract(references, reference, tmp_path / "run")
    (references / "tiny.zip").write_bytes(b"no zip")
    none = dataclasses.replace(reference, size=6, sha256=hashlib.sha256(b"no zip").hexdigest())
    with pytest.raises(storage.DamagedRun, match="cannot be unpacked"):
        extract(references, none, tmp_path / "run")
    assert [*tmp_path.iterdir()] == [references]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../x"},
        {"archive": "../x.zip"},
        {"learners": 0},
        {"seed": "x"},
        {"metrics": 3},
        {"metrics": {"loss": 10**400}},
        {"schema": "metaloom-references/2"},
    ],
)
def test_an_index_that_says_what_cannot_be_is_refused(references, change):
    document = read_sealed(references / INDEX, indented=True)
    (document if "schema" in change else document["references"][0]).update(change)
    (references / INDEX).write_bytes(render(sealed(document), indented=True))
    with pytest.raises(storage.StoreError) as refused:
        read_index(references)
    assert "validation error" not in str(refused.value)
    if "seed" in change:
        assert "(references.0.seed: Input should be a valid integer" in str(refused.value)


def test_an_index_with_two_references_of_one_name_is_refused(references):
    write_index(references, 2 * [find(references, "tiny")])
    with pytest.raises(storage.DamagedRun, match="several references with the same name"):
        read_index(references)


@pytest.mark.parametrize("name", ["os:system", "their_envs:Reach"])
def test_a_reference_that_names_a_module_is_shown_and_not_imported(
    made, references, tmp_path, name, monkeypatch, capsys
):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    Path("their_envs.py").write_text("from pathlib import Path\nPath('IMPORTED').touch()\n")
    forged = Path(shutil.copytree(made / "tiny", tmp_path / "forged"))
    forge(forged, lambda document: document["config"]["env"].update(name=name))
    files = {path.relative_to(forged).as_posix(): raw for path, raw in contents(forged).items()}
    write_index(references, [dataclasses.replace(repack(references, files), env=name)])
    codes = {
        "ls": 0,
        "show tiny": 0,
        "show tiny@4": 0,
        "extract tiny --run theirs": 0,
        "verify tiny@4": 2,
        "verify tiny": 2,
    }
    for words, code in codes.items():
        assert command(["reference", *words.split(), "--from", str(references)]) == code, words
    assert capsys.readouterr().err.count("you have not trusted") == 2
    assert not Path("IMPORTED").exists()


def test_the_references_of_the_project_are_those_of_their_index_and_small():
    references = read_index(shipped())
    archives = {path.name for path in shipped().glob("*.zip")}
    assert {reference.archive for reference in references} == archives
    for reference in references:
        raw = (shipped() / reference.archive).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (reference.size, reference.sha256)
    assert sum(reference.size for reference in references) <= 25_000_000


def verified_in_a_process(name, **variables):
    """Verify a shipped reference as a user does, with these variables and no others that choose CPU code paths."""
    ours = {name: value for name, value in os.environ.items() if name not in CHOOSE_CODE}
    command = [sys.executable, "-m", "metaloom.flows.cli", "reference", "verify", name, "--json"]
    done = subprocess.run(command, env=ours | variables, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.skipif("avx2" not in system()["cpu_flags"].split(), reason="this processor has no AVX2")
@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, marks=pytest.mark.sweep),
        {"OPENBLAS_CORETYPE": "Nehalem", "ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": "X86_V4"},
    ],
    ids=["this processor's code", "other code"],
)
def test_the_project_s_references_are_verified_by_the_code_that_computed_them_whatever_is_set(variables):
    code, outcome = verified_in_a_process("dense-maml-ppo-seed-1@20", **variables)
    used, missed = outcome["arithmetic"]["used"], outcome["arithmetic"]["missed"]
    assert used["blas"] == "openblas Haswell"
    # Torch's and NumPy's code is that for AVX-512, which not every processor can run.
    assert all("the processor lacks" in reason for reason in missed.values())
    assert missed or used == {"blas": "openblas Haswell", "torch": "AVX512", "numpy": "X86_V3 X86_V4 AVX512_ICL"}
    assert outcome["identical"] is (code == 0)
    assert outcome["identical"] or missed
    recorded, computed = outcome["returns"]
    assert computed == pytest.approx(recorded, rel=0.01)


def test_a_reference_of_the_project_has_its_bits_or_was_not_computed_as_recorded_and_its_tables_are_checked():
    with opened(shipped(), find(shipped(), "dense-maml-ppo-seed-1")) as path:
        outcome = verify(path, 20)
    assert outcome.identical or outcome.arithmetic.missed
    assert (outcome.false_tables, outcome.false_facts, outcome.false_records) == ((), (), ())
    recorded, computed = outcome.returns
    assert computed == pytest.approx(recorded, rel=0.01)


def test_tables_and_facts_are_checked_where_bits_differ(made, tmp_path, monkeypatch):
    forged = Path(shutil.copytree(made / "tiny", tmp_path / "forged"))
    type_of_returns(forged, "int64")
    forge(forged, lambda document: exchange_classes(document["environment"]))
    computes_otherwise(monkeypatch)  # the samples of iteration 4, not its episodes
    outcome = verify(forged, 4)
    assert outcome.first_difference == StageRef(4, "process_samples", 1)
    assert (outcome.false_tables, outcome.false_facts) == (("episodes",), ("task_classes",))
    assert "In addition, the run is not recorded correctly in its tables of episodes and in what it records" in str(
        outcome
    )


def test_a_table_of_other_bits_needs_the_same_columns_and_units(made, tmp_path, monkeypatch):
    right = Runner.run

    def otherwise(stages, ref, inputs):
        value = right(stages, ref, inputs)
        return dataclasses.replace(value, rewards=value.rewards * 2) if ref.stage == "collect_rollouts" else value

    monkeypatch.setattr(Runner, "run", otherwise)
    assert verify(made / "tiny", 4).false_tables == ()
    forged = Path(shutil.copytree(made / "tiny", tmp_path / "forged"))
    change_table(forged, "episodes", lambda table: table.drop_columns(["length"]))
    assert verify(forged, 4).false_tables == ("episodes",)


def test_damage_inside_an_archive_is_told_by_its_place_in_the_archive(tmp_path):
    archive, unpacked = tmp_path / "tiny.zip", tmp_path / "unpacked"
    for place, expected in ((unpacked / "tables/a", "tables/a"), (unpacked, "its run")):
        with pytest.raises(storage.DamagedRun) as error, as_archive_damage(archive, unpacked):
            raise storage.NotARun(place, found=f"{unpacked}/b is missing", required="it", action="go")
        assert str(error.value).startswith(f"{archive}: {expected}: b is missing; ")
    other = storage.NotARun(tmp_path, found="another run", required="it", action="go")
    with pytest.raises(storage.NotARun) as unchanged, as_archive_damage(archive, unpacked):
        raise other
    assert unchanged.value is other
