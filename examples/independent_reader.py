"""A reader of the formats metaloom/1 to metaloom/3 in NumPy, pyarrow and the standard library, without Metaloom.

    python independent_reader.py runs/first

prints the arrays of every stored output, after it has checked every byte and the chain of hashes.
docs/data_format.md and docs/records.md specify the format.
"""

import hashlib
import json
import struct
import sys
from math import prod
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def read_document(path, indented=False, holder=None):
    """A JSON document and its hash, which is a member of the document or of its member `holder`."""
    return parse_document(path.read_bytes(), path, indented, holder)


def parse_document(raw, path, indented=False, holder=None):
    document = json.loads(raw)
    assert render(document, indented) == raw, f"{path} is not in canonical form"
    said = (document[holder] if holder else document).pop("sha256")
    assert hashlib.sha256(render(document)).hexdigest() == said, f"{path} does not have the hash that it says"
    return document, said


def render(document, indented=False):
    layout = {"indent": 1} if indented else {"separators": (",", ":")}
    return json.dumps(document, sort_keys=True, allow_nan=False, ensure_ascii=False, **layout).encode() + b"\n"


def history(run):
    """The records of all stored outputs. Positions may only be missing where a later session knew of the loss."""
    info, sha256 = read_document(run / "run.json", indented=True)
    assert info["format"] in ("metaloom/1", "metaloom/2", "metaloom/3")
    begins, previous = {info.get("first_sequence", 0): sha256}, None
    for ancestor in reversed(info.get("ancestors", [])):  # a fork has records of the runs that it was made from
        if ancestor["first_sequence"] < min(begins):
            begins[ancestor["first_sequence"]] = ancestor["sha256"]
    records = [*packed_records(run)]
    packed = {(r["iteration"], r["stage"], r["step"]) for r, _ in records}
    live = [read_document(path) for path in (run / "_commits").glob("????????.*.json")]
    # An interrupted packing may have left records that a segment has.
    records += [(r, sha256) for r, sha256 in live if (r["iteration"], r["stage"], r["step"]) not in packed]
    records.sort(key=lambda record: record[0]["sequence"])
    lost = {n for path in run.glob("_sessions/*/session.json") for n in read_document(path)[0]["lost"]}
    position = 0
    for record, sha256 in records:
        skipped = set(range(position, record["sequence"]))
        assert skipped <= lost, f"the records {skipped - lost} are missing"
        expected = begins.get(record["sequence"], None if skipped else previous)
        assert expected in (None, record["previous"]), f"record {record['sequence']} follows another one"
        position, previous = record["sequence"] + 1, sha256
    check_inputs([record for record, _ in records])
    return [record | {"sha256": sha256} for record, sha256 in records]


def segments(run):
    """The folders of packed iterations, each with its seal."""
    for folder in sorted((run / "_segments").glob("*")):
        seal, _ = read_document(folder / "seal.json")
        yield folder, seal


def sealed_file(folder, seal, name):
    """The bytes of a file of a segment."""
    raw, said = (folder / name).read_bytes(), seal["files"][name]
    assert len(raw) == said["size"], f"{folder / name} has another size"
    assert hashlib.sha256(raw).hexdigest() == said["sha256"], f"{folder / name} is damaged"
    return raw


def packed_records(run):
    for folder, seal in segments(run):
        table = pq.read_table(pa.BufferReader(sealed_file(folder, seal, "records.parquet")))
        for document in table["document"].to_pylist():
            yield parse_document(document.encode(), folder)


def check_inputs(records):
    """Check that the inputs of every output, listed one by one or as spans, are the stored outputs."""
    digests = {(record["iteration"], record["step"], record["stage"]): record["digest"] for record in records}
    for record in records:
        for said in record["inputs"]:
            found = digests[said["iteration"], said["step"], said["stage"]]
            assert found == said["digest"], f"record {record['sequence']} was computed from another output"
        for said in record.get("spans", []):
            stages, first, last = said["stages"], said["first"]["iteration"], said["last"]["iteration"]
            refs = [ref for ref in digests if ref[2] in stages and first <= ref[0] <= last]
            refs.sort(key=lambda ref: (*ref[:2], stages.index(ref[2])))
            lines = [f"{i} {stage} {step} {digests[i, step, stage]}\n" for i, step, stage in refs]
            assert len(lines) == said["outputs"], f"record {record['sequence']} was computed from more or fewer outputs"
            digest = hashlib.sha256("".join(lines).encode()).hexdigest()
            assert digest == said["digest"], f"record {record['sequence']} was computed from other outputs"


