import dataclasses
import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows import as_recorded, cli
from metaloom.flows.commands.replay import compare, replay, ulp_distance
from metaloom.flows.commands.thin import thin
from metaloom.flows.commands.train import train
from metaloom.flows.errors import UsageError
from metaloom.flows.graph.changes import machine_changes
from metaloom.flows.graph.runner import Runner
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.nn.device import arithmetic_facts
from metaloom.storage import Run, StageRef

REF = StageRef(0, "adapt", 0)


@pytest.fixture
def stored(tmp_path, tiny_config):
    train(tiny_config(iterations=2), tmp_path / "run", backend=Backend(workers=0))
    return tmp_path / "run"


def test_every_stage_of_every_iteration_replays_to_the_same_bits(stored):
    outcomes = list(replay(stored))
    assert [outcome.ref for outcome in outcomes] == list(storage.open_run(stored).refs())
    assert all(outcome.identical for outcome in outcomes)


def test_one_stage_of_one_iteration_can_be_replayed_alone(stored):
    (outcome,) = replay(stored, 1, stage="collect_rollouts", step=1)
    assert outcome.ref == StageRef(1, "collect_rollouts", 1)


def computes_otherwise(monkeypatch, stage, change):
    """Have a stage give something else than it did."""
    right = Runner.run

    def wrong(stages, ref, inputs):
        value = right(stages, ref, inputs)
        return change(value) if ref.stage == stage else value

    monkeypatch.setattr(Runner, "run", wrong)


def test_a_stage_that_computes_something_else_is_reported_where_it_first_differs(stored, monkeypatch):
    def wrong(samples):
        advantages = samples.advantages.copy()
        advantages[2, 1, 3] = np.nextafter(advantages[2, 1, 3], np.float32(np.inf))
        return dataclasses.replace(samples, advantages=advantages)

    computes_otherwise(monkeypatch, "process_samples", wrong)
    (outcome,) = replay(stored, 0, stage="process_samples", step=0)
    (difference,) = outcome.differences
    assert (difference.array, difference.index, difference.max_ulp, difference.count) == ("advantages", (2, 1, 3), 1, 1)
    assert difference.max_abs > 0


def test_replay_until_the_first_difference_stops_there(stored, monkeypatch):
    computes_otherwise(monkeypatch, "sample_tasks", lambda tasks: dataclasses.replace(tasks, params=tasks.params + 1))
    outcomes = list(replay(stored, until_diff=True))
    assert [outcome.ref.stage for outcome in outcomes] == ["initialize", "sample_tasks"]
    assert not outcomes[-1].identical


def test_an_iteration_that_is_not_stored_is_refused_with_what_there_is(stored):
    with pytest.raises(storage.StageMissing, match="9"):
        list(replay(stored, 9))


@pytest.mark.parametrize(
    ("iteration", "stage", "step", "message"),
    [
        (0, "rollout", None, "its stages are initialize, sample_tasks, collect_rollouts"),
        (None, "rollout", 5, "has no stage 'rollout'; its stages are initialize"),
        (1, "initialize", None, "iteration 1 has no stage 'initialize'; its stages are sample_tasks"),
        (1, "adapt", 5, r"--step must be one of 0 \(the inner steps of adapt\), got 5"),
        (1, "collect_rollouts", 5, r"one of 0, 1 \(the inner steps of collect_rollouts"),
        (None, None, 2, r"one of 0, 1 \(the inner steps of this run"),
    ],
)
def test_a_stage_or_step_that_no_iteration_has_is_refused_with_those_it_has(stored, iteration, stage, step, message):
    with pytest.raises(UsageError, match=message):
        list(replay(stored, iteration, stage=stage, step=step))


def test_a_run_without_a_complete_iteration_is_replayed_by_the_iterations_number(stored):
    for file in (stored / "_commits").glob("*.meta_optimize.*"):
        file.unlink()
    with pytest.raises(UsageError, match=r"no iteration is complete; name one, as in: metaloom replay .*run@0"):
        list(replay(stored))
    assert len(list(replay(stored, 0))) == 7


def test_what_is_compared_with_is_read_and_its_damage_told(stored):
    learner = stored / "data.zarr/learner/params.float32/c.2.0"
    content = learner.read_bytes()
    learner.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])
    with pytest.raises(storage.DamagedRun, match=r"params\.float32/c\.2\.0"):
        list(replay(stored))


def test_what_was_thinned_is_compared_with_its_record_and_says_so(stored):
    thin(stored, storage.Retention(keep_last=1))
    outcomes = list(replay(stored))
    assert all(outcome.identical for outcome in outcomes)
    thinned = {outcome.ref.stage for outcome in outcomes if outcome.with_record}
    assert thinned == {"collect_rollouts", "process_samples", "adapt"}
    assert not any(outcome.with_record for outcome in outcomes if outcome.ref.iteration == 1)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names CPU code paths of x86-64")
