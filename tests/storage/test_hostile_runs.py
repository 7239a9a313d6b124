"""A run from somewhere else cannot run code, reach outside its folder or exhaust memory."""

import json
import os
import re

import numpy as np
import pytest

from metaloom import storage
from metaloom.storage import StageRef
from metaloom.storage.format.arrays import crc32c
from metaloom.storage.format.files import read_sealed, render, sealed

REWARDS = "data.zarr/rollouts_0/rewards"
FILL = StageRef(0, "fill_memory")


def rewrite(file, change, *, holder=None):
    """Change a document and give it a right checksum again, as an attacker would."""
    indented = holder is not None or file.name == "run.json"
    document = read_sealed(file, indented=indented, holder=holder)
    change(document)
    file.write_bytes(render(sealed(document, holder=holder), indented=indented))


def rewards_record(path):
    return path / "_commits" / StageRef(0, "collect_rollouts").file_name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data_type", "object"),
        ("data_type", {"name": "numpy.datetime64", "configuration": {"unit": "s", "scale_factor": 1}}),
        ("data_type", "float64"),
        ("codecs", [{"name": "numcodecs.pickle"}]),
        ("codecs", [{"name": "bytes", "configuration": {"endian": "little"}}]),
        ("shape", [2, 10**9, 10**9, 10**9]),
        ("shape", [2, -1, 2, 5]),
        ("shape", "many"),
        ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [1, 1, 1, 1]}}),
        ("storage_transformers", [{"name": "evil"}]),
        ("attributes", []),
    ],
)
def test_array_metadata_that_this_store_does_not_write_is_refused_before_any_chunk_is_read(make_run, field, value):
    path = make_run(2)
    file = path / REWARDS / "zarr.json"
    if field == "attributes":
        file.write_bytes(render({**json.loads(file.read_text()), field: value}, indented=True))
    else:
        rewrite(file, lambda document: document.update({field: value}), holder="attributes")
    with pytest.raises((storage.IncompatibleFormat, storage.DamagedRun)):
        storage.open_run(path)[0].rollouts(0)
    assert any(damage.array == "rollouts_0/rewards" for damage in storage.verify_run(path))


@pytest.mark.parametrize(
    "place", ["/etc/passwd", "data.zarr/../../secret", "../secret", "data.zarr/rollouts_0/rewards/c.1.0.0.0"]
)
def test_a_record_cannot_name_files_that_are_not_its_own(make_run, place):
    path = make_run(2)
    (path.parent / "secret").write_bytes(b"secret")

    def point_elsewhere(document):
        next(chunk for chunk in document["chunks"] if chunk["array"].endswith("rewards"))["path"] = place

    rewrite(rewards_record(path), point_elsewhere)
    with pytest.raises(storage.DamagedRun, match="not its own"):
        storage.open_run(path)[0].rollouts(0)


@pytest.mark.parametrize("array", ["../../outside", "rollouts_0/../../outside", "rollouts_0/behavior.x/y", "/etc"])
def test_a_record_cannot_name_arrays_outside_the_run(make_run, array):
    path = make_run(1)
    rewrite(rewards_record(path), lambda document: document["chunks"][0].update(array=array))
    with pytest.raises(storage.DamagedRun, match="which is not part of a run"):
        storage.open_run(path)[0].rollouts(0)


