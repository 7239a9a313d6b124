"""Plant faults in a copy of the source, one at a time, and print which of them the tests notice.

`make mutants SEED=1 COUNT=40 ROOM=storage` draws faults from every room in turn, rare kinds as often as frequent ones;
`ARGS="--kind call"` draws of one kind. Tests that mirror the changed module or import it run first, then others by
their distance in the import graph, file by file, until one fails; of these, files that name the function or the class
are earlier. A test that fails without the fault as well does not count. A fault is undecided, and has not survived, if
a file took more than a share of its processor time, or the time was over before all these files had run.
Verdicts are kept in `build/mutants/`, where an interrupted call continues. Faults that change nothing are in
`equivalent_mutants.yaml`.
"""

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeAlias

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutants"
TREE = WORK / "tree"
PACKAGES = ("pipeline", "stages", "storage", "flows")
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.yaml")
ALL_FILES, TEST_SECONDS, WAITING = 40, 120, 10
# Of a fault's processor time, what one file of tests may take: a long file must not keep the others from their turn.
SHARE = 0.2
# Imported before the forks in which tests run: it takes longer than most of them.
LIBRARIES = ("distributed", "gymnasium", "hypothesis", "pandas", "pyarrow.parquet", "pytest", "torch", "xarray", "zarr")
# In the environment of every process of a test run, by which those that outlive it are found.
MARK = "METALOOM_MUTANT"

_OPPOSITES = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
}  # fmt: skip
_OPERATOR = re.compile(r"not\s+in|is\s+not|[<>=!]=|[<>]|\bin\b|\bis\b|[-+*/]")
_WRITES = re.compile(
    r"sync|flush|(sort|link|rename|replace|remove|rmtree|mkdir|make_folders?|truncate|publish|place_folder|share|release)$"
)
_SEEDED = {"seed_for", "generator", "of_task", "of_episode"}
_SYMMETRIC = {"min", "max", "minimum", "maximum", "logaddexp", "suppress"}
Node: TypeAlias = ast.expr | ast.stmt


class Fault(NamedTuple):
    """A change of bytes `start` to `end` of a file, in the line `code`."""

    file: str
    line: int
    code: str
    kind: str
    start: int
    end: int
    was: str
    now: str

    def plant(self, raw: bytes) -> bytes:
        """Change the content of the file."""
        return raw[: self.start] + self.now.encode() + raw[self.end :]

    def __str__(self) -> str:
        was, now = (" ".join(text.split())[:60] for text in (self.was, self.now))
        return f"{self.file}:{self.line} {self.kind}: {was} -> {now}"


