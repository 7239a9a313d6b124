"""What is listed, told and hashed is in one order, whatever the order of settings, folders and sets."""

import random
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import requests
from rich.console import Console

from metaloom.flows import opened, run_groups
from metaloom.flows.commands import compare
from metaloom.flows.commands.fork import _differences, _interface
from metaloom.flows.commands.replay import compare as compare_arrays
from metaloom.flows.errors import UsageError
from metaloom.flows.graph.changes import _few
from metaloom.flows.operations import options
from metaloom.flows.prefect_app.reports import served_reports
from metaloom.flows.references.archive import pack
from metaloom.flows.references.index import INDEX, Reference, find, write_index
from metaloom.flows.rollouts.workers import code_digest
from metaloom.flows.run_groups import _refuse_repeated
from metaloom.flows.sweeps.stored import require_sweep
from metaloom.flows.trained.deployment import digest_of
from metaloom.flows.viewer.outputs import _flat
from metaloom.flows.views.run_info import arrays_of, bytes_by_group
from metaloom.flows.views.tables import _metrics_view
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.point_corner import PointCorner
from metaloom.pipeline.shown import printable
from metaloom.storage import StageRef
from metaloom.storage.export import ExportExists

NAMES = [f"name_{letter}" for letter in "abcdefgh"]
T = TypeVar("T")


def shuffled(items: Iterable[T], seed: int) -> list[T]:
    items = [*items]
    random.Random(seed).shuffle(items)
    return items


def test_arrays_that_differ_are_told_by_name() -> None:
    arrays = {name: np.zeros(2) for name in shuffled(NAMES, 1)}
    others = {name: np.ones(2) for name in shuffled(NAMES[2:], 2)}
    assert [found.array for found in compare_arrays(StageRef(0, "adapt"), arrays, others)] == NAMES


def test_what_a_fork_would_change_is_told_by_name() -> None:
    stored, fresh = (
        {name: form for name in shuffled(NAMES[n:], n)} for n, form in ((0, "float32[2]"), (2, "int64[2]"))
    )
    stored, fresh = stored | dict.fromkeys("zyxwvu", ""), fresh | dict.fromkeys("fedcba", "")
    gone, *changed = _differences("the learner", stored, fresh)
    assert "lose name_a, name_b, u, v and 4 more and gain a, b, c, d and 2 more" in gone
    assert [line.split()[2] for line in changed] == NAMES[2:]


def test_the_first_setting_in_which_evaluations_differ_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"evaluation.{name}" for name in NAMES]
    settings = {"one": dict.fromkeys(shuffled(names, 1), 1), "two": dict.fromkeys(shuffled(names, 2), 2)}
    monkeypatch.setattr(compare, "settings_of", lambda run: settings[run.name])
    runs: Any = [SimpleNamespace(name=name) for name in settings]
    with pytest.raises(UsageError, match=r"evaluation\.name_a is 1 in one and 2 in two"):
        compare._require_same_evaluations(runs, mixed=False)
    compare._require_same_evaluations(runs, mixed=True)
    compare._require_same_evaluations([runs[0], runs[0]], mixed=False)


def test_a_few_flags_are_named_and_the_others_counted() -> None:
    assert _few({*NAMES}) == "name_a name_b name_c name_d name_e and 3 more"
    assert _few({*NAMES[:5]}) == "name_a name_b name_c name_d name_e"


def test_a_saved_policy_has_one_digest_and_adapted_parameters_one_place() -> None:
    texts, arrays = {name: name for name in NAMES}, {name: np.full((2, 3), n) for n, name in enumerate(NAMES)}
    digests = {digest_of(dict(shuffled(texts.items(), n)), dict(shuffled(arrays.items(), n))) for n in range(3)}
    assert digests == {digest_of(texts, arrays)} != {digest_of(texts, {**arrays, "name_a": np.ones((2, 3))})}
    np.testing.assert_array_equal(_flat(dict(shuffled(arrays.items(), 1)), None), _flat(arrays, None))
    assert _flat(arrays, {name: value[0] for name, value in arrays.items()}).tolist() == np.zeros((2, 24)).tolist()


def test_the_return_stands_above_the_other_metrics_of_inner_steps() -> None:
    metrics = {f"step_{k}.{name}": 1.0 for k in (1, 0) for name in shuffled(["average_return", *NAMES], 3)}
    console = Console(width=100, record=True)
    console.print(_metrics_view({**metrics, "loss": 2.0}))
    words = printable(console.export_text()).split()
    assert [word for word in words if word in (*NAMES, "average_return")] == ["average_return", *NAMES]


def test_runs_with_the_same_settings_are_told_whatever_the_order_of_these() -> None:
    runs: Any = [SimpleNamespace(path=Path(name), name=name, config={"seed": 1}) for name in ("one", "two")]
    settings = {run.path: {name: "1" for name in shuffled(["seed", *NAMES], n)} for n, run in enumerate(runs)}
    with pytest.raises(UsageError, match="runs one and two have the same settings and seed 1"):
        _refuse_repeated([runs], settings)
    _refuse_repeated([runs[:1], runs[1:]], settings)
    _refuse_repeated([runs], settings | {runs[0].path: settings[runs[0].path] | {"seed": "2"}})


def test_an_environment_is_the_same_whatever_the_order_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {f"env.options.{name}": name for name in NAMES}
    monkeypatch.setattr(run_groups, "settings_of", lambda run: dict(shuffled({**settings, "seed": "1"}.items(), run)))
    one, two, three = (run_groups.environment_of(run) for run in cast(Any, range(3)))
    assert one == two == three == " ".join(f"{name}={value}" for name, value in settings.items())


