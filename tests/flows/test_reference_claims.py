"""What forged references say or leave out, runs that others could not compute, and errors of archives."""

import dataclasses
import hashlib
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from forging import forge

from metaloom import storage
from metaloom.flows.cli import run as command
from metaloom.flows.commands.train import train
from metaloom.flows.errors import UsageError
from metaloom.flows.recipes import load_settings
from metaloom.flows.references.archive import add, opened, pack
from metaloom.flows.references.index import INDEX, find, read_index, shipped, write_index
from metaloom.flows.references.verify import verify
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.storage.format.arrays import crc32c
from metaloom.storage.read.parquet import parse_table

SERIAL = Backend(workers=0)


@pytest.fixture(autouse=True)
def _no_power_cut(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def forged(copy_tiny_run, tmp_path):
    """A run, to forge."""
    return copy_tiny_run(tmp_path / "forged")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, tiny_config):
    """A run that is evaluated after every iteration."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    train(tiny_config(iterations=2, evaluation={"every": 1, "num_tasks": 2}), folder, backend=SERIAL)
    return folder


def spoil_table(run, name, change):
    """Have the table of iteration 1 be another one, and its record say so."""
    file = run / "tables" / name / "00000001.parquet"
    table = change(parse_table(file.read_bytes(), file))
    file.unlink()
    pq.write_table(table, file, compression="zstd")
    raw = file.read_bytes()
    about = {"path": f"tables/{name}/{file.name}", "size": len(raw), "crc32c": crc32c(raw)}

    def amend(record):
        return {"tables": [entry | about if entry["path"] == about["path"] else entry for entry in record["tables"]]}

    forge(run, lambda document: None, amend)
    assert storage.verify_run(run) == []


@pytest.mark.parametrize(
    ("name", "column"),
    [("episodes", "return"), ("episodes", "length"), ("tasks", "task_goal_x"), ("metrics", "step_1.average_return")],
)
def test_a_column_that_a_table_lacks_is_told(forged, name, column):
    spoil_table(forged, name, lambda table: table.drop_columns([column]))
    assert verify(forged, 1).false_tables == (name,)
    assert verify(forged, 0).identical


@pytest.mark.parametrize("unit", ["parsecs", None])
def test_a_column_of_other_units_is_told(forged, unit):
    def change(table):
        place = table.column_names.index("length")
        field = table.field(place)
        assert field.metadata[b"unit"] == b"steps"
        return table.set_column(place, field.with_metadata({"unit": unit} if unit else None), table[place])

    spoil_table(forged, "episodes", change)
    assert verify(forged, 1).false_tables == ("episodes",)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda record: {"inputs": record["inputs"][:-1]}, "inputs"),
        (lambda record: {"inputs": [item | {"digest": 64 * "0"} for item in record["inputs"]]}, "inputs"),
        (lambda record: {"seed_position": [8, *record["seed_position"][1:]]}, "seed_position"),
    ],
    ids=["fewer inputs", "other inputs", "other streams"],
)
def test_a_record_that_names_another_origin_is_told(forged, change, told):
    def amend(record):
        at = (record["iteration"], record["stage"], record["step"]) == (1, "adapt", 0)
        return change(record) if at else {}

    forge(forged, lambda document: None, amend)
    outcome = verify(forged, 1)
    assert outcome.false_records == (f"{told} of adapt k=0 of iteration 1",)
    assert (outcome.first_difference, outcome.false_tables, outcome.identical) == (None, (), False)
    assert f"but NOT recorded correctly by the run, in its records: {told} of adapt k=0 of iteration 1" in str(outcome)


def test_evaluations_that_the_settings_ask_for_have_to_be_stored(forged):
    forge(forged, lambda document: document["config"]["evaluation"].update(every=2))
    outcome = verify(forged, None)
    assert outcome.false_records == ("evaluate of iteration 1, which the settings request and which is not stored",)
    assert not outcome.identical
    assert verify(forged, 0).identical
    with pytest.raises(UsageError, match="iteration 1 has no evaluate, which the settings request"):
        add(forged, forged.parent / "references")


def test_evaluations_that_the_settings_do_not_ask_for_are_told(evaluated, tmp_path):
    assert verify(evaluated, None).identical
    copy = Path(shutil.copytree(evaluated, tmp_path / "copy"))
    forge(copy, lambda document: document["config"]["evaluation"].update(every=None))
    told = [f"evaluate of iteration {i}, which the settings do not request" for i in range(2)]
    assert verify(copy, None).false_records == tuple(told)


@pytest.mark.parametrize("name", ["components", "task_classes"])
def test_an_environment_that_is_recorded_to_declare_nothing_is_told(forged, name):
    forge(forged, lambda document: document["environment"].update({name: {}}))
    assert verify(forged, 1).false_facts == (name,)


def test_all_iterations_are_not_called_identical_where_a_file_is_damaged(forged):
    record = next((forged / "_commits").glob("*00000001*adapt*"))
    record.unlink()
    with pytest.raises(storage.DamagedRun, match="missing"):
        verify(forged, None)


@pytest.mark.parametrize("recipe", ["dql", "pearl-point-robot"])
def test_records_that_name_all_outputs_so_far_are_those_of_their_stages(recipe, tmp_path):
    train(small(recipe), tmp_path / "run", backend=SERIAL)
    run = storage.open_run(tmp_path / "run")
    assert any(run.record(ref).spans for ref in run.refs())
    assert verify(tmp_path / "run", None).identical

    def amend(record):
        return {"spans": []} if record["iteration"] == 1 else {}

    forge(tmp_path / "run", lambda document: None, amend)
    outcome = verify(tmp_path / "run", 1)
    assert outcome.false_records
    assert all(told.startswith("spans of ") for told in outcome.false_records)


@pytest.mark.parametrize("reference", ["cartpole-a2c-seed-2", "dense-promp-tuned-seed-1"])
def test_references_of_earlier_versions_lack_nothing_of_it(reference):
    with opened(shipped(), find(shipped(), reference)) as path:
        outcome = verify(path, 0)
    assert (outcome.false_tables, outcome.false_facts, outcome.false_records) == ((), (), ())


def test_a_run_that_starts_from_another_one_is_refused(forged, tiny_config, tmp_path):
    train(tiny_config(iterations=1, init_from=str(forged)), tmp_path / "warm", backend=SERIAL)
    with pytest.raises(UsageError, match=f"warm: init_from={forged} is a run that others do not have"):
        add(tmp_path / "warm", tmp_path / "references")
    assert not (tmp_path / "references").exists()


def name_a_file(document):
    document["config"]["env"]["options"]["xml_file"] = "/home/me/legs.xml"


def need_a_package(document):
    document["environment"]["plugins"] = {"their_networks.tall": 64 * "0"}


@pytest.mark.parametrize(
    ("change", "told"),
    [(name_a_file, "/home/me/legs.xml, a path on this machine"), (need_a_package, "their_networks.tall")],
)
def test_a_run_that_needs_what_only_its_user_has_is_refused(forged, change, told, tmp_path):
    forge(forged, change)
    with pytest.raises(UsageError, match=f"its settings name {told}"):
        add(forged, tmp_path / "references")
    assert not (tmp_path / "references").exists()


@pytest.fixture
def damaged(forged, tmp_path):
    """A folder of references whose index names an archive of a damaged run."""
    folder = tmp_path / "references"
    reference = add(forged, folder, "tiny", learners=2)
    with opened(folder, reference) as path:
        spoilt = Path(shutil.copytree(path, tmp_path / "spoilt"))
    for file in (spoilt / "data.zarr").rglob("c/*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1] + b"?")
    for file in (spoilt / "_segments").rglob("*.parquet"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    raw = pack(spoilt, folder / "tiny.zip").read_bytes()
    write_index(folder, [dataclasses.replace(reference, size=len(raw), sha256=hashlib.sha256(raw).hexdigest())])
    return folder


def test_damage_in_an_archive_is_told_of_the_archive_and_what_helps(damaged, capsys):
    assert command(["reference", "verify", "tiny", "--from", str(damaged)]) == 1
    told = capsys.readouterr().err
    assert str(damaged / "tiny.zip") in told
    assert "again from their source" in told
    assert "metaloom-reference" not in told
    assert "resume" not in told


def test_a_broken_index_and_archive_are_to_be_had_again(damaged, capsys):
    (damaged / "tiny.zip").write_bytes(b"cut")
    assert command(["reference", "show", "tiny", "--from", str(damaged)]) == 1
    assert "again from their source" in capsys.readouterr().err
    (damaged / INDEX).write_text((damaged / INDEX).read_text().replace('"seed": 7', '"seed": 8'))
    with pytest.raises(storage.DamagedRun, match=f"{INDEX}: .*again from their source$") as caught:
        read_index(damaged)
    assert "metaloom verify" not in str(caught.value)


def small(recipe):
    """The settings of a recipe, cut down to three short iterations."""
    sizes = ["iterations=3", "max_episode_steps=6", "policy.hidden_sizes=[4]"]
    if recipe == "dql":
        sizes += ["algorithm.num_init_memory_steps=40", "algorithm.memory_size=70", "algorithm.batch_size=6"]
    else:
        numbers = ["latent_size=2", "meta_batch_size=2", "batch_size=4", "num_updates=2", "num_initial_steps=12"]
        sizes += ["num_tasks=2", *(f"algorithm.{number}" for number in numbers)]
    return build_config(override(load_settings(recipe), sizes))