@pytest.mark.parametrize("place", ["tables/episodes/../../../secret", "tables/../../secret", "/etc/passwd"])
def test_a_record_cannot_name_tables_outside_the_run(make_run, place):
    path = make_run(1)
    record = path / "_commits" / StageRef(0, "meta_optimize").file_name

    def point_elsewhere(document):
        next(table for table in document["tables"] if "episodes" in table["path"])["path"] = place

    rewrite(record, point_elsewhere)
    with pytest.raises((storage.DamagedRun, storage.StageMissing)):
        storage.open_run(path).episodes()
    assert any("not its own" in damage.problem for damage in storage.verify_run(path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[1]",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"sha256": 3}',
        b'{"stage": "../../x", "iteration": 0}',
        b"9" * 5000,
    ],
)
@pytest.mark.parametrize("name", ["run.json", f"_commits/{StageRef(0, 'collect_rollouts').file_name}"])
def test_documents_that_are_no_documents_are_refused(make_run, name, content):
    path = make_run(1)
    (path / name).write_bytes(content)
    with pytest.raises(storage.DamagedRun):
        storage.open_run(path)[0].rollouts(0)
    assert any(damage.file == name for damage in storage.verify_run(path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunks", {}),
        ("chunks", [1]),
        ("chunks", []),
        ("arrays", []),
        ("arrays", {"rewards": {}}),
        ("sequence", "first"),
        ("inputs", [{"iteration": 0, "stage": "evil", "step": 0, "digest": ""}]),
        ("step", 1),
        ("schema", "metaloom/99"),
    ],
)
def test_records_with_the_wrong_content_are_refused(make_run, field, value):
    path = make_run(1)
    rewrite(rewards_record(path), lambda document: document.update({field: value}))
    assert storage.verify_run(path) != []
    messages = {
        "arrays": r"not a commit record \(AttributeError" if value == [] else r"not a commit record \(KeyError",
        "step": r"contains the record of collect_rollouts\(i=0, k=1\)",
        "schema": r"not a commit record \(ValueError: unexpected schema 'metaloom/99'\)",
        "sequence": r"not a commit record \(ValueError",
    }
    if field in messages:
        with pytest.raises(storage.DamagedRun, match=messages[field]):
            storage.open_run(path).record(StageRef(0, "collect_rollouts"))


def test_a_digest_of_other_arrays_and_a_folder_that_is_called_an_array_are_reported(make_run):
    path = make_run(1)
    rewrite(rewards_record(path), lambda document: document.update(digest="0" * 64))
    group = path / "data.zarr/rollouts_0/zarr.json"
    rewrite(group, lambda document: document.update(node_type="array"), holder="attributes")
    problems = {(damage.file, damage.problem) for damage in storage.verify_run(path)}
    assert (f"_commits/{rewards_record(path).name}", "its digest does not match its arrays") in problems
    assert ("data.zarr/rollouts_0/zarr.json", "does not describe a group") in problems


OBSERVATIONS = "data.zarr/rollouts_0/observations"


@pytest.fixture
def forge(tmp_path, creation, put, make_batches, monkeypatch):
    """Makes a run whose first observations have another compressed payload, and records that agree with it."""
    # Where a row is one chunk; what is changed in a shard, its table of parts tells (test_shards.py).
    monkeypatch.setattr("metaloom.storage.write.creation.FORMAT", "metaloom/1")

    def make(change):
        with storage.create_run(tmp_path / "run", capacity=1, **creation) as writer:
            put(writer, make_batches(B=8, E=6, T=50, O=17).iteration(0))
        file = tmp_path / "run" / OBSERVATIONS / "c.0.0.0.0.0"
        payload = bytearray(file.read_bytes()[:-4])
        change(payload)
        crc = crc32c(bytes(payload))
        file.write_bytes(bytes(payload) + crc.to_bytes(4, "little"))

        def agree(document):
            next(chunk for chunk in document["chunks"] if chunk["array"].endswith("observations"))["crc32c"] = crc

        rewrite(rewards_record(tmp_path / "run"), agree)
        return tmp_path / "run"

    return make


def claim(size):
    def change(payload):
        payload[4:8] = size.to_bytes(4, "little")

    return change


@pytest.mark.parametrize("size", [2**31 - 1, 8 * 6 * 51 * 17 * 4 + 4, 8 * 6 * 51 * 17 * 4 - 4, 0])
def test_a_chunk_that_claims_another_size_than_a_row_has_is_refused(forge, size):
    with pytest.raises(storage.DamagedRun, match="compression header"):
        storage.open_run(forge(claim(size)))[0].rollouts(0)


def test_a_chunk_that_no_compression_could_make_so_small_is_refused_before_memory_is_taken(forge):
    path = forge(claim(8 * 6 * 51 * 170_000 * 4))  # 1.7 GB, and the metadata agrees

    def widen(document):
        document["shape"][-1] = document["chunk_grid"]["configuration"]["chunk_shape"][-1] = 170_000

    rewrite(path / OBSERVATIONS / "zarr.json", widen, holder="attributes")
    with pytest.raises(storage.DamagedRun, match="compression header"):
        storage.open_run(path)[0].rollouts(0)


