"""Any bytes give a reader's answer or one of its documented errors: a sample of what `make fuzz` tries."""

import random
from pathlib import Path

import pytest
from mutations import mutated
from readers import CORPUS, READERS


@pytest.mark.parametrize("number", [20, pytest.param(1000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", READERS)
def test_changed_files_are_read_or_refused(name: str, number: int) -> None:
    files = [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]
    others = [next(folder.iterdir()).read_bytes() for folder in sorted(CORPUS.iterdir())] + files
    rng = random.Random(name)
    for raw in files:
        READERS[name](raw)
    for _ in range(number):
        READERS[name](mutated(rng.choice(files), rng, others))


def test_there_are_examples_for_every_reader_and_they_are_small() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == {*READERS}
    assert sum(file.stat().st_size for file in Path(CORPUS).rglob("*") if file.is_file()) <= 200_000