def test_other_arithmetic_than_the_runs_is_named_where_bits_differ(stored):
    blas = arithmetic_facts()["blas"]
    other = "Nehalem" if "Nehalem" not in blas else "Haswell"

    def replayed(*options):
        command = [sys.executable, "-m", "metaloom.flows.cli", "replay", f"{stored}@0", *options]
        environment = {**os.environ, "OPENBLAS_CORETYPE": other}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = replayed("--json")
    outcomes = json.loads(done.stdout)
    different = [outcome for outcome in outcomes if not outcome["identical"]]
    assert different, done.stderr
    told = f"arithmetic of blas: {blas} then, openblas {other} now"
    assert all(outcome["changed"] == [told] for outcome in different)
    assert not any(outcome["changed"] for outcome in outcomes if outcome["identical"])
    again = replayed("--as-recorded")
    assert again.returncode == 0, again.stdout
    assert f"Computed with the CPU code paths BLAS {blas} (as recorded)" in again.stdout


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        ("a b c d e f", "b", "a processor without a c d e f"),
        ("b", "c b a", "a processor with a c"),
        ("a z", "z c b d e f g", "a processor without a, with b c d e f and 1 more"),
        ("absent", "a b", "cpu_flags absent then, a b now"),
        (None, "a b", "cpu_flags absent then, a b now"),
        ("a b", "", "cpu_flags a b then, absent now"),
    ],
)
def test_another_processor_is_named_by_the_flags_that_only_one_of_them_has(then, now, told, monkeypatch):
    monkeypatch.setattr("metaloom.flows.graph.changes.system", lambda: {"cpu": "x", "cpu_flags": now, "libc": "2.40"})
    monkeypatch.setattr("metaloom.flows.graph.changes.arithmetic_facts", lambda: {"blas": "A", "torch": "B"})
    environment = {"arithmetic": {"torch": "B"}, "numerics": {"fast-math": "on"}}
    run = SimpleNamespace(info={"system": {"cpu": "x", "cpu_flags": then}}, environment_of=lambda ref: environment)
    found = [*machine_changes(run, REF)]
    assert found == [
        told,
        "libc absent then, 2.40 now",
        "fast-math was on in the process that computed it",
        "arithmetic of blas: not recorded then, A now",
    ]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("openblas SapphireRapids", "the processor lacks amx_tile avx512_bf16"),
        ("openblas neoversev1", "openblas neoversev1 is not a code path that can be selected on an x86-64 processor"),
        ("[bold]x\x1b[2J", "is not a code path that can be selected"),
    ],
)
def test_recorded_arithmetic_that_the_processor_cannot_run_is_not_asked_for_and_the_reason_shown(
    stored, monkeypatch, capsys, code, reason
):
    monkeypatch.setattr(as_recorded, "system", lambda: {"cpu_flags": "sse2 sse4_2 avx avx2 fma"})
    monkeypatch.setattr(Run, "environment_of", lambda run, ref: {"arithmetic": arithmetic_facts() | {"blas": code}})
    found, acting = as_recorded.arithmetic_of(storage.open_run(stored), [0]), arithmetic_facts()
    assert (found.missed.keys(), found.used, found.wanted) == ({"blas"}, acting, acting | {"blas": code})
    assert cli.run(["replay", f"{stored}@0", "--as-recorded", "--stage", "sample_tasks"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"BLAS {acting['blas']} (not " in out
    assert reason in out
    assert "another processor may compute different bits" in out
    assert "\x1b[2J" not in out


@pytest.mark.parametrize("recorded", ["[bold]x\x1b[2J", ["x"], {"blas": "[bold]x\x1b[2J"}])
def test_what_a_foreign_run_says_of_its_arithmetic_is_shown_as_text(stored, monkeypatch, capsys, recorded):
    computes_otherwise(monkeypatch, "sample_tasks", lambda tasks: dataclasses.replace(tasks, params=tasks.params + 1))
    monkeypatch.setattr(Run, "environment_of", lambda run, ref: {"arithmetic": recorded})
    assert cli.run(["replay", f"{stored}@0", "--stage", "sample_tasks"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "\x1b[2J" not in out
    assert ("blas: [bold]x" if isinstance(recorded, dict) else "blas: not recorded then") in out


def test_nan_equals_itself_and_minus_zero_differs_from_zero():
    nan = np.array([np.nan, 1.0], np.float32)
    assert list(compare(REF, {"x": nan}, {"x": nan.copy()})) == []
    (difference,) = compare(REF, {"x": np.array([0.0])}, {"x": np.array([-0.0])})
    assert (difference.index, difference.max_abs, difference.max_ulp) == ((0,), 0.0, 0)
    (difference,) = compare(REF, {"x": np.array([[2, -3], [4, 5]])}, {"x": np.array([[2, 1], [5, 5]])})
    assert (difference.index, difference.max_abs, difference.max_ulp, difference.count) == ((0, 1), 4.0, None, 2)


def test_an_array_of_another_shape_or_one_that_is_missing_is_a_difference():
    (shape,) = compare(REF, {"x": np.zeros(3)}, {"x": np.zeros(4)})
    assert (shape.stored, shape.replayed) == ("float64[3]", "float64[4]")
    (missing,) = compare(REF, {"x": np.zeros(3)}, {})
    assert missing.replayed == "absent"


@pytest.mark.parametrize(("a", "b", "ulps"), [(1.0, 1.0, 0), (0.0, 5e-324, 1), (-5e-324, 5e-324, 2)])
def test_units_in_the_last_place_are_counted_across_zero(a, b, ulps):
    assert ulp_distance(np.array([a]), np.array([b])) == [ulps]


def test_neighbouring_numbers_are_one_unit_apart():
    for values in (np.array([-3.5, 1e-30, 7e20], np.float32), np.array([-3.5, 1e-3, 700], np.float16)):
        assert (ulp_distance(values, np.nextafter(values, values.dtype.type(np.inf))) == 1).all()