def test_garbage_behind_a_right_compression_header_is_refused(forge):
    def scramble(payload):
        payload[16:] = np.random.default_rng(0).bytes(len(payload) - 16)

    with pytest.raises(storage.DamagedRun):
        storage.open_run(forge(scramble))[0].rollouts(0)


def test_a_huge_file_in_place_of_a_chunk_is_not_read(make_run):
    path = make_run(1)
    os.truncate(path / REWARDS / "c.0.0.0.0", 2**40)
    with pytest.raises(storage.DamagedRun, match="more than"):
        storage.open_run(path)[0].rollouts(0)
    os.truncate(path / "tables/episodes/00000000.parquet", 2**30 + 1)
    with pytest.raises(storage.DamagedRun, match=f"holds {2**30 + 1} bytes, more than the {2**30} allowed"):
        storage.open_run(path).episodes()


def test_a_pipe_in_place_of_a_file_does_not_hang_the_reader(make_run):
    path = make_run(1)
    (path / REWARDS / "c.0.0.0.0").unlink()
    os.mkfifo(path / REWARDS / "c.0.0.0.0")
    with pytest.raises(storage.DamagedRun):
        storage.open_run(path)[0].rollouts(0)


def agree(path, ref, name, payload):
    """Replace a stored row that is not compressed, and agree with it in the record."""
    raw, crc = payload + crc32c(payload).to_bytes(4, "little"), crc32c(payload)
    record = path / "_commits" / ref.file_name

    def change(document):
        (chunk,) = (chunk for chunk in document["chunks"] if chunk["array"].endswith(f"/{name}"))
        (path / chunk["path"]).write_bytes(raw)
        chunk.update(size=len(raw), crc32c=crc)

    rewrite(record, change)


@pytest.mark.parametrize("lengths", [[[0, 0]] * 3, [[1, 6]] * 3, [[1, -1]] * 3], ids=["none", "too long", "below 0"])
def test_lengths_that_no_episodes_have_are_refused_before_rows_are_counted(make_off_policy_run, lengths):
    path = make_off_policy_run(1)
    agree(path, FILL, "lengths", np.array(lengths, np.int32).tobytes())
    run, found = storage.open_run(path), r"fill_memory.*lengths are invalid for episodes of at most 5 steps"
    for read in (lambda: run.lengths(FILL), lambda: run.transitions([0])):
        with pytest.raises(storage.DamagedRun, match=found):
            read()


def test_episodes_of_no_steps_and_of_the_most_are_counted(make_off_policy_run):
    path, lengths = make_off_policy_run(1), [[0, 5], [1, 0], [0, 0]]
    agree(path, FILL, "lengths", np.array(lengths, np.int32).tobytes())
    assert storage.open_run(path).lengths(FILL).tolist() == lengths


def test_outputs_that_are_no_episodes_are_refused_as_such(make_off_policy_run):
    run = storage.open_run(make_off_policy_run(1))
    assert run.experience(FILL).initial_state.shape == (3, 2, 0)
    for read, stage, found in (
        (run.lengths, "sample_tasks", "commits no episodes"),
        (run.experience, "adapt", "commits no episodes"),
        (run.experience, "sample_tasks", r"do not form sample_tasks\(i=0, k=0\) \(KeyError"),
    ):
        with pytest.raises(storage.DamagedRun, match=rf"_commits/.*{stage}.*{found}"):
            read(StageRef(0, stage))


def test_arrays_that_do_not_form_what_their_stage_gives_are_refused(make_run):
    path = make_run(1)
    rewrite(rewards_record(path), lambda document: document["chunks"].pop(0))
    with pytest.raises(storage.DamagedRun, match=r"do not form collect_rollouts\(i=0, k=0\) \(\w+Error"):
        storage.open_run(path)[0].rollouts(0)


