"""Parts of the format by themselves: in one order whatever the order they come in, and refused beyond their limits."""

import errno
import io
import json
import os
import platform
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaloom.pipeline.types import LearnerState, Update
from metaloom.storage import DamagedRun, LayoutMismatch, StageRef, StorageFailed
from metaloom.storage.format.arrays import ArraySpec
from metaloom.storage.format.codec import decode, encode
from metaloom.storage.format.files import parse_sealed, read_file, read_sealed, render, sealed
from metaloom.storage.format.provenance import system
from metaloom.storage.format.records import parse_session
from metaloom.storage.format.segments import (
    Link,
    PackedArray,
    PackedFile,
    Seal,
    array_document,
    index_size,
    join,
    place_in_shard,
    ranges,
    read_seal,
    segment_name,
    shard_index,
    spec_in_segment,
)
from metaloom.storage.format.sessions import Head, SessionFacts, newest_session, session_facts, stray_sessions
from metaloom.storage.format.stages import ARRAYS, ON_POLICY
from metaloom.storage.format.thinning import (
    is_marker,
    marker_path,
    packed_marker_path,
    read_marker,
    read_packed_marker,
    render_marker,
    render_packed_marker,
)
from metaloom.storage.read import history, parquet
from metaloom.storage.read.history import describe_missing, missing_positions
from metaloom.storage.read.segments import Segment, Segments

TOKEN = "0123456789abcdef"
OUTPUTS = {StageRef(3, stage, k): f"{stage}{k}" for k in range(3) for stage in ("collect_rollouts", "process_samples")}


def shuffled(entries: dict[StageRef, str]) -> dict[StageRef, str]:
    items = [*entries.items()]
    random.Random(2).shuffle(items)
    assert items != [*entries.items()]
    return dict(items)


def links(*sequences: int) -> list[Link]:
    """Return a link for each record of a chain, from the last one to the first."""
    heads = [Head(n, f"hash {n}", StageRef(n, "adapt"), "") for n in sequences]
    return [Link(head.sequence, f"hash {head.sequence - 1}", head) for head in reversed(heads)]


def test_markers_have_the_same_bytes_whatever_the_order_of_outputs_and_iterations(tmp_path: Path) -> None:
    assert render_marker(3, shuffled(OUTPUTS)) == render_marker(3, OUTPUTS)
    (tmp_path / "_thinned").mkdir()
    marker_path(tmp_path, 3).write_bytes(render_marker(3, OUTPUTS))
    assert read_marker(marker_path(tmp_path, 3), ON_POLICY) == OUTPUTS
    marker_path(tmp_path, 4).write_bytes(render_marker(3, OUTPUTS))
    with pytest.raises(DamagedRun, match=r"not the marker of a thinned iteration .* or iteration 3"):
        read_marker(marker_path(tmp_path, 4), ON_POLICY)
    other = {StageRef(2, "adapt"): "a"}
    marker = render_packed_marker(range(2, 5), {3: shuffled(OUTPUTS), 4: {}, 2: other})
    assert marker == render_packed_marker(range(2, 5), {2: other, 3: OUTPUTS})
    path = packed_marker_path(tmp_path, range(2, 5))
    assert [is_marker(name) for name in (marker_path(tmp_path, 3).name, path.name, "3.json")] == [True, True, False]
    path.write_bytes(marker)
    assert read_packed_marker(path, range(2, 5), ON_POLICY) == {2: other, 3: OUTPUTS}
    path.write_bytes(render_packed_marker(range(2, 5), {5: {StageRef(5, "adapt"): "a"}}))
    with pytest.raises(DamagedRun, match="describes other iterations"):
        read_packed_marker(path, range(2, 5), ON_POLICY)


def test_links_and_numbers_are_joined_whatever_their_order_and_only_where_they_follow_one_another() -> None:
    chain = links(0, 1, 2, 4, 5)
    assert [(link.first, link.head.sequence) for link in join(chain)] == [(0, 2), (4, 5)]
    assert [(link.first, link.head.sequence) for link in join([chain[0], Link(4, "hash 3", chain[1].head)])] == [(4, 5)]
    forked = [Link(1, "another hash", chain[3].head), chain[4]]
    assert [link.first for link in join(forked)] == [0, 1]
    assert [*ranges([7, 3, 1, 2, 9, 8])] == [range(1, 4), range(7, 10)]
    assert [*ranges([])] == []


def test_sessions_are_strays_by_their_numbers_whatever_the_order_of_their_names(tmp_path: Path) -> None:
    names = [f"{number:06d}.claim" for number in (2, 0, 1)]
    assert [*stray_sessions(tmp_path, names)] == []
    assert [*stray_sessions(tmp_path, [*names, "99999999.claim"])] == [("99999999.claim", 2)]


