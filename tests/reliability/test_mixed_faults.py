"""Random faults of all kinds over runs of all kinds: nothing is lost, nothing silent, nothing unexplained."""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from metaloom import storage
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.thin import thin
from metaloom.flows.commands.train import resume
from metaloom.flows.rollouts.workers import Backend
from metaloom.storage.write import packer

SERIAL = Backend(workers=0)
ITERATIONS = 6
"""The runs have four when the faults begin; what resumes them computes the others."""

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]


def pack(path: Path) -> None:
    with storage.open_writer(path) as writer:
        writer.pack()


@pytest.fixture(scope="module", autouse=True)
def small_segments():
    """Segments of two iterations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packer, "SIZE", 2)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train_tiny):
    """Runs with the same outputs that came about in different ways; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    plain = train_tiny(folder / "plain", iterations=4)
    made = {"plain": plain}
    for name, source, act in (
        ("thinned", "plain", lambda path: thin(path, storage.Retention(keep_every=2))),
        ("packed", "plain", pack),
        ("packed and thinned", "thinned", pack),
    ):
        made[name] = Path(shutil.copytree(made[source], folder / name))
        act(made[name])
    for name, source in (("fork", "plain"), ("fork of packed", "packed and thinned")):
        made[name] = folder / name
        fork(made[source], 3, made[name])
        resume(made[name], backend=SERIAL)
    pack(made["fork of packed"])
    return made


def flip(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def cut(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def lengthen(path: Path, dice: random.Random) -> None:
    path.write_bytes(path.read_bytes() + dice.randbytes(dice.randint(1, 9)))


def lose(path: Path, dice: random.Random) -> None:
    del dice
    path.unlink()


def swap(path: Path, dice: random.Random) -> None:
    """Exchange two files of a kind, or lengthen the only one there is."""
    others = [other for other in sorted(path.parent.iterdir()) if other.suffix == path.suffix and other.is_file()]
    others = [other for other in others if other.stat().st_size and other.read_bytes() != path.read_bytes()]
    if not others:
        lengthen(path, dice)
        return
    other = dice.choice(others)
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)


DAMAGES = (flip, cut, lengthen, lose, swap)


class Trial:
    """A copy of a run, what happens to it, and what is known of it.

    Args:
        path: of the copy.
        dice: that decide.
        killer: operates in processes that die.
        watch: calls something before each write of this process.
    """

    def __init__(self, path: Path, dice: random.Random, killer, watch) -> None:
        self.path, self.dice, self.killer, self.watch = path, dice, killer, watch
        self.happened: list[str] = []
        self.damaged = False

    def damage(self) -> None:
        """Change a file of the run."""
        files = [f for f in sorted(self.path.rglob("*")) if f.is_file() and f.stat().st_size]
        file, way = self.dice.choice([f for f in files if f.parent.name != "_operator"]), self.dice.choice(DAMAGES)
        self.happened.append(f"{way.__name__} {file.relative_to(self.path)}")
        way(file, self.dice)
        self.damaged = True

    def kill(self) -> None:
        """Kill an operation at one of its writes, or in the middle of it."""
        operation, point = self.dice.choice(("resume", "pack", "repair", "thin")), self._point()
        torn = self.dice.random() < 0.5
        code = self.killer.operate(operation, self.path, point, torn=torn, iterations=ITERATIONS)
        self.happened.append(f"{operation} killed at {point}: {code}")
        # An operation that meets damage may refuse it, with 1; else nothing ends one but the signal.
        assert code in ((0, 1, -9) if self.damaged else (0, -9)), self.happened

    def take_over(self) -> None:
        """Let a second writer take over in the middle of the first one's work, which must then end."""
        point, heirs = self._point(), []

        def act(n: int, name: str, arguments: object) -> None:
            if n == point:
                heirs.append(None)  # its own writes are counted too
                heirs[0] = storage.open_writer(self.path, take_over=True, repair=self.damaged)

        operation: Callable[[Path], object] = self.dice.choice((pack, go_on))
        outcome = "done"
        try:
            with self.watch(act):
                operation(self.path)
        except storage.FencedOut:
            outcome = "fenced out"
        except storage.RunLocked:  # taken over before it had the lock
            outcome = "locked out"
        except storage.StoreError as error:  # of damage, before or behind the change of writers
            outcome = f"refused: {error}"
            assert self.damaged, [*self.happened, outcome]
        self.happened.append(f"taken over at {point}: {outcome}")
        if heirs and heirs[0] is not None:
            heirs[0].close()

    def _point(self) -> int:
        """A write: one of the first, where locks and sessions change hands, or any."""
        return self.dice.randrange(self.dice.choice((50, 600)))


def go_on(path: Path, *, repair: bool = False):
    return resume(path, iterations=ITERATIONS, repair=repair, backend=SERIAL)


def check(trial: Trial, expected: dict[str, str]) -> str:
    """Hold a run that suffered faults to what it must be; returns what became of it."""
    found = storage.verify_run(trial.path)
    assert found == [] or trial.damaged, (trial.happened, found)
    if found == []:
        # What verification does not name changes nothing that is read; what is gone is computed again.
        run = storage.open_run(trial.path)
        stored = {ref.file_name: run.record(ref).digest for ref in run.refs()}
        assert stored.items() <= expected.items(), trial.happened
        read_back = {
            ref.file_name: storage.output_digest(storage.digest(run.load(ref)))
            for ref in run.refs()
            if not run.is_thinned(ref)
        }
        assert read_back.items() <= expected.items(), trial.happened
    try:
        result = go_on(trial.path, repair=True)
    except storage.StoreError as error:
        return f"told: {error.found}"
    if result.damage:
        return f"told: {result.damage[0].problem}"
    run = storage.open_run(trial.path)
    assert {ref.file_name: run.record(ref).digest for ref in run.refs()} == expected, trial.happened
    return "repaired" if result.repaired else "whole"


@pytest.mark.parametrize("trials", [12, pytest.param(2000, marks=[pytest.mark.sweep, pytest.mark.timeout(0)])])
def test_after_any_faults_a_run_is_whole_or_says_what_is_gone(
    runs, tiny_runs, tmp_path, killer, write_points, digests, trials, record_property
):
    expected = digests(tiny_runs(ITERATIONS))
    outcomes: Counter[str] = Counter()
    for number in range(trials):
        dice = random.Random(number)
        name = dice.choice([*runs])
        path = Path(shutil.copytree(runs[name], tmp_path / "run"))
        trial = Trial(path, dice, killer, write_points.before_each_write)
        trial.happened.append(f"{number}: {name}")
        faults = dice.choices((trial.damage, trial.kill, trial.take_over), (3, 2, 1), k=dice.choice((1, 1, 2, 3)))
        for fault in faults:
            fault()
        outcome = check(trial, expected)
        # One fault alone is always mended.
        assert not outcome.startswith("told") or len(faults) > 1, (trial.happened, outcome)
        outcomes[outcome.split(":")[0]] += 1
        shutil.rmtree(path)
    record_property("outcomes", dict(outcomes))
    assert outcomes["repaired"] > trials / 5
