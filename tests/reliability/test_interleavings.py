"""Two and three writers of one run in every order of their file operations (T29)."""

import os

import numpy as np
import pytest

from metaloom import storage
from metaloom.pipeline.types import LearnerState, TaskBatch, Update
from metaloom.storage import StageRef, opening, writer
from metaloom.storage.write import sessions

ABOUT = {"inputs": [], "seed_position": [], "started": 0.0, "seconds": 0.0}
TASKS, LEARNED = StageRef(1, "sample_tasks"), StageRef(1, "meta_optimize")


class InlineQueue:
    """Works jobs off at once, so that a writer is one thread."""

    def __init__(self, work, depth):
        self._work, self._error = work, None

    failed = property(lambda self: self._error is not None)

    def submit(self, job):
        try:
            self._work(job)
        except Exception as error:
            self._error = self._error or error
        self.check()

    def check(self):
        if self._error is not None:
            raise self._error

    wait = check

    def stop(self):
        pass


def value_of(ref, name):
    number = float(ord(name[0]))
    if ref.stage == "sample_tasks":
        return TaskBatch(np.full((2, 1), number), np.array([1, -1]), ("x",), ("m",))
    return Update(LearnerState({"w": np.full(3, number, np.float32)}), {"loss": number})


@pytest.fixture(scope="module")
def explored(load_module):
    return load_module("interleavings")


@pytest.fixture
def steered(monkeypatch, explored):
    """Has the search know when sessions begin, and choose what is else random."""

    def token(size):
        actor = explored.Actor.current()
        return actor.token if actor else "f" * 16

    begin = sessions.begin_session

    def note(root, **options):
        session = begin(root, **options)
        if actor := explored.Actor.current():
            actor.begun(session.number)
        return session

    monkeypatch.setattr(sessions.secrets, "token_hex", token)
    monkeypatch.setattr(opening, "begin_session", note)
    monkeypatch.setattr(sessions, "begin_session", note)
    monkeypatch.setattr(writer, "BackgroundQueue", InlineQueue)
    # Only runs of earlier versions lack it; a look for it is one that changes nothing.
    monkeypatch.setattr(opening, "info_copies", lambda path: ["that of the session that made the run"])


@pytest.fixture
def template(tmp_path, steered):
    """A run of one iteration, of which writers of a scenario make copies."""
    path = tmp_path / "template"
    with storage.create_run(path, capacity=2, config={}, config_digest="", environment={}) as writer:
        writer.put(StageRef(0, "sample_tasks"), value_of(TASKS, "0"), **ABOUT)
    return path


def copying(template):
    def make(root):
        for folder, folders, names in os.walk(template):
            target = root / os.path.relpath(folder, template)
            for name in folders:
                (target / name).mkdir()
            for name in names:  # never written in place
                os.link(os.path.join(folder, name), target / name)

    return make


def writing(refs, **options):
    """What a writer does: open the run, put what is missing, close it."""

    def script(actor):
        actor.made = {}
        with storage.open_writer(actor.disk.root, **options) as writer:
            for ref in refs:
                if not writer.contains(ref):
                    value = value_of(ref, actor.name)
                    writer.put(ref, value, **ABOUT)
                    writer.flush()
                    actor.made[ref] = storage.output_digest(storage.digest(value))

    return script


def whole(refs):
    """All that must hold in the end: writers were told the truth, and the run is whole and can be gone on with."""

    def check(root, outcomes):
        wrong = [
            f"{name} ended with {outcome!r}"
            for name, outcome in outcomes.items()
            if outcome not in ("ok", "killed") and not isinstance(outcome, storage.FencedOut | storage.RunLocked)
        ]
        wrong += [str(damage) for damage in storage.verify_run(root)]
        if "killed" not in outcomes.values() and "ok" not in outcomes.values():
            wrong.append(f"no writer got through: {outcomes}")
        if "ok" in outcomes.values():
            wrong += [f"{ref} is not stored" for ref in refs if not storage.open_run(root).contains(ref)]
        with storage.open_writer(root, take_over=True) as heir:
            for ref in refs:
                if not heir.contains(ref):
                    heir.put(ref, value_of(ref, "h"), **ABOUT)
        return wrong + [f"after the next writer: {damage}" for damage in storage.verify_run(root)]

    return check


def holding(**options):
    """What a session does by itself: begin, publish under a name of its own and over one of all, end."""

    def script(actor):
        root = actor.disk.root
        session = sessions.begin_session(root, **options)
        try:
            session.publish(b"", root / "tables" / actor.name)
            session.replace(session.write_aside([(b"",)]), [root / "data.zarr" / "x"])
        finally:
            session.close()

    return script