def test_the_index_of_a_shard_says_where_each_row_is_and_is_checked(tmp_path: Path) -> None:
    index = shard_index([3, None, 0, 5])
    assert len(index) == index_size(4)
    assert index[16:32] == b"\xff" * 16  # as Zarr says that a chunk is missing
    assert [place_in_shard(index, row, tmp_path) for row in range(4)] == [(0, 3), None, (3, 0), (3, 5)]
    for place in range(len(index)):
        flipped = index[:place] + bytes([index[place] ^ 1]) + index[place + 1 :]
        with pytest.raises(DamagedRun):
            place_in_shard(flipped, 0, tmp_path)


@pytest.mark.parametrize(("more", "problem"), [(0, None), (1, "too many outputs: 4194305")])
def test_a_seal_of_more_outputs_than_memory_is_for_is_refused(more: int, problem: str | None, tmp_path: Path) -> None:
    held = range(2**22 + more)
    (chain,) = links(0)
    files = {"records.parquet": PackedFile(1, "")}
    sessions = [(number, TOKEN) for number in range(9)]
    seal = Seal(held, {("adapt", 0): (held,)}, (chain,), frozenset(sessions), {}, files)
    assert json.loads(seal.content())["sessions"] == [[*session] for session in sessions]
    folder = tmp_path / segment_name(held)
    folder.mkdir()
    (folder / "seal.json").write_bytes(seal.content())
    if problem is None:
        assert read_seal(folder) == seal
        return
    with pytest.raises(DamagedRun, match=problem):
        read_seal(folder)


@pytest.mark.parametrize(("first", "second", "overlap"), [((0, 3), (3, 5), False), ((0, 4), (3, 5), True)])
def test_two_segments_of_one_iteration_are_a_conflict(first: Any, second: Any, overlap: bool, tmp_path: Path) -> None:
    both = [SimpleNamespace(folder=tmp_path / str(ends), iterations=range(*ends)) for ends in (second, first)]
    problems = Segments(tmp_path).use(cast(list[Segment], both))
    expected = [(tmp_path / str(second), f"covers iterations that {first} also covers")]
    assert problems == (expected if overlap else [])


@pytest.mark.parametrize(("number", "token"), [(-1, TOKEN), (10**9, TOKEN), (0, TOKEN[1:]), (0, TOKEN.upper())])
def test_a_session_with_another_number_or_token_than_a_folder_can_have_is_refused(number: int, token: str) -> None:
    with pytest.raises(ValueError, match=f"session number {number} or token"):
        parse_session(number, token)
    assert parse_session(10**9 - 1, TOKEN) == (10**9 - 1, TOKEN)
    assert parse_session(0, TOKEN) == (0, TOKEN)