@pytest.mark.parametrize("capacity", ["many", None, [2]])
def test_a_capacity_that_is_no_number_is_refused(make_run, capacity):
    path = make_run(1)
    rewrite(path / "data.zarr/zarr.json", lambda d: d["attributes"].update(capacity=capacity), holder="attributes")
    with pytest.raises(storage.DamagedRun, match=r"data\.zarr/zarr\.json: has no valid capacity \(\w+Error"):
        _ = storage.open_run(path).capacity


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("data.zarr/zarr.json", lambda path: storage.open_run(path).capacity),
        ("_commits", lambda path: storage.open_run(path).refs()),
        ("data.zarr/tasks/params/zarr.json", lambda path: storage.open_run(path)[0].tasks()),
        ("data.zarr/tasks/params/c.0.0.0", storage.open_writer),
    ],
)
def test_what_is_missing_from_a_run_is_named(make_run, name, read):
    path = make_run(1)
    os.rename(path / name, path.parent / "elsewhere")
    with pytest.raises(storage.DamagedRun, match=f"{name}: missing"):
        read(path)


def test_of_several_missing_files_the_writer_names_that_of_the_earliest_output(make_run):
    path = make_run(1)
    for array in (path / "data.zarr").glob("*/*"):
        for chunk in array.glob("c.*"):
            chunk.unlink()
    with pytest.raises(storage.DamagedRun, match=r"missing; it belongs to initialize\(i=0, k=0\)"):
        storage.open_writer(path)


def test_a_chunk_or_table_of_another_size_than_was_committed_is_refused_by_the_writer(make_run):
    path = make_run(1)
    for name in ("data.zarr/tasks/params/c.0.0.0", "tables/tasks/00000000.parquet"):
        raw = (path / name).read_bytes()
        (path / name).write_bytes(raw + b"x")
        found = f"{name}: holds {len(raw) + 1} bytes, but {len(raw)} were committed for "
        with pytest.raises(storage.DamagedRun, match=found):
            storage.open_writer(path)
        (path / name).write_bytes(raw)
    storage.open_writer(path).close()


@pytest.mark.parametrize("member", ["id", "config", "config_digest", "environment", "system", "versions", "created"])
def test_a_run_json_without_what_every_version_wrote_is_refused(make_run, member):
    path = make_run(1)
    rewrite(path / "run.json", lambda document: document.update({member: 3}))
    with pytest.raises(storage.IncompatibleFormat, match=rf"run\.json: no {member}; expected the members"):
        storage.open_run(path)


def test_a_run_json_of_other_outputs_than_any_version_has_is_refused(make_run):
    path = make_run(1)

    def change(document):
        for stage, output in zip(document["stages"], ("Wish", "Fear", "Dream", "Hope", "Awe"), strict=False):
            stage["output"] = output

    rewrite(path / "run.json", change)
    with pytest.raises(storage.IncompatibleFormat, match=r"stages that output Awe, Dream, Fear, Hope, Wish; expected"):
        storage.open_run(path)


def test_a_run_of_a_newer_format_is_refused_politely(make_run):
    path = make_run(1)
    rewrite(path / "run.json", lambda document: document.update(format="metaloom/9"))
    for use in (storage.open_run, storage.open_writer, storage.verify_run):
        with pytest.raises(storage.IncompatibleFormat, match="metaloom/9"):
            use(path)


def test_unknown_facts_in_run_json_are_kept(tmp_path, creation):
    storage.create_run(tmp_path / "run", capacity=1, **creation).close()
    rewrite(tmp_path / "run" / "run.json", lambda document: document.update(mood="good"))
    assert storage.open_run(tmp_path / "run").info["mood"] == "good"


def test_a_run_json_that_was_changed_and_sealed_again_is_refused_by_all_in_the_same_words(make_run):
    path = make_run(2)
    rewrite(path / "run.json", lambda document: document["config"].update(seed=2))
    for use in (storage.open_run, storage.open_writer):
        with pytest.raises(storage.DamagedRun, match="does not follow the record before it"):
            use(path)
    problems = [damage.problem for damage in storage.verify_run(path)]
    assert problems == ["not a copy of run.json", "does not follow the record before it"]


