"""What the suite says of itself: what a test leaves, what was skipped, which faults can be planted."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack

import leaks
import pytest
import yaml
from distributed import LocalCluster


def _port() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def _leave(kind: str, undo: ExitStack) -> None:
    match kind:
        case "variable":
            os.environ["METALOOM_LEFT"] = "1"
            undo.callback(os.environ.pop, "METALOOM_LEFT")
        case "changed variable":
            undo.callback(os.environ.__setitem__, "HOME", os.environ["HOME"])
            os.environ["HOME"] = "/"
        case "handler":
            undo.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, signal.SIG_IGN))
        case "log handler":
            handler = logging.NullHandler()
            logging.getLogger("metaloom.left").addHandler(handler)
            undo.callback(logging.getLogger("metaloom.left").removeHandler, handler)
        case "folder":
            undo.callback(os.chdir, os.getcwd())
            os.chdir("/")
        case "thread":
            ended = threading.Event()
            thread = threading.Thread(target=ended.wait, name="left")
            thread.start()
            undo.callback(thread.join)
            undo.callback(ended.set)
        case "process":
            process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            undo.callback(process.communicate)
        case "orphan":
            code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3).pid)"
            pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
            undo.callback(os.kill, pid, signal.SIGKILL)
        case "port":
            undo.callback(_port().close)
        case "cluster":
            cluster = LocalCluster(n_workers=1, processes=False, dashboard_address=":0")
            undo.callback(cluster.close)


@pytest.mark.parametrize(
    ("kind", "named", "look"),
    [
        ("variable", "the environment variable METALOOM_LEFT: 1", leaks.present),
        ("changed variable", "the environment variable HOME: /", leaks.present),
        ("handler", "the handler of SIGUSR1", leaks.present),
        ("log handler", "the log handler metaloom.left", leaks.present),
        ("folder", "the working folder", leaks.present),
        ("thread", "left: alive", leaks.present),
        ("process", "input()", leaks.present),
        ("orphan", "sleep 60", leaks.listening),
        ("port", "the port ", leaks.listening),
        ("cluster", "the Dask part Worker", leaks.present),
    ],
)
def test_what_a_test_leaves_is_named_and_what_it_takes_away_again_is_not(kind, named, look, monkeypatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE_SECONDS", 0)
    before = look()
    with ExitStack() as undo:
        _leave(kind, undo)
        assert named in "; ".join(leaks.left_over(before, look))
    monkeypatch.setattr(leaks, "PATIENCE_SECONDS", 30)
    assert not leaks.left_over(before, look)


def test_the_last_lines_say_how_to_install_a_browser_where_there_is_none(pytestconfig, tmp_path) -> None:
    looks = "from browsing import NEEDS_BROWSER\n\n@NEEDS_BROWSER\ndef test_that_looks():\n    pass\n"
    (tmp_path / "test_page.py").write_text(looks)
    tests = pytestconfig.rootpath / "tests"
    path = os.pathsep.join((str(tests), str(tests / "helpers")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "test_page.py"]
    env = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    last = done.stdout.splitlines()[-2]
    assert last.startswith("skipped for want of a browser: 1; none of chromium,")
    assert last.endswith("`sudo apt-get install chromium` brings one")


def test_faults_of_every_kind_are_found_and_planted(monkeypatch, pytestconfig) -> None:
    monkeypatch.syspath_prepend(pytestconfig.rootpath / "tests")
    from mutants import faults_of

    source = b"""
def f(a: 1, b):
    if not a < b:
        raise ValueError(1 + 1)
    g(a, b)
    file.flush()
    rng = generator(seed, "tasks", a)
    c.reshape(-1), max(a, b), zip(*c, strict=True)
    return sorted(-a * 2)
    return a and b
"""
    planted = {(fault.kind, fault.plant(source).splitlines()[fault.line - 1].strip())
               for fault in faults_of("f.py", source)}  # fmt: skip
    assert planted == {
        ("if", b"if False:"),
        ("not", b"if (a < b):"),
        ("comparison", b"if not a <= b:"),
        ("raise", b"pass"),
        ("swapped arguments", b"g(b, a)"),
        ("call", b"pass"),
        ("seed component", b'rng = generator(seed, "tasks", 0)'),
        ("return", b"return a and b"),
        ("sort", b"return (lambda items, **_: list(items))(-a * 2)"),
        ("sign", b"return sorted(-a / 2)"),
        ("negation", b"return sorted(a * 2)"),
        ("constant", b"return sorted(-a * 3)"),
        ("and-or", b"return (a) or (b)"),
    }


def test_every_fault_that_is_listed_as_equivalent_is_in_the_source(monkeypatch, pytestconfig) -> None:
    monkeypatch.syspath_prepend(pytestconfig.rootpath / "tests")
    from mutants import EQUIVALENT, faults_of

    listed = {
        (fault["file"], fault["code"], fault["kind"], fault["now"]) for fault in yaml.safe_load(EQUIVALENT.read_text())
    }
    files = sorted({file for file, *_ in listed})
    found = (fault for file in files for fault in faults_of(file, (pytestconfig.rootpath / file).read_bytes()))
    assert not listed - {(fault.file, fault.code, fault.kind, fault.now) for fault in found}


def test_the_word_list_finds_a_turn_of_phrase_in_pages_docstrings_and_messages_but_not_in_code(
    monkeypatch, pytestconfig, tmp_path
) -> None:
    monkeypatch.syspath_prepend(pytestconfig.rootpath / "tests")
    from wordlist import INSTEAD, found_in

    (tmp_path / "page.md").write_text("One fact.\n\nIt is left out, for want of room.\n")
    assert [fault.split(": found ")[1].split(";")[0] for fault in found_in(tmp_path / "page.md")] == [
        "'left out'",
        "'for want of'",
    ]
    source = [
        "def f(shall, so_many):",
        '    """How many.',
        "",
        "    Args:",
        "        shall: that it changes.",
        '    """',
        '    raise ValueError(f"{shall} of the user\'s")  # it goes on with the next',
    ]
    (tmp_path / "f.py").write_text("\n".join(source) + "\n")
    lines = [int(fault.split(":")[1]) for fault in found_in(tmp_path / "f.py")]
    assert lines == [2, 5, 5, 7, 7]
    assert len(INSTEAD) > 10