def test_documents_have_one_form() -> None:
    assert render({"b": "ä", "a": [1, 1.5], "c": None}) == '{"a":[1,1.5],"b":"ä","c":null}\n'.encode()
    assert render({"b": 1, "a": {}}, indented=True) == b'{\n "a": {},\n "b": 1\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        render({"a": float("nan")})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"a": float("nan")}, "checksum"),
        ({"a": float("inf")}, "checksum"),
        ([1], "the JSON is a list"),
        (None, "the JSON is a NoneType"),
    ],
)
def test_a_document_is_an_object_without_what_json_does_not_have(content: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_sealed(json.dumps(content, separators=(",", ":")).encode() + b"\n")
    assert parse_sealed(render(sealed({"a": 1.5})))["a"] == 1.5


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.mkdir(), "a folder, not a file"),
        (lambda path: path.parent.write_bytes(b""), "not a regular file"),
        (lambda path: path.symlink_to("elsewhere"), "link"),
    ],
    ids=["a folder", "below a file", "a link"],
)
def test_what_is_no_regular_file_is_not_read(make: Callable[[Path], object], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    if problem != "not a regular file":
        path.parent.mkdir()
    make(path)
    with pytest.raises(DamagedRun, match=problem):
        read_file(path, limit=10)


def test_names_of_sessions_may_leap_by_a_thousand(tmp_path: Path) -> None:
    names = ["000003.claim", "001003.claim", f"002004-{TOKEN}"]
    assert [*stray_sessions(tmp_path, names)] == [(names[2], 1003)]
    (tmp_path / names[2]).mkdir()
    (tmp_path / names[2] / "session.json").touch()  # it describes itself
    assert [*stray_sessions(tmp_path, names)] == []
    assert [*stray_sessions(tmp_path, ["notes", "000999.claim"])] == []
    assert [*stray_sessions(tmp_path, ["001000.claim"])] == [("001000.claim", -1)]


def test_the_newest_session_of_a_run_that_describes_itself_is_asked_unless_an_ancestor_wrote_it(tmp_path: Path) -> None:
    abouts: list[dict[str, Any] | None] = [{"head": links(7)[0].head.document(), "sealed": True}, {}, None]
    for number, about in enumerate(abouts):
        folder = tmp_path / "_sessions" / f"{number:06d}-{TOKEN}.closed"
        folder.mkdir(parents=True)
        if about is not None:
            (folder / "session.json").write_bytes(
                render(sealed({"lost": [4], "next_sequence": 3 - 3 * number, **about}))
            )
    facts = newest_session(tmp_path, 1)
    assert facts == SessionFacts(1, TOKEN, frozenset([4]), 0, None, sealed=False)
    assert facts is not None
    assert facts.known == 0
    assert newest_session(tmp_path, 2) is None
    assert session_facts(tmp_path / "_sessions" / f"000000-{TOKEN}").known == 8


def test_a_file_of_the_largest_size_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file", limit=5) == b"12345"
    with pytest.raises(DamagedRun, match="holds 5 bytes, more than the 4 allowed"):
        read_file(tmp_path / "file", limit=4)
    os.truncate(tmp_path / "file", 2**24)
    with pytest.raises(DamagedRun, match="not valid JSON"):
        read_sealed(tmp_path / "file")
    os.truncate(tmp_path / "file", 2**24 + 1)
    with pytest.raises(DamagedRun, match="holds 16777217 bytes, more than the 16777216 allowed"):
        read_sealed(tmp_path / "file")


@pytest.mark.parametrize(
    ("error", "found"),
    [(OSError(errno.EACCES, "Permission denied", "file"), "Permission denied"), (OSError("no disk"), "no disk")],
)
def test_why_a_file_cannot_be_opened_is_told_once(error: OSError, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageFailed) as told:
        read_file(Path("file"), limit=1)
    assert told.value.found == found


@pytest.mark.parametrize(("processor", "cpu"), [("Itanium 2", "Itanium 2"), ("", "ia64")])
def test_a_processor_that_has_no_name_is_told_by_its_kind(
    processor: str, cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: processor)
    monkeypatch.setattr(platform, "machine", lambda: "ia64")
    assert system()["cpu"] == cpu


def test_metrics_have_as_many_names_and_belong_to_an_iteration() -> None:
    def update(names: list[str]) -> Any:
        groups: Any = {"learner": {}, "metrics": {"values": (np.array([1.0, 2.0]), {"names": names})}}
        return decode(ON_POLICY["meta_optimize"], "learner", groups)

    assert update(["a", "b"]).metrics == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="argument 2 is longer"):
        update(["a"])
    with pytest.raises(LayoutMismatch, match="1 metrics; expected none: no iteration has begun"):
        encode(ON_POLICY, StageRef(0, "initialize"), Update(LearnerState({}, {}, {}), {"loss": 1.0}))


def test_every_plan_is_for_arrays_with_names_that_can_be_stored() -> None:
    names = [plan.pattern.replace("*", "x") for plans in ARRAYS.values() for plan in plans]
    assert [name for name in names if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", name)] == []


def test_missing_positions_are_those_of_no_link_up_to_a_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = links(7, 3, 2)
    assert missing_positions(tmp_path, chain, 9) == [0, 1, 4, 5, 6, 8]
    assert missing_positions(tmp_path, chain, 5) == [0, 1, 4]
    assert "positions 0 to 1, 4 of the history" in describe_missing([0, 1, 4], None)
    known = SessionFacts(5, TOKEN, frozenset(), 9, chain[2].head, sealed=True)
    assert describe_missing([7], known).endswith("; the newest that session 5 knew of is adapt(i=7, k=0)")
    assert describe_missing([6], known).endswith("are missing")
    with pytest.raises(DamagedRun, match="ends at position 10000001, with no records before it"):
        missing_positions(tmp_path, [], 10**7 + 1)
    monkeypatch.setattr(history, "_MOST_MISSING", 3)
    assert missing_positions(tmp_path, chain, 8) == [0, 1, 4, 5, 6]
    monkeypatch.setattr(history, "_MOST_MISSING", 2)
    with pytest.raises(DamagedRun, match="ends at position 8, with no records before it"):
        missing_positions(tmp_path, chain, 8)


def parquet_of(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


@pytest.mark.parametrize("limit", ["_MOST_CELLS", "_MOST_TABLE_BYTES"])
def test_a_table_at_its_limit_is_read_and_one_beyond_is_not(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = parquet_of(iteration=[0, 1, 2], value=[0.0, 1.0, 2.0])
    size = pq.ParquetFile(io.BytesIO(raw)).metadata.row_group(0).total_byte_size
    most = 6 if limit == "_MOST_CELLS" else size
    monkeypatch.setattr(parquet, limit, most)
    assert parquet.parse_table(raw, Path("file"))["value"].to_pylist() == [0, 1, 2]
    monkeypatch.setattr(parquet, limit, most - 1)
    with pytest.raises(DamagedRun, match=f"claims 3 rows of 2 columns in {size} bytes"):
        parquet.parse_table(raw, Path("file"))
    assert parquet.parse_table(raw, Path("file"), scale=2).num_rows == 3


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"iteration": ["a"]}, "has the column 'iteration' of BYTE_ARRAY"),
        ({"iteration": [0], "x": [[0]]}, "has the column 'element' of lists"),
        ({"iteration": [0.5]}, "has no iteration column"),
        ({"other": [0]}, "has no iteration column"),
    ],
)
def test_a_table_of_other_columns_is_refused(columns: Any, problem: str) -> None:
    with pytest.raises(DamagedRun, match=problem):
        parquet.parse_table(parquet_of(**columns), Path("file"))
    with pytest.raises(DamagedRun, match="not a table"):
        parquet.parse_table(b"PAR1", Path("file"))


