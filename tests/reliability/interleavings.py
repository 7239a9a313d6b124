"""Every order in which several writers can do their file operations, with the real code under them.

Each writer is a greenlet that waits before every operation that another one could notice, until it is chosen to go on.
All choices are tried, by running the writers again from the start (a search without stored states, as CHESS and dBug
do it), and a state that was met before is not gone on from twice: the names on the disk, with who wrote what is under
them, and all that each writer has seen so far, which is what decides what it does next.

Left out of the choices, because nobody else can tell when they happen: what a writer does inside its own session's
folder (others only ever rename that folder, after which each of these operations fails whenever it comes), and reading
what no writer of the scenario ever changes.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from greenlet import getcurrent, greenlet

_PATHS = {"open": 1, "mkdir": 1, "unlink": 1, "rmdir": 1, "listdir": 1, "scandir": 1, "stat": 1} | {
    "rename": 2,
    "replace": 2,
    "link": 2,
}
"""Functions of `os` that are watched, with how many paths they take."""

_CHANGES = ("mkdir", "unlink", "rmdir", "rename", "replace", "link")


class Killed(BaseException):
    """The process of this writer is dead."""


@dataclass
class Actor:
    """One writer.

    Attributes:
        name: of the writer.
        script: what it does.
        token: stands for all that is random in it.
        disk: on which it works.
        outcome: "ok" or the error that ended it; None while it goes on.
        seen: hash of all that it has been told by the disk and that still decides what it does.
        number: of its session, once that has begun.
        locks: descriptors of files that it has locked.
    """

    name: str
    script: Callable[["Actor"], None]
    token: str
    disk: "Disk"
    outcome: Any = None
    dead: bool = False
    seen: int = 0
    number: int = -1
    locks: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._greenlet = greenlet(self._run)
        self._greenlet.actor = self
        self._greenlet.switch()

    @property
    def ended(self) -> str:
        """How it ended, in a word; "" while it goes on."""
        return "" if self.outcome is None else self.outcome if self.outcome == "ok" else type(self.outcome).__name__

    @staticmethod
    def current() -> "Actor | None":
        """The writer whose code asks."""
        return getattr(getcurrent(), "actor", None)

    def step(self) -> None:
        """Let it do its next operation, and all up to the one after it."""
        self._greenlet.switch()

    def kill(self) -> None:
        """Let it do nothing any more."""
        self.dead = True
        self._greenlet.switch()

    def wait(self) -> None:
        """Called by its own code before an operation."""
        self._greenlet.parent.switch()
        if self.dead:
            raise Killed

    def saw(self, *what: Any) -> None:
        """Called by its own code after an operation."""
        self.seen = hash((self.seen, *what))

    def begun(self, number: int) -> None:
        """Called when its session has begun: of all that it has seen until then, its number is what lives on."""
        self.number = number
        self.seen = hash(("begun", number))

    def _run(self) -> None:
        try:
            self.script(self)
            self.outcome = "ok"
        except BaseException as error:
            self.outcome = error
        for descriptor in [*self.locks]:  # as when a process ends
            os.close(descriptor)


class Disk:
    """One execution's folder: does the operations of the writers, and knows who wrote what is under each name."""

    def __init__(self, root: Path, originals: dict[str, Callable[..., Any]], shared: set[str]) -> None:
        self.root = root
        self.names: dict[str, Any] = {}
        self.committed: set[str] = set()
        self.violations: list[str] = []
        self.changed: set[str] = set()
        self.actors: list[Actor] = []
        self._shared = shared
        self._originals = originals
        self._made: Counter[str] = Counter()

    def call(self, actor: Actor, function: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if actor.dead:
            raise Killed
        paths = tuple(self._relative(argument) for argument in arguments[: _PATHS[function]])
        if None in paths:
            return self._originals[function](*arguments, **named)
        shared = self._is_shared(actor, function, paths)
        if shared:
            actor.wait()
        try:
            result = self._originals[function](*arguments, **named)
        except OSError as error:
            actor.saw(function, paths, error.errno)
            raise
        if function in _CHANGES or (function == "open" and arguments[1] & os.O_CREAT):
            self._note(actor, function, paths)
        if function == "listdir":
            result = sorted(result)
        if shared:
            actor.saw(function, paths, self._answer(function, paths, result))
        return result

    def key(self) -> int:
        about = tuple((actor.seen, actor.dead, actor.ended) for actor in self.actors)
        return hash((frozenset(item for item in self.names.items() if not item[0].endswith(".part")), about))

    def end(self) -> int:
        """As `key`, without what writers have seen: they have ended."""
        names = frozenset(item for item in self.names.items() if not item[0].endswith(".part"))
        return hash((names, tuple((actor.dead, actor.ended) for actor in self.actors)))

    def _relative(self, path: Any) -> str | None:
        if isinstance(path, int):
            return None
        text = os.fspath(path)
        prefix = str(self.root)
        return text[len(prefix) + 1 :] if text.startswith(prefix) else None

    def _is_private(self, actor: Actor, path: str) -> bool:
        """Tell whether only one writer can get at a path: in its own session's folder, or in one that it has closed."""
        own = actor.token in path and path.count("/") > 1
        return path.startswith("_sessions/") and (own or (".closed" in path and not path.endswith(".json")))

    def _is_shared(self, actor: Actor, function: str, paths: tuple[str, ...]) -> bool:
        if function in ("open", "stat") and actor.token in paths[0] and paths[0].endswith(actor.token):
            return False  # its own folder, to sync it or to see whether it is still there
        if function in ("listdir", "scandir"):
            return f"{paths[0]}/" in self._shared and not self._is_private(actor, paths[0])
        return any(path in self._shared and not self._is_private(actor, path) for path in paths)

    def _note(self, actor: Actor, function: str, paths: tuple[str, ...]) -> None:
        """Take a change of the disk into account."""
        for path in paths:
            if not self._is_private(actor, path):
                self.changed |= {path, f"{os.path.dirname(path)}/"}
        written = actor.name
        if paths[-1].endswith("session.json"):  # the only file that a writer writes twice
            self._made[actor.name] += 1
            written += str(self._made[actor.name])
        for path in paths[1:] if function in ("replace", "link", "rename") else paths:
            self._check(actor, function, path)
        if function in ("rename", "replace"):
            self._check(actor, function, paths[0])
            moved = {n: who for n, who in self.names.items() if n == paths[0] or n.startswith(paths[0] + "/")}
            for name in moved:
                del self.names[name]
            self.names[paths[1]] = moved.pop(paths[0], written)
            self.names |= {paths[1] + name[len(paths[0]) :]: who for name, who in moved.items()}
        elif function == "link":
            self.names[paths[1]] = self.names.get(paths[0], written)
        elif function in ("unlink", "rmdir"):
            self.names.pop(paths[0], None)
        elif self.names.get(paths[0]) is None:
            self.names[paths[0]] = written
        if function == "link" and paths[1].startswith("_commits/"):
            self._commit(paths[1])

    def _commit(self, path: str) -> None:
        with os.fdopen(self._originals["open"](self.root / path, os.O_RDONLY), "rb") as file:
            record = json.loads(file.read())
        self.committed |= {path, *(file["path"] for file in (*record["chunks"], *record["tables"]) if file["size"])}

    def _check(self, actor: Actor, function: str, path: str) -> None:
        if path.split("/")[0] not in ("_commits", "data.zarr", "tables", "run.json"):
            return
        if path in self.committed and function != "link":
            self.violations.append(f"{actor.name}: {function} of the committed {path}")
        for other in self.actors:
            if other.number > actor.number:
                self.violations.append(f"{actor.name}: {function} of {path} after {other.name} had begun")

    def _answer(self, function: str, paths: tuple[str, ...], result: Any) -> Any:
        if function == "listdir":
            return tuple(result)
        if function == "scandir":
            return tuple(sorted(n for n in self.names if os.path.dirname(n) == paths[0]))
        return self.names.get(paths[0])


@dataclass
class Found:
    """What a search came across."""

    executions: int = 0
    states: int = 0
    ends: int = 0
    violations: list[str] = field(default_factory=list)


def explore(
    make: Callable[[Path], None],
    scripts: dict[str, Callable[[Actor], None]],
    at_end: Callable[[Path, dict[str, Any]], list[str]],
    folder: Path,
    *,
    kills: int = 0,
    preemptions: int | None = None,
    until_violation: bool = False,
) -> Found:
    """Run writers in every order.

    Args:
        make: puts the run to begin with into a folder that is there.
        scripts: what each writer does.
        at_end: what is wrong with a folder after the writers have come to their outcomes.
        folder: an empty one.
        kills: writers that may be killed, at any moment.
        preemptions: how often a writer that could go on may have to wait for another one; None for as often as one
            likes. Few orders are left with two of them, and most faults are among these (Musuvathi and Qadeer, 2007,
            Iterative context bounding).
        until_violation: stop at the first one.
    """
    shared: set[str] = set()
    while True:  # until it is known which paths are changed by any of the orders
        search = _Search(make, scripts, at_end, folder, kills, preemptions, set(shared), until_violation)
        found = search.run()
        if search.changed <= shared or found.violations:
            return found
        shared |= search.changed


class _Search:
    def __init__(self, make, scripts, at_end, folder, kills, preemptions, shared, until_violation) -> None:
        self._make, self._scripts, self._at_end, self._folder = make, scripts, at_end, folder
        self._kills, self._shared, self._until_violation = kills, shared, until_violation
        self._preemptions = preemptions
        self._visited: dict[int, int] = {}  # states, with the preemptions that it took to meet them
        self._ends: set[int] = set()
        self._found = Found()
        self.changed: set[str] = set()

    def run(self) -> Found:
        todo: list[list[str]] = [[]]
        while todo:
            self._execute(todo.pop(), todo)
            if self._found.violations and self._until_violation:
                break
            if not self.changed <= self._shared:
                break
        self._found.states, self._found.ends = len(self._visited), len(self._ends)
        return self._found

    def _execute(self, prefix: list[str], todo: list[list[str]]) -> None:
        self._found.executions += 1
        root = self._folder / str(self._found.executions)
        root.mkdir()
        self._make(root)
        with _watched(root, self._shared) as disk:
            for n, (name, script) in enumerate(self._scripts.items()):
                disk.actors.append(Actor(name, script, f"{n + 1:016x}", disk))
            done = self._follow(prefix, disk, todo)
            outcomes = {actor.name: "killed" if actor.dead else actor.outcome for actor in disk.actors}
            self.changed |= disk.changed
            for actor in disk.actors:
                if actor.outcome is None:
                    actor.kill()
        wrong = [*disk.violations]
        end = disk.end()
        if done and end not in self._ends:
            self._ends.add(end)
            wrong += self._at_end(root, outcomes)
        self._found.violations += [f"{one} ({' '.join(self._path)})" for one in wrong]
        _remove(root)

    def _follow(self, prefix: list[str], disk: Disk, todo: list[list[str]]) -> bool:
        """Make the choices of a prefix, then those that come first; note the others. False if the rest is known."""
        self._path: list[str] = []
        actors = {actor.name: actor for actor in disk.actors}
        last, preempted = "", 0
        while True:
            choices = [name for name, actor in actors.items() if actor.outcome is None]
            if not choices:
                return True
            killed = sum(actor.dead for actor in actors.values())
            if killed < self._kills:
                choices += [f"kill {name}" for name in choices]
            if len(self._path) < len(prefix):
                choice = prefix[len(self._path)]
            else:
                if self._preemptions is None:
                    key = disk.key()
                else:
                    key = hash((disk.key(), last))
                    choices.sort(key=lambda choice: choice != last)
                    choices = [c for c in choices if preempted + _preempts(c, last, choices) <= self._preemptions]
                if self._visited.get(key, preempted + 1) <= preempted:
                    return False
                self._visited[key] = preempted
                choice = choices[0]
                todo += [[*self._path, other] for other in choices[1:]]
            preempted += self._preemptions is not None and _preempts(choice, last, choices)
            self._path.append(choice)
            actor = actors[choice.removeprefix("kill ")]
            if choice.startswith("kill "):
                actor.kill()
            else:
                actor.step()
                last = choice


def _preempts(choice: str, last: str, choices: list[str]) -> bool:
    """Tell whether the writer that went on last, and still could, has to wait."""
    return choice != last and last in choices and not choice.startswith("kill ")


@contextmanager
def _watched(root: Path, shared: set[str]) -> Iterator[Disk]:
    """Send the operations of writers through a Disk."""
    originals = {name: getattr(os, name) for name in _PATHS}
    close, flock, fsync = os.close, fcntl.flock, os.fsync
    disk = Disk(root, originals, shared)

    def watch(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            actor = Actor.current()
            if actor is None:
                return originals[name](*arguments, **named)
            return disk.call(actor, name, arguments, named)

        return call

    def close_one(descriptor: int) -> None:
        if actor := Actor.current():
            actor.locks.discard(descriptor)
        close(descriptor)

    def lock(descriptor: int, operation: int) -> None:
        actor = Actor.current()
        if actor is None:
            flock(descriptor, operation)
            return
        if actor.dead:
            raise Killed
        actor.wait()
        try:
            flock(descriptor, operation)
        except OSError as error:
            actor.saw("flock", error.errno)
            raise
        actor.saw("flock", "held")
        actor.locks.add(descriptor)

    for name in _PATHS:
        setattr(os, name, watch(name))
    os.close, fcntl.flock, os.fsync = close_one, lock, lambda descriptor: None
    try:
        yield disk
    finally:
        for name, original in originals.items():
            setattr(os, name, original)
        os.close, fcntl.flock, os.fsync = close, flock, fsync


def _remove(root: Path) -> None:
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