def is_thinned(run, record):
    """Return True if the arrays of an output were removed on purpose."""
    marker = run / "_thinned" / f"{record['iteration']:08d}.json"
    outputs = read_document(marker)[0]["outputs"] if marker.exists() else packed_marker(run, record["iteration"])
    return {"stage": record["stage"], "step": record["step"], "record": record["sha256"]} in outputs


def packed_marker(run, iteration):
    """The outputs of an iteration that the marker of its segment lists as removed."""
    markers = [run / "_thinned" / f"{folder.name}.json" for folder, _ in segments(run)]
    said = [entry for path in markers if path.exists() for entry in read_document(path)[0]["thinned"]]
    return next((entry["outputs"] for entry in said if entry["iteration"] == iteration), [])


def read_output(run, record):
    """The arrays of one stage's output by name."""
    arrays = {}
    for chunk in record["chunks"]:
        about, _ = read_document(run / "data.zarr" / chunk["array"] / "zarr.json", indented=True, holder="attributes")
        raw = chunk_bytes(run, record, chunk) if chunk["size"] else b""  # a row without entries has no file
        assert len(raw) == chunk["size"], f"{chunk['path']} has another size"
        codecs = about["codecs"]
        if codecs[0]["name"] == "sharding_indexed":
            parts, codecs = parts_of(raw, chunk, about["shape"][1]), codecs[0]["configuration"]["codecs"]
        else:
            parts = [(raw, chunk["crc32c"])] if raw else []
        data = b"".join(decode(part, crc, codecs, chunk["path"]) for part, crc in parts)
        row = np.frombuffer(data, about["data_type"]).reshape(about["shape"][1:])
        arrays.update(unpack(chunk["array"], row, about["attributes"]))
    for name, said in record["arrays"].items():
        header = f"{arrays[name].dtype.str}{list(arrays[name].shape)}\n".encode()
        assert hashlib.sha256(header + arrays[name].tobytes()).hexdigest() == said["sha256"], f"{name} is another array"
    return arrays


def chunk_bytes(run, record, chunk):
    """A chunk from the segment of its iteration, or from its own file."""
    folder, _, name = chunk["path"].rpartition("/")
    _, row, *rest = name.split(".")
    for segment, seal in segments(run):
        array = seal["arrays"].get(chunk["array"])
        if array is None or record["iteration"] not in range(*seal["iterations"]):
            continue
        n = int(row) - array["first_row"]
        file = ".".join(["c", "0" if array["sharded"] else str(n), *rest])
        if array["sharded"]:  # the chunks, then offset and size of each, then a checksum of these
            shard = sealed_file(segment, seal, f"{folder}/{file}")
            offset, size = struct.unpack_from("<2Q", shard[-16 * array["rows"] - 4 :], 16 * n)
            if offset != 2**64 - 1:
                return shard[offset : offset + size]
        elif (segment / folder / file).exists():
            return (segment / folder / file).read_bytes()
    return (run / chunk["path"]).read_bytes()


def parts_of(raw, chunk, count):
    """The parts of a shard, one per task, and their CRC-32C: a table and an index of them end the file."""
    tail = raw[-20 * count - 4 :]
    index = tail[4 * count : -4]
    assert crc32c(tail[:-4]) == chunk["crc32c"], f"{chunk['path']} is damaged"
    assert crc32c(index) == int.from_bytes(tail[-4:], "little"), f"{chunk['path']} is damaged"
    parts, end = [], 0
    crcs = struct.unpack(f"<{count}I", tail[: 4 * count])
    for crc, (start, size) in zip(crcs, struct.iter_unpack("<2Q", index), strict=True):
        assert start == end, f"the parts of {chunk['path']} do not follow each other"
        end = start + size
        parts.append((raw[start:end], crc))
    assert end == len(raw) - len(tail), f"the parts of {chunk['path']} do not fill it"
    return parts