def test_records_at_their_limits_are_read_and_beyond_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = parquet_of(document=["abc", "abc", "de"])
    size = pq.ParquetFile(io.BytesIO(raw)).metadata.row_group(0).total_byte_size

    def read() -> list[list[object]]:
        return parquet.read_columns(parquet.open_records(raw, Path("file")), ["document"], Path("file"))

    for limit, most in (("MOST_RECORDS", 3), ("_MOST_TEXT_BYTES", size)):
        with monkeypatch.context() as patch:
            patch.setattr(parquet, limit, most)
            assert read() == [["abc", "abc", "de"]]
            patch.setattr(parquet, limit, most - 1)
            with pytest.raises(DamagedRun, match=f"claims 3 rows, and up to {size} bytes at once"):
                read()
    opened = parquet.open_records(raw, Path("file"))
    monkeypatch.setattr(parquet, "_MOST_TEXT_BYTES", 8)  # three texts of three, three and two bytes
    assert parquet.read_columns(opened, ["document"], Path("file")) == [["abc", "abc", "de"]]
    monkeypatch.setattr(parquet, "_MOST_TEXT_BYTES", 7)
    with pytest.raises(DamagedRun, match="has a column of 8 bytes"):
        parquet.read_columns(opened, ["document"], Path("file"))
    monkeypatch.setattr(parquet, "_MOST_TEXT_BYTES", 0)
    absent = pq.ParquetFile(io.BytesIO(parquet_of(document=pa.nulls(2, pa.string()))), read_dictionary=["document"])
    assert parquet.read_columns(absent, ["document"], Path("file")) == [[None, None]]


@pytest.mark.parametrize(("of_tasks", "in_one_file"), [(False, False), (False, True), (True, False)])
def test_the_metadata_of_an_array_in_a_segment_says_what_it_is_outside(
    of_tasks: bool, in_one_file: bool, tmp_path: Path
) -> None:
    spec = ArraySpec("rollouts_0/rewards", 9, (2, 2048), "float32", ("iteration", "task", "t"), {"unit": "1"}, of_tasks)
    array = PackedArray(3, 4, in_one_file)
    (tmp_path / "zarr.json").write_bytes(render(array_document(spec, array), indented=True))
    assert spec_in_segment(tmp_path / "zarr.json", spec.path, array, 9) == spec


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schema": "metaloom/99"}, r"schema 'metaloom/99' or iterations \[2, 5\]"),
        ({"iterations": [2, 4]}, r"iterations \[2, 4\]"),
        ({"thinned": [{"iteration": 2, "outputs": [{"stage": "initialize", "step": 0, "record": ""}]}]}, "be thinned"),
        ({"thinned": [{"iteration": 2}]}, "KeyError: 'outputs'"),
    ],
)
def test_a_marker_of_other_iterations_or_outputs_is_refused(changes: Any, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "marker"
    document = parse_sealed(render_packed_marker(range(2, 5), {2: {StageRef(2, "adapt"): "a"}}))
    path.write_bytes(render(sealed(document)))
    assert read_packed_marker(path, range(2, 5), ON_POLICY) == {2: {StageRef(2, "adapt"): "a"}}
    path.write_bytes(render(sealed(document | changes)))
    with pytest.raises(DamagedRun, match=f"not a marker of thinned iterations .*{problem}"):
        read_packed_marker(path, range(2, 5), ON_POLICY)
