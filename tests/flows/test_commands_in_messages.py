"""A command that a message advises, typed as it stands, reaches the run that the message is about."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.runs import RunAt


@pytest.fixture(params=["elsewhere/x", "elsewhere/it's $HOME", "at@host/x", "x"])
def place(request, copy_tiny_run, tmp_path, monkeypatch):
    """The path of a run, in the working folder, beside a run of the same name in the runs folder."""
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    path = Path(request.param)
    copy_tiny_run(tmp_path / path)
    decoy = Path("runs", path.name)
    shutil.copytree(path, decoy)
    return path


def commands_in(text):
    """Every command that a text advises, as the words that a shell makes of it."""
    return [
        shlex.split(command)
        for command in re.findall(
            r"`?metaloom ((?:resume|thin|replay|show|evaluate|verify|rm|cancel|report|view) [^`;\n]+)", text
        )
    ]


def reached(words):
    return RunAt.parse(words[1]).path.resolve()


def test_every_message_names_the_run_that_it_is_about(place, tmp_path, capsys):
    run, said = storage.open_run(place), []

    def refused(act, kind=storage.StoreError):
        with pytest.raises(kind) as caught:
            act()
        said.append(str(caught.value))

    refused(lambda: run[7])
    refused(lambda: run.metrics(7))
    refused(lambda: run.record(storage.StageRef(0, "adapt", 3)))
    refused(lambda: run.evaluations())
    with storage.open_writer(place) as writer:
        writer.thin([0])
        refused(lambda: storage.open_writer(place), storage.RunLocked)
        refused(lambda: storage.remove_run(place), storage.RunLocked)
    refused(lambda: run[0].adapted(0), storage.StageThinned)
    refused(lambda: storage.check_new_run(place), storage.RunExists)
    argument = f"./{place}" if "/" not in str(place) else str(place)
    for words in (
        ["verify", argument], ["show", f"{argument}@7"], ["resume", argument, "--workers", "0"],
        ["export", argument, "--to", "parquet", "--out", "out", "--iterations", "0"],
        ["evaluate", f"{argument}@9"], ["policy", f"{argument}@9", "--out", "p.safetensors"],
        ["fork", f"{argument}@1", "--run", str(tmp_path / "fork" / place.name)],
    ):  # fmt: skip
        cli.run(words)
        captured = capsys.readouterr()
        said.append(captured.out + captured.err)
    Path(place, "_commits", "00000001.sample_tasks.0.json").write_text("{}")
    for words in (["verify", argument], ["show", argument]):
        cli.run(words)
        captured = capsys.readouterr()
        said.append(captured.out + captured.err)
    found = [words for text in said for words in commands_in(text)]
    assert len(found) >= 12, said
    reaching = {str(reached(words)) for words in found}
    assert reaching <= {str(path.resolve()) for path in (place, tmp_path / "fork" / place.name)}, found


def test_the_advice_of_a_full_run_thins_that_run_and_not_another_of_its_name(place, capsys):
    decoy = Path("runs", place.name)
    with (
        storage.open_writer(place, retention=storage.Retention(max_bytes=1)) as writer,
        pytest.raises(storage.BudgetReached) as caught,
    ):
        writer._budget.reserve(storage.StageRef(9, "adapt"), storage.open_run(place)[0].adapted(0))
    thin = next(words for words in commands_in(str(caught.value)) if words[0] == "thin")
    assert cli.run([*thin[:2], "--keep-every", "2"]) == 0
    assert storage.open_run(place).thinned_iterations()
    assert not storage.open_run(decoy).thinned_iterations()