def decode(raw, crc, codecs, path):
    """The bytes of a chunk or part, which ends in its own checksum."""
    assert crc == crc32c(raw[:-4]) == int.from_bytes(raw[-4:], "little"), f"{path} is damaged"
    return decompress(raw[:-4]) if "blosc" in [codec["name"] for codec in codecs] else raw[:-4]


def unpack(path, row, attributes):
    """The named arrays: one per parameter and per metric."""
    group, _, name = path.partition("/")
    if group == "metrics":
        return {f"metrics.{metric}": row[m] for m, metric in enumerate(attributes["names"])}
    if "entries" not in attributes:
        return {name: row}
    prefix = ("learner." if group == "learner" else "") + name.rpartition(".")[0]
    arrays = {}
    for entry in attributes["entries"]:
        part = row[..., entry["offset"] : entry["offset"] + prod(entry["shape"])]
        arrays[f"{prefix}.{entry['name']}"] = part.reshape((*row.shape[:-1], *entry["shape"]))
    return arrays


def read_table(run, name, iteration):
    """One iteration's rows of the table `episodes`, `tasks`, `metrics` or `evaluations`."""
    info, _ = read_document(run / "run.json", indented=True)
    for folder, seal in segments(run):
        if iteration in range(*seal["iterations"]) and f"tables/{name}.parquet" in seal["files"]:
            table = pq.read_table(pa.BufferReader(sealed_file(folder, seal, f"tables/{name}.parquet")))
            return table.filter(np.asarray(table["iteration"]) == iteration)
    stage = "evaluate" if name == "evaluations" else info.get("last_stage", "meta_optimize")
    record, _ = read_document(run / "_commits" / f"{iteration:08d}.{stage}.0.json")
    path = f"tables/{name}/{iteration:08d}.parquet"
    (said,) = [table for table in record["tables"] if table["path"] == path]
    raw = (run / path).read_bytes()
    assert (len(raw), crc32c(raw)) == (said["size"], said["crc32c"]), f"{path} is damaged"
    return pq.read_table(pa.BufferReader(raw))


def decompress(data):
    """Blosc 1 with LZ4: blocks, each cut into as many streams as an entry has bytes unless bit 4 says otherwise."""
    flags, size, total, block = data[2], data[3], *struct.unpack("<II", data[4:12])
    if flags & 2:  # stored as it is
        return data[16 : 16 + total]
    starts = struct.unpack(f"<{-(-total // block)}I", data[16 : 16 + 4 * -(-total // block)])
    blocks = []
    for start, position in zip(starts, range(0, total, block), strict=True):
        length = min(block, total - position)
        streams = 1 if flags & 16 or length < block else size
        pieces = []
        for _ in range(streams):
            (stored,) = struct.unpack("<I", data[start : start + 4])
            piece, start = data[start + 4 : start + 4 + stored], start + 4 + stored
            whole = length // streams
            pieces.append(piece if stored == whole else pa.decompress(piece, whole, "lz4_raw", asbytes=True))
        blocks.append(unshuffle(b"".join(pieces), size) if flags & 1 and size > 1 else b"".join(pieces))
    return b"".join(blocks)


def unshuffle(block, size):
    """Undo the byte shuffle: a block has all first bytes of its entries, then all second ones."""
    whole = len(block) // size * size
    return np.frombuffer(block[:whole], np.uint8).reshape(size, -1).T.tobytes() + block[whole:]


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def crc_entry(byte):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


CRC_TABLE = [crc_entry(byte) for byte in range(256)]


def main(run):
    for record in history(run):
        if not is_thinned(run, record):  # its arrays were removed on purpose
            arrays = read_output(run, record)
            print(record["iteration"], record["stage"], record["step"], {name: a.shape for name, a in arrays.items()})
    print(read_table(run, "episodes", iteration=0).to_pandas())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
