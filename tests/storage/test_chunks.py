"""The bytes of a chunk depend on its array alone, and no other bytes are taken for it."""

import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numcodecs
import numpy as np
import pytest

from metaloom.storage import DamagedRun, IncompatibleFormat
from metaloom.storage.format.arrays import (
    COMPRESS_FROM,
    CRC_BYTES,
    ArraySpec,
    ShardPart,
    check_chunk,
    check_parts,
    crc32c,
    decode_chunk,
    decode_parts,
    encode_chunk,
    encode_shard,
    read_parts,
    read_spec,
)
from metaloom.storage.format.codec import Piece
from metaloom.storage.format.files import read_file, render
from metaloom.storage.format.stages import ON_POLICY, plan_in

# In a process of its own: whoever imports zarr, as other tests do, has turned blosc's threads off already.
ENCODE = """
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from metaloom.storage.format.arrays import encode_chunk

array = np.cumsum(np.random.default_rng(0).standard_normal(5_000_000, np.float32))
with ThreadPoolExecutor(1) as elsewhere:
    there, _ = elsewhere.submit(encode_chunk, array, compressed=True).result()
print(len({there[0], *(encode_chunk(array, compressed=True)[0][0] for _ in range(5))}))
"""


def test_large_arrays_have_the_same_bytes_every_time_and_in_every_thread():
    found = subprocess.run([sys.executable, "-c", ENCODE], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"


SPEC = ArraySpec("rollouts_0/rewards", 2, (COMPRESS_FROM // 4,), "float32", ("iteration", "task"), {})
VALUES = np.random.default_rng(0).standard_normal(SPEC.shape, np.float32)
WHERE = Path("chunk")
UNREADABLE = Path("/proc/self/mem")
RAW_BYTES, BLOCK, COMPRESSED = 4, 8, 12  # places in the header of blosc


def encoded(values=VALUES, spec=SPEC):
    content, crc = encode_chunk(values, compressed=spec.compressed)
    return bytearray(b"".join(content)), crc


def test_a_row_of_the_smallest_size_that_is_compressed_comes_back_as_one_below_it_does():
    shorter = replace(SPEC, shape=(SPEC.shape[0] - 1,))
    assert (SPEC.compressed, shorter.compressed) == (True, False)
    assert SPEC.raw_bytes == 65_536
    assert [replace(SPEC, shape=(size,), dtype="uint8").compressed for size in (2**31 - 1, 2**31)] == [True, False]
    for spec, values in ((SPEC, VALUES), (SPEC, np.zeros_like(VALUES)), (shorter, VALUES[:-1])):
        raw, crc = encoded(values, spec)
        check_chunk(bytes(raw), WHERE, size=len(raw), crc=crc)
        np.testing.assert_array_equal(decode_chunk(bytes(raw), spec, WHERE), values)
    assert struct.unpack_from("<I", encoded()[0], BLOCK)[0] == SPEC.raw_bytes  # as large as a block may be


def test_what_is_compressed_is_compressed_as_its_metadata_says():
    walk = np.cumsum(np.random.default_rng(0).standard_normal(300_000, np.float32))
    (payload, _), _ = encode_chunk(walk, compressed=True)
    _, blosc, _ = replace(SPEC, shape=walk.shape).document()["codecs"]
    about = blosc["configuration"]
    assert about == {"blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": "shuffle", "typesize": 4}
    assert numcodecs.Blosc("lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE).encode(walk) == payload


@pytest.mark.parametrize(
    ("shape", "sharded"),
    [
        ((2, 1, 8192), True),
        ((2, 1, 8191), False),  # less than 64 KiB
        ((1, 2, 8192), False),  # one task
        ((64, 1, 256), True),
        ((65, 1, 255), False),  # less than 1 KiB of each task
    ],
)
def test_a_row_is_a_shard_if_it_is_large_and_of_several_tasks_each_of_which_has_enough(shape, sharded):
    plan = plan_in(ON_POLICY["collect_rollouts"], "rewards")
    piece = Piece("rollouts_0/rewards", 0, np.zeros(shape, np.float32), plan)
    spec = ArraySpec.of(piece, 2, shards=True)
    assert (spec.sharded, ArraySpec.of(piece, 2, shards=False).sharded) == (sharded, False)
    assert spec.part.dims == ("task", *spec.dims[2:])


@pytest.mark.parametrize(
    ("shape", "sharded", "chunk"),
    [
        ((), False, [1]),
        ((0,), False, [1, 1]),
        ((2, 0), False, [1, 2, 1]),
        ((2, 9000), True, [1, 2, 9000]),
        ((2, 1, 9000), True, [1, 2, 1, 9000]),
        ((0, 9000), True, None),
        ((9000,), True, None),
    ],
)
def test_metadata_of_rows_of_any_shape_is_read_as_it_was_written(shape, sharded, chunk, tmp_path):
    dims = ("iteration", "task", "episode", "time")[: len(shape) + 1]
    spec = ArraySpec("group/name", 0, shape, "float32", dims, {"unit": "1"}, sharded)
    document, file = spec.document(), tmp_path / spec.path / "zarr.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(render(document, indented=True))
    if chunk is None:  # no task's part of a row
        with pytest.raises(IncompatibleFormat, match="an array that this version does not write"):
            read_spec(tmp_path, spec.path)
        return
    assert read_spec(tmp_path, spec.path) == spec
    assert document["chunk_grid"]["configuration"]["chunk_shape"] == chunk
    if sharded:
        assert document["codecs"][0]["configuration"]["chunk_shape"] == [1, 1, *chunk[2:]]


@pytest.mark.parametrize(("dtype", "about"), [("uint8", {}), ("int16", {"configuration": {"endian": "little"}})])
def test_the_order_of_bytes_is_told_where_there_are_several(dtype, about):
    assert replace(SPEC, shape=(2,), dtype=dtype).document()["codecs"][0] == {"name": "bytes", **about}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (RAW_BYTES, SPEC.raw_bytes - 4),
        (RAW_BYTES, SPEC.raw_bytes + 4),
        (RAW_BYTES, 2**32 - 1),
        (BLOCK, 0),
        (BLOCK, SPEC.raw_bytes + 1),
        (COMPRESSED, len(encoded()[0]) - CRC_BYTES - 1),
        (COMPRESSED, len(encoded()[0]) - CRC_BYTES + 1),
    ],
)
def test_a_header_that_says_other_sizes_is_refused_before_blosc_writes_a_byte(place, value):
    raw, _ = encoded()
    struct.pack_into("<I", raw, place, value)
    out = np.full_like(VALUES, 7)
    with pytest.raises(DamagedRun, match="its compression header does not describe a row"):
        decode_chunk(bytes(raw), SPEC, WHERE, out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("row_bytes", "found"),
    [(300 * 1016, "does not decompress"), (300 * 1016 + 4, "its compression header does not describe a row")],
)
def test_more_than_lz4_can_expand_to_is_refused(row_bytes, found):
    raw = struct.pack("<4xIII", row_bytes, row_bytes, 1016) + bytes(1000 + CRC_BYTES)
    with pytest.raises(DamagedRun, match=found):
        decode_chunk(raw, replace(SPEC, shape=(row_bytes // 4,)), WHERE)


@pytest.mark.parametrize("size", [0, 19, 20])
def test_a_chunk_too_short_for_a_header_is_refused_as_such(size):
    with pytest.raises(DamagedRun, match="too short" if size < 20 else "does not describe a row"):
        decode_chunk(bytes(size), SPEC, WHERE)


def test_what_does_not_decompress_is_refused():
    raw, _ = encoded()
    raw[16:-CRC_BYTES] = bytes(len(raw) - 16 - CRC_BYTES)
    with pytest.raises(DamagedRun, match="does not decompress"):
        decode_chunk(bytes(raw), SPEC, WHERE)


@pytest.mark.parametrize("bytes_more", [-4, 4])
def test_a_chunk_of_another_size_than_its_row_is_refused(bytes_more):
    with pytest.raises(DamagedRun, match=rf"holds {12 + bytes_more} bytes of data; a row of .* has 12"):
        decode_chunk(bytes(12 + bytes_more + CRC_BYTES), replace(SPEC, shape=(3,)), WHERE)


def test_each_part_of_the_checksum_of_a_chunk_tells_it_from_others():
    raw, crc = encoded()
    other, _ = encoded(VALUES[::-1])
    flipped = bytes(raw[:-9]) + bytes([raw[-9] ^ 1]) + bytes(raw[-8:])
    with pytest.raises(DamagedRun, match=f"holds {len(raw)} bytes, but {len(raw) + 1} were committed"):
        check_chunk(bytes(raw), WHERE, size=len(raw) + 1, crc=crc)
    for wrong in (bytes(other), flipped):  # one that is whole, and one with the committed last bytes
        with pytest.raises(DamagedRun, match="its CRC-32C differs from the committed one"):
            check_chunk(wrong, WHERE, size=len(wrong), crc=crc)


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ([[0, 0], [0, 0]], None),
        ([[0, 0], [0, -1]], "its parts do not fill it"),
        ([[0, 1], [0, 0]], "its parts do not fill it"),
        ([[1, 0], [1, 0]], "its parts do not fill it"),
    ],
    ids=["as written", "a gap at the end", "an overlap", "a gap at the beginning"],
)
def test_parts_of_a_shard_follow_one_another_and_fill_it(tmp_path, added, problem):
    content, _ = encode_shard(VALUES.reshape(2, -1))
    *pieces, table, index, _ = content
    index = (np.frombuffer(index, "<u8").astype(np.int64).reshape(2, 2) + added).astype("<u8").tobytes()
    raw = b"".join([*pieces, table, index, crc32c(index).to_bytes(CRC_BYTES, "little")])
    (tmp_path / "shard").write_bytes(raw)
    spec = replace(SPEC, shape=(2, SPEC.shape[0] // 2), sharded=True)
    with (tmp_path / "shard").open("rb") as file:
        if problem is None:
            parts = read_parts(file.fileno(), spec, WHERE, size=len(raw), crc=crc32c(table + index))
            np.testing.assert_array_equal(decode_parts(file.fileno(), parts, spec, WHERE), VALUES.reshape(2, -1))
            return
        with pytest.raises(DamagedRun, match=problem):
            read_parts(file.fileno(), spec, WHERE, size=len(raw), crc=crc32c(table + index))


@pytest.mark.parametrize("size", [0, 43])
def test_a_shard_too_short_for_its_table_is_refused(tmp_path, size):
    (tmp_path / "shard").write_bytes(bytes(size))
    with (tmp_path / "shard").open("rb") as file, pytest.raises(DamagedRun, match=": too short for a shard"):
        read_parts(file.fileno(), replace(SPEC, shape=(2, 8), sharded=True), WHERE, size=size, crc=0)


def test_a_shard_of_another_size_than_was_committed_is_refused(tmp_path):
    content, crc = encode_shard(VALUES.reshape(2, -1))
    raw, spec = b"".join(content), replace(SPEC, shape=(2, SPEC.shape[0] // 2), sharded=True)
    (tmp_path / "shard").write_bytes(raw)
    with (tmp_path / "shard").open("rb") as file:
        assert len(read_parts(file.fileno(), spec, WHERE, size=len(raw), crc=crc)) == 2
        with pytest.raises(DamagedRun, match=f"holds {len(raw)} bytes, but {len(raw) + 1} were committed"):
            read_parts(file.fileno(), spec, WHERE, size=len(raw) + 1, crc=crc)


@pytest.mark.skipif(not UNREADABLE.exists(), reason="a system without a file that gives an error of the disk")
def test_an_error_of_the_disk_is_named():
    with UNREADABLE.open("rb") as file, pytest.raises(DamagedRun, match="chunk: Input/output error"):
        check_parts(file.fileno(), [ShardPart(0, 8, 0)], WHERE)
    with pytest.raises(DamagedRun, match=f"{UNREADABLE}: Input/output error"):
        read_file(UNREADABLE, limit=10)