@pytest.mark.parametrize(
    "forged", [{"ancestors": [1]}, {"ancestors": {"a": 1}}, {"first_sequence": "x"}, {"parent": 3}, {"ancestors": 5}]
)
def test_a_run_json_with_ancestors_that_are_none_is_refused(make_run, forged):
    path = make_run(1)
    rewrite(path / "run.json", lambda document: document.update(forged))
    with pytest.raises(storage.DamagedRun):
        storage.open_run(path)


@pytest.mark.parametrize("stages", [3, [1], [{}], [{"name": "adapt"}], {"adapt": 1}])
def test_a_run_json_with_stages_that_are_no_table_is_refused(make_run, stages):
    path = make_run(1)
    rewrite(path / "run.json", lambda document: document.update(stages=stages))
    for use in (storage.open_run, storage.open_writer):
        with pytest.raises(storage.IncompatibleFormat, match="stages that are not a table"):
            use(path)


def test_the_store_contains_nothing_that_could_run_what_it_reads(pytestconfig):
    sources = sorted((pytestconfig.rootpath / "storage").rglob("*.py"))
    assert len(sources) > 15
    unsafe = re.compile(r"\b(import|from) (pickle|marshal|shelve|torch|yaml)|allow_pickle(?!=False)|\beval\(|\bexec\(")
    assert [file.name for file in sources if unsafe.search(file.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("name", ["999999.claim", "1000000.claim", f"{10**200}.claim", "999999-0123456789abcdef"])
def test_a_session_number_that_leaps_is_named_by_verify_and_refused_by_the_writer(make_run, name):
    path = make_run(1)
    entry = path / "_sessions" / name
    entry.touch() if name.endswith(".claim") else entry.mkdir()
    before = sorted(os.listdir(path / "_sessions"))
    assert [damage.file for damage in storage.verify_run(path)] == [f"_sessions/{name}"]
    with pytest.raises(storage.DamagedRun, match=rf"{name}: names session {re.split('[.-]', name)[0]}, .* remove it"):
        storage.open_writer(path, repair=True)
    assert sorted(os.listdir(path / "_sessions")) == before
    entry.unlink() if entry.is_file() else entry.rmdir()
    storage.open_writer(path).close()
    assert storage.verify_run(path) == []


def test_claims_that_a_power_cut_left_without_the_ones_before_are_sound_up_to_seven_digits(make_run, put, batches):
    path = make_run(1, capacity=2)
    for number in range(999, 1_000_000, 999):  # none leaps far
        (path / "_sessions" / f"{number:06d}.claim").touch()
    with storage.open_writer(path) as writer:
        assert writer.session == 1_000_000
        put(writer, batches.iteration(1))
    assert storage.open_run(path).record(StageRef(1, "sample_tasks")).session == 1_000_000
    assert storage.verify_run(path) == []


@pytest.mark.parametrize("changes", [{"lost": "x"}, {"lost": 3}, {"next_sequence": None}, {"head": {}}])
def test_a_session_that_describes_no_history_is_named_and_not_relied_on(make_run, changes):
    path = make_run(1)
    (session,) = path.glob("_sessions/*/session.json")
    rewrite(session, lambda document: document.update(changes))
    problems = {damage.file: damage.problem for damage in storage.verify_run(path)}
    assert "does not describe a session (" in problems[session.relative_to(path).as_posix()]
    storage.open_writer(path).close()


def test_a_record_of_an_array_that_is_not_part_of_a_run_is_removed_by_repair(make_run):
    path = make_run(1)
    rewrite(rewards_record(path), lambda document: document["chunks"][0].update(array="dreams/rewards"))
    with storage.open_writer(path, repair=True) as writer:
        assert not writer.contains(StageRef(0, "collect_rollouts"))
        (line,) = [line for line in writer.repaired if rewards_record(path).name in line]
    assert "names the array 'dreams/rewards', which is not part of a run" in line


def test_a_table_of_episodes_without_records_of_their_rollouts_is_not_read(make_run):
    path = make_run(1)
    assert storage.open_run(path).episodes().num_rows
    for record in path.glob("_commits/*collect_rollouts*"):
        record.unlink()
    with pytest.raises(storage.StoreError, match="no stage that stores rollouts, though the run has an episodes table"):
        storage.open_run(path).episodes()