def bare(root):
    for name in ("tables", "data.zarr", "_sessions"):
        (root / name).mkdir()


def orderly(root, outcomes):
    """Nobody was told anything but the truth, somebody got through, and the next session can begin."""
    wrong = [
        f"{name} ended with {outcome!r}"
        for name, outcome in outcomes.items()
        if outcome not in ("ok", "killed") and not isinstance(outcome, storage.FencedOut | storage.RunLocked)
    ]
    if not any(isinstance(outcome, str) for outcome in outcomes.values()):
        wrong.append(f"nobody got through: {outcomes}")
    wrong += [f"{name} was lost" for name, o in outcomes.items() if o == "ok" and not (root / "tables" / name).exists()]
    sessions.begin_session(root, take_over=True).close()
    return wrong


@pytest.fixture
def search(explored, tmp_path):
    """Tries every order."""

    def run(make, scripts, at_end, **options):
        folder = tmp_path / "orders"
        folder.mkdir()
        return explored.explore(make, scripts, at_end, folder, **options)

    return run


def begins_without_looking_again(root, token, lock):
    """As sessions began before: others could begin between the look for them and the making of the own folder."""
    folder = root / "_sessions"
    numbers = [int(name[:6]) for name in os.listdir(folder) if name[6] == "-"]
    for name in os.listdir(folder):
        if name[6] == "-" and not name.endswith(".closed"):
            sessions._close_folder(folder / name)
    number = max(numbers, default=-1) + 1
    os.mkdir(folder / f"{number:06d}-{token}")
    return number


TAKING_OVER = {"a": {"take_over": False}, "b": {"take_over": True}}


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_of_three_sessions_that_take_over_the_later_ones_end_the_earlier_ones_in_every_order(search, steered):
    found = search(bare, {name: holding(take_over=True) for name in "abc"}, orderly)
    assert found.violations == []
    assert found.ends > 10


def one_may_die(search, **take_over):
    scripts = {name: holding(take_over=may) for name, may in take_over.items()}
    found = search(bare, scripts, orderly, kills=1)
    assert found.violations == []
    assert found.states > 100


@pytest.mark.no_cover
@pytest.mark.parametrize("second", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["refused", "taking over"])
def test_of_two_sessions_one_of_which_may_die_at_any_moment_one_gets_through(search, steered, second):
    one_may_die(search, a=False, b=second)


@pytest.mark.sweep
def test_of_two_sessions_that_both_take_over_one_gets_through(search, steered):
    one_may_die(search, a=True, b=True)


FEW = 2  # preemptions, of which the fault of earlier versions took as many


@pytest.mark.no_cover
@pytest.mark.parametrize("preemptions", [FEW, pytest.param(None, marks=pytest.mark.sweep)], ids=["few", "any order"])
def test_a_writer_and_one_that_takes_over_never_both_live_and_change_nothing_committed(search, template, preemptions):
    scripts = {name: writing([TASKS], **options) for name, options in TAKING_OVER.items()}
    found = search(copying(template), scripts, whole([TASKS]), preemptions=preemptions)
    assert found.violations == []
    assert found.ends > 5


@pytest.mark.no_cover
def test_the_search_finds_two_live_writers_where_a_session_does_not_look_again(search, template, monkeypatch):
    monkeypatch.setattr(sessions, "_begin", begins_without_looking_again)
    scripts = {name: writing([TASKS], **options) for name, options in TAKING_OVER.items()}
    found = search(copying(template), scripts, whole([TASKS]), preemptions=FEW, until_violation=True)
    # Arrays that were committed are replaced, or the record of a writer is there that should have been fenced out.
    told = ("after b had begun", "of the committed", "ended with StageExists")
    assert any(words in found.violations[0] for words in told)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("refs", [[TASKS], [LEARNED]], ids=["arrays", "tables"])
@pytest.mark.parametrize("first", [False, True], ids=["refused", "taking over"])
def test_two_writers_one_of_which_may_die_at_any_moment(search, template, refs, first):
    scripts = {"a": writing(refs, take_over=first), "b": writing(refs, take_over=True)}
    assert search(copying(template), scripts, whole(refs), kills=1).violations == []


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_a_repair_that_is_taken_over_takes_nothing_out_that_the_later_writer_put_there(search, template):
    def damaged(root):
        copying(template)(root)
        record = root / "_commits" / StageRef(0, "sample_tasks").file_name
        record.unlink()
        record.write_bytes(b"{}")

    refs = [StageRef(0, "sample_tasks")]
    scripts = {"a": writing(refs, repair=True), "b": writing(refs, repair=True, take_over=True)}
    assert search(damaged, scripts, whole(refs)).violations == []