def faults_of(file: str, raw: bytes) -> Iterator[Fault]:
    """Find every fault that can be planted in a file."""
    lines = raw.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def span(node: Node) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    for node in _walk(ast.parse(raw)):
        for kind, first, last, now in _changes(node, lambda node: raw[slice(*span(node))].decode()):
            start, end = span(first)[0], span(last)[1]
            if kind in ("comparison", "sign"):
                start, end = span(first)[1], span(last)[0]
                now = _OPERATOR.sub(now, raw[start:end].decode(), count=1)
            code = lines[first.lineno - 1].decode().strip()
            yield Fault(file, first.lineno, code, kind, start, end, raw[start:end].decode(), now)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, messages of errors, what only type checkers read, and what changes nothing.

    The last are keywords of type variables, `strict` of zips, whose inputs have equal lengths, and the -1 of reshapes,
    for which any negative number works. Swapped arguments of `_SYMMETRIC` functions are left out elsewhere.
    """
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise):
            continue
        if name == "keywords" and called in ("zip", "TypeVar"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (called == "reshape" and ast.unparse(child) == "-1"):
                yield from _walk(child)


def _changes(node: ast.AST, text: Callable[[Node], str]) -> Iterator[tuple[str, Node, Node, str]]:
    """Return kind, first and last node, and what replaces them; of an operator, the two nodes that it is between."""
    match node:
        case ast.Compare(left, [op], [right]) | ast.BinOp(left, op, right) if type(op) in _OPPOSITES:
            yield "comparison" if isinstance(node, ast.Compare) else "sign", left, right, _OPPOSITES[type(op)]
        case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield "negation", node, node, text(operand)
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", node, node, f"({text(operand)})"
        case ast.BoolOp(op, [first, second]):
            yield "and-or", node, node, f"({text(first)}) {'or' if isinstance(op, ast.And) else 'and'} ({text(second)})"
        case ast.Constant(bool() as value):
            yield "constant", node, node, str(not value)
        case ast.Constant(int() | float() as value):
            yield "constant", node, node, repr(value + 1 if isinstance(value, int) else value * 2)
        case ast.Raise():
            yield "raise", node, node, "pass"
        case ast.If(test):
            yield "if", test, test, "False"
        case ast.Expr(ast.Call(func)) if _WRITES.search(text(func)):
            yield "call", node, node, "pass"
        case ast.Call(ast.Name("sorted") as func):
            yield "sort", func, func, "(lambda items, **_: list(items))"
        case ast.FunctionDef():
            values = [found.value for found in ast.walk(node) if isinstance(found, ast.Return) and found.value]
            for one, other in pairwise(values):
                yield "return", one, one, text(other)
        case ast.Call(func, [first, second, *_] as arguments):
            name = text(func).rpartition(".")[2]
            if name in _SEEDED:
                for argument in arguments[2 if isinstance(func, ast.Name) else 0 :]:
                    yield "seed component", argument, argument, "0"
            elif name not in _SYMMETRIC and not any(
                isinstance(argument, ast.Starred | ast.GeneratorExp) for argument in (first, second)
            ):
                yield "swapped arguments", first, second, f"{text(second)}, {text(first)}"


def draw(seed: int, count: int, room: str, kind: str = "") -> list[Fault]:
    """Draw faults from every room in turn, each of a kind that the room has not had as long as there is one."""
    rng = random.Random(seed)
    rooms: dict[str, dict[str, list[Fault]]] = defaultdict(lambda: defaultdict(list))
    later: dict[str, dict[str, list[Fault]]] = defaultdict(dict)
    contents = {path.relative_to(TREE).as_posix(): path.read_bytes() for path in _sources()}
    for file in sorted(contents):
        for fault in faults_of(file, contents[file]) if file.startswith(room) else ():
            if kind in ("", fault.kind):
                rooms[_room(file)][fault.kind].append(fault)
    drawn: list[Fault] = []
    while len(drawn) < count and rooms:
        for name in rng.sample(sorted(rooms), len(rooms)):
            of_kind = rooms[name].pop(rng.choice(sorted(rooms[name])))
            fault = of_kind.pop(rng.randrange(len(of_kind)))
            if of_kind:
                later[name][fault.kind] = of_kind
            raw = contents[fault.file]
            with suppress(SyntaxError):
                drawn += [fault] if ast.dump(ast.parse(fault.plant(raw))) != ast.dump(ast.parse(raw)) else []
            rooms[name] = rooms[name] or later.pop(name, {})
            if not rooms[name]:
                del rooms[name]
    return drawn[:count]


def _sources() -> list[Path]:
    return [path for name in PACKAGES for path in (TREE / name).rglob("*.py")]


def _room(file: str) -> str:
    return "/".join(file.split("/")[:-1][:2])


@cache
def _imports(file: Path) -> frozenset[str]:
    """The names of modules that a file imports or names, and what may be modules."""
    content = file.read_text("utf-8")
    found = {*re.findall(r"metaloom(?:\.\w+)+", content)}
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("metaloom"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def tests_of(fault: Fault) -> list[str]:
    """Order the test files by how near they are to a fault: to its module, and to its function and class."""
    file = fault.file
    named = re.compile(rf"\b({'|'.join(_names_around(fault)) or '(?!)'})\b")
    names = {path: ".".join(("metaloom", *path.relative_to(TREE).with_suffix("").parts)) for path in _sources()}
    modules = {name.removesuffix(".__init__"): path for path, name in names.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for imported in _imports(path) & modules.keys():
            importers[imported].add(name)
    frontier = [names[TREE / file].removesuffix(".__init__")]
    distance = {frontier[0]: 0}
    for name in frontier:  # grows while it is walked
        new = sorted(importers[name] - distance.keys())
        distance |= dict.fromkeys(new, distance[name] + 1)
        frontier += new
    package, home, stem = file.split("/")[0], Path(file).parent.name, Path(file).stem

    def key(test: Path) -> tuple[float, int]:
        near = min((distance[name] for name in _imports(test) & distance.keys()), default=9)
        mirrors = stem in test.stem or home in test.stem.split("_")
        at_home = package in test.parts or (package == "storage" and "reliability" in test.parts)
        return near - 2 * mirrors - at_home - 2 * bool(named.search(test.read_text("utf-8"))), test.stat().st_size

    tests = (test for test in (TREE / "tests").rglob("test_*.py") if not test.stem.endswith("_learning"))
    return [str(test.relative_to(TREE)) for test in sorted(tests, key=key)]


def _names_around(fault: Fault) -> list[str]:
    """The names of the functions and classes that a fault is in, without those that are words of any test."""
    found = [
        node.name
        for node in ast.walk(ast.parse((TREE / fault.file).read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.lineno <= fault.line <= (node.end_lineno or 0)
    ]
    return [name for name in found if name.count("_") > name.startswith("_") or name[0].isupper()]


def run(test: str, seconds: float, excluded: Sequence[str] = ()) -> tuple[str, bool]:
    """Run a test, or a file of them, in the copy.

    Returns:
        The first that fails, "" if none does, and whether all were run.

    Args:
        test: File, or test in it.
        seconds: Processor time that it may take, and a tenth of the time that it may wait.
        excluded: Tests of it that do not run.
    """
    token, log = f"{os.getpid()}.{time.time()}", WORK / "output.txt"
    limits = ["-x", f"--timeout={TEST_SECONDS}", "-m", "not learning and not sweep", f"--basetemp={WORK / 'tmp'}"]
    output = ["-q", "--no-header", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist"]
    output += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plug-ins that are imported by now
    child = os.fork()
    if child == 0:
        _pytest([*limits, *output, test, *(f"--deselect={name}" for name in excluded)], log, token, seconds)
    try:
        code = psutil.Process(child).wait(WAITING * seconds)
    except psutil.TimeoutExpired:
        return "", False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == token:
                    process.kill()
        shutil.rmtree(WORK / "tmp", ignore_errors=True)
    told = log.read_text("utf-8", "replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", told, re.MULTILINE)
    if code == -signal.SIGXCPU:
        return "", False
    died = "" if code in (0, 5) else test
    return (failed[1] if failed else died), True


def _pytest(arguments: list[str], log: Path, token: str, seconds: float) -> NoReturn:
    """Run pytest in the copy, in this process, which was forked for it."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, resource.RLIM_INFINITY))
        with log.open("wb") as told, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(told.fileno(), 1)
            os.dup2(told.fileno(), 2)
        os.chdir(TREE)
        sys.path[0] = str(TREE)
        # Compiled files are told apart by second and size, which two faults may share.
        os.environ.update({"PYTHONPATH": str(TREE), "PYTHONDONTWRITEBYTECODE": "1", MARK: token})
        sys.dont_write_bytecode = True
        code = int(import_module("pytest").main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(code)


def verdict_on(fault: Fault, seconds: float, excluded: list[str]) -> str:
    """Plant a fault, run tests, take it out again."""
    path, tests = TREE / fault.file, tests_of(fault)[:ALL_FILES]
    clean, end = path.read_bytes(), _seconds() + seconds
    partly: list[str] = []
    for number, test in enumerate(tests):
        failed = "?"
        while failed:
            if _seconds() >= end:
                return f"undecided: {number} files in {seconds:.0f} s, {len(partly)} of them in part"
            path.write_bytes(fault.plant(clean))
            try:
                failed, complete = run(test, min(SHARE * seconds, end - _seconds()), excluded)
            finally:
                path.write_bytes(clean)
            partly += [] if complete else [test]
            if failed and run(failed, 2 * TEST_SECONDS) == ("", True):
                return f"killed by {failed}"
            excluded += [failed] if failed else []
    return f"undecided: a part of {', '.join(partly)}" if partly else f"survived {len(tests)} files"


def _seconds() -> float:
    """Processor time of all tests so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def copy_tree() -> None:
    """Copy what git tracks or does not ignore, in place of an earlier copy."""
    shutil.rmtree(TREE, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")[:-1]:
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # removed, but tracked still
            shutil.copy2(ROOT / name, TREE / name, follow_symlinks=False)
    (TREE / ".venv").symlink_to(ROOT / ".venv")


def main() -> int:
    """Draw, plant, print; 1 if a fault survived that is not listed as equivalent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--room", default="", help="folder to which the faults are limited, such as storage/write")
    parser.add_argument("--kind", default="", help="kind to which the faults are limited, such as call or sort")
    parser.add_argument("--seconds", type=float, default=300, help="processor time of tests for a fault")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    listed = yaml.safe_load(EQUIVALENT.read_text("utf-8"))
    reasons = {(known["file"], known["code"], known["kind"], known["now"]): known["reason"] for known in listed}
    copy_tree()
    for name in LIBRARIES:
        import_module(name)
    kept = WORK / f"verdicts-{options.seed}.json"
    verdicts: dict[str, str] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    excluded: list[str] = []
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for fault in draw(options.seed, options.count, options.room, options.kind):
        key, reason = f"{fault} at {fault.start}", reasons.get((fault.file, fault.code, fault.kind, fault.now))
        if not reason and key not in verdicts:
            verdicts[key] = verdict_on(fault, options.seconds, excluded)
            kept.write_text(json.dumps(verdicts, indent=1), "utf-8")
        verdict = f"equivalent: {reason}" if reason else verdicts[key]
        counts[_room(fault.file)][verdict[:8]] += 1
        print(f"{fault}\n    {verdict}", flush=True)
    counts["all"] = sum(counts.values(), Counter[str]())
    print(f"{'room':24} planted equivalent noticed survived undecided")
    for room, found in counts.items():
        columns = found.total(), found["equivale"], found["killed b"], found["survived"], found["undecide"]
        print(f"{room:24} {columns[0]:7} {columns[1]:10} {columns[2]:7} {columns[3]:8} {columns[4]:9}")
    print(f"failed without a fault, so not counted: {', '.join(excluded) or 'none'}")
    return 1 if counts["all"]["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
