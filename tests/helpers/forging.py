"""Runs as somebody makes them who wants them to say something else."""

from metaloom.storage.format.files import read_sealed, render, sealed


def forge(path, change, amend=lambda record: {}):
    """Change a run.json, and have all records follow it again, as somebody would who made the run like that.

    What `amend` returns of a record is changed in it too.
    """
    document = read_sealed(path / "run.json", indented=True)
    change(document)
    previous = write(path / "run.json", document, indented=True)
    files = {file: read_sealed(file) for file in (path / "_commits").iterdir()}
    for file, record in sorted(files.items(), key=lambda item: item[1]["sequence"]):
        if record["sequence"] >= document.get("first_sequence", 0):
            previous = write(file, record | amend(record) | {"previous": previous})
    for file in (path / "_sessions").glob("*/session.json"):  # which know the newest record by its hash
        about = read_sealed(file)
        write(file, about | {"head": about["head"] | {"sha256": previous}} if "head" in about else about)
    for file in (path / "_sessions").glob("*/run.json"):
        write(file, document, indented=True)


def write(file, document, *, indented=False):
    document = sealed(document)
    file.unlink()  # a fork shares the file with its parent
    file.write_bytes(render(document, indented=indented))
    return document["sha256"]