def test_environments_of_groups_are_told_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(run: Any) -> dict[str, str]:
        return {"algorithm.name": run.name[0], "env.name": run.name}

    monkeypatch.setattr(run_groups, "settings_of", of)
    names = [*shuffled((f"a{name}" for name in NAMES), 1), "b"]
    runs: Any = [SimpleNamespace(path=Path(name), name=name, config={"seed": n}) for n, name in enumerate(names)]
    listed = r" \| ".join(f"env.name=a{name}" for name in NAMES)
    with pytest.raises(UsageError, match=rf"algorithm.name=a has {listed}; algorithm.name=b has env.name=b\. "):
        run_groups.grouped(runs, (), mixed=True)


def test_a_fork_compares_reward_terms_whatever_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Env(PointCorner):
        def step(self, action: Any) -> Any:
            *outcome, info = super().step(action)
            return (*outcome, {**info, "reward_terms": dict.fromkeys(shuffled(NAMES, 1), 0.0)})

    monkeypatch.setattr("metaloom.flows.commands.fork.make_env", lambda config: Env())
    assert _interface(EnvConfig(name="point-corner"))["the reward terms"] == NAMES


def test_bytes_are_told_by_the_name_of_what_they_are() -> None:
    sizes = {f"data.zarr/{name}/c/0": n for n, name in enumerate(shuffled(NAMES, 1))}
    run: Any = SimpleNamespace(files=SimpleNamespace(sizes=lambda: {**sizes, "tables/x": 9, "run.json": 8, "_s/y": 7}))
    found = bytes_by_group(run)
    assert [*found] == [*NAMES, "records", "tables"]
    assert (found["records"], found["tables"]) == (15, 9)


def test_arrays_of_an_output_are_told_by_group_and_name() -> None:
    names = [f"{group}/{name}" for group in "ab" for name in NAMES]
    spec = SimpleNamespace(attributes={}, dims=("iteration", "task"), shape=(3,), dtype="float32")
    record: Any = SimpleNamespace(chunks=[SimpleNamespace(array=name, size=4) for name in shuffled(names, 1)])
    run: Any = SimpleNamespace(files=SimpleNamespace(spec=lambda name: spec))
    assert [f"{array['group']}/{array['name']}" for array in arrays_of(run, record)] == names


def test_an_index_of_references_has_the_same_bytes_and_names_what_it_has(tmp_path: Path) -> None:
    references = [Reference(**{field.name: name for field in fields(Reference)}) for name in NAMES]
    write_index(tmp_path, references)
    raw = (tmp_path / INDEX).read_bytes()
    write_index(tmp_path, shuffled(references, 1))
    assert (tmp_path / INDEX).read_bytes() == raw
    write_index(tmp_path, [])
    with pytest.raises(UsageError, match=r"there is no reference .name_a. in .*lists all$"):
        find(tmp_path, "name_a")


@pytest.fixture(params=[False, True], ids=["ascending", "descending"])
def listed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are listed by name, from one end or from the other."""
    for name, found in {name: getattr(Path, name) for name in ("glob", "iterdir", "rglob")}.items():

        def ordered(folder: Path, *pattern: str, found: Any = found) -> Iterator[Path]:
            return iter(sorted(found(folder, *pattern), reverse=request.param))

        monkeypatch.setattr(Path, name, ordered)


@pytest.mark.usefixtures("listed")
def test_archives_and_digests_of_code_are_the_same_however_folders_are_listed(tmp_path: Path) -> None:
    for name in ("b", "a/c", "a/b"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(name)
    raw = pack(tmp_path / "run", tmp_path / "archive").read_bytes()
    assert [raw.index(name) for name in (b"a/b", b"a/c")] == sorted(raw.index(name) for name in (b"a/b", b"a/c"))
    assert raw.index(b"a/c") < raw.rindex(b"b", 0, raw.index(b"PK\x01\x02"))
    assert code_digest.__wrapped__() == code_digest()


@pytest.mark.usefixtures("listed")
def test_sweeps_and_reports_are_named_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    for name in NAMES:
        for file in (tmp_path / f"sweeps/{name}.json", tmp_path / f"reports/{name}/r.html"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    with pytest.raises(UsageError, match=f"there is no sweep 'none' .*available sweeps: {', '.join(NAMES)}$"):
        require_sweep("none")
    with served_reports(socket.create_server(("127.0.0.1", 0))) as address:
        assert re.findall(r'href="(\w+)/', requests.get(address, timeout=120).text) == NAMES


@pytest.mark.usefixtures("listed")
def test_the_first_of_the_files_in_the_way_of_an_export_is_named(tmp_path: Path) -> None:
    delta, unread = pytest.importorskip("metaloom.flows.exports.delta"), None
    for name in NAMES:
        (tmp_path / name).touch()
    with pytest.raises(ExportExists, match="'name_a' in it"):
        delta.export_delta(unread, tmp_path, unread)


@pytest.mark.parametrize("last_first", [False, True])
def test_runs_are_opened_and_completed_by_name(
    last_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    folders = sorted((tmp_path / name for name in NAMES), reverse=last_first)
    monkeypatch.setattr(opened, "glob", lambda pattern, root_dir, recursive: [f"{path.name}/" for path in folders])
    monkeypatch.setattr("metaloom.storage.run_exists", lambda folder: True)
    monkeypatch.setattr(opened.Run, "open", lambda path: path)
    assert [path.name for path in opened.open_runs("*")] == NAMES
    monkeypatch.setattr(options, "find_runs", lambda root: folders)
    assert options.complete_runs(None) == NAMES
