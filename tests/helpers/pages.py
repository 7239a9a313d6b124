"""The code blocks of a page of documentation, run as they are printed, in order, in one folder.

Fences name their language. python, sql (by DuckDB) and sh run; of console, lines after `$ ` run and what they print is
compared with the other lines, where `...` stands for anything; yaml, toml and json are parsed; text, mermaid and math
are shown. HTML comments, which no reader sees, say what else it takes:

    <!-- prepare: COMMANDS -->          runs the commands in this place: what the reader is supposed to have
    <!-- save as: FILE -->              the next block is a file of the reader's; it is written and executed
    <!-- sizes: KEY=VALUE ... -->       settings that take the place of those in the next block, so that it ends soon;
                                        --OPTION=NUMBER is the number of an option
    <!-- exit code: N -->               how the commands of the next block end, if not with 0
    <!-- raises: CLASS -->              the exception with which the next block of Python ends
    <!-- not run: REASON -->            the next block is not run

`metaloom` and `python FILE` run in this process, which has imported what they need: scripts of those names on the path
ask for it.
"""

import json
import os
import re
import runpy
import select
import shutil
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pytest
import yaml

PARSED: dict[str, Callable[[str], object]] = {"yaml": yaml.safe_load, "toml": tomllib.loads, "json": json.loads}
SHOWN = ("text", "mermaid", "math")
_PART = re.compile(
    r"^<!-- *(?P<kind>prepare|save as|sizes|exit code|raises|not run): *(?P<note>.*?) *-->\n"
    r"|^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    flags=re.DOTALL | re.MULTILINE,
)
_SHIM = f"""#!/bin/bash
name=${{0##*/}}
[[ $name != python || $1 == *.py ]] || exec {sys.executable} "$@"
exec 3>&1
printf '%s\\0' $$ "$PWD" "${{METALOOM_RUNS-}}" "$name" "$@" > "${{0%/*}}/question"
echo > "${{0%/*}}/asked"
read -r code < "${{0%/*}}/answered"
exit "$code"
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, or commands that prepare for those behind it."""

    language: str
    text: str
    line: int
    notes: dict[str, str] = field(default_factory=dict)


def blocks_of(text: str) -> Iterator[Block]:
    """Blocks in the order of the page, each with the comments before it."""
    notes: dict[str, str] = {}
    for part in _PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["kind"] == "prepare":
            yield Block("sh", part["note"], line, {"prepare": part["note"]})
        elif part["kind"]:
            notes[part["kind"]] = part["note"]
        else:
            yield Block(part["language"], part["text"], line, notes)
            notes = {}


class Commands:
    """A shell in the working folder, where `metaloom` is answered by a function of this process."""

    def __init__(self, folder: Path, metaloom: Callable[[list[str]], int]) -> None:
        self._folder, self._answers = folder, {"metaloom": metaloom, "python": _run_program}
        for name in self._answers:
            (folder / name).write_text(_SHIM)
            (folder / name).chmod(0o755)
        os.mkfifo(folder / "asked")
        os.mkfifo(folder / "answered")

    def run(self, script: str) -> tuple[int, str]:
        """Run a script to its first command that fails; return its exit code and what it printed."""
        output = self._folder / "output"
        path = os.pathsep.join((str(self._folder), str(Path(sys.executable).parent), os.environ["PATH"]))
        with output.open("wb") as empty:
            empty.truncate()
        with output.open("ab") as printed:
            shell = subprocess.Popen(
                ["bash", "-ec", script], stdout=printed, stderr=printed, env={**os.environ, "PATH": path}
            )
        with ExitStack() as files:
            files.callback(shell.wait)
            files.callback(shell.kill)
            # Open for both ways, so that neither side waits for the other to open it nor sees an end.
            asked, answered = (os.open(self._folder / name, os.O_RDWR) for name in ("asked", "answered"))
            ended = os.pidfd_open(shell.pid)
            for descriptor in (asked, answered, ended):
                files.callback(os.close, descriptor)
            while asked in select.select([ended, asked], [], [])[0]:
                os.read(asked, 1)
                code = self._serve(*(self._folder / "question").read_text(encoding="utf-8").split("\0")[:-1])
                os.write(answered, f"{code}\n".encode())
            return shell.wait(), output.read_text(encoding="utf-8")

    def _serve(self, pid: str, cwd: str, runs: str, name: str, *tokens: str) -> int:
        with pytest.MonkeyPatch.context() as patch, open(f"/proc/{pid}/fd/3", "a") as out:
            patch.chdir(cwd)
            patch.setenv("METALOOM_RUNS", runs) if runs else patch.delenv("METALOOM_RUNS", raising=False)
            patch.setattr(sys, "path", [*sys.path, cwd])
            with open(f"/proc/{pid}/fd/2", "a") as errors, redirect_stdout(out), redirect_stderr(errors):
                return self._answers[name]([*tokens])


def _run_program(tokens: list[str]) -> int:
    """Run a file as the interpreter does, whose folder is first on its path; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", tokens)
        patch.syspath_prepend(Path(tokens[0]).parent)
        try:
            runpy.run_path(tokens[0], run_name="__main__")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            traceback.print_exc()
            return 1
    return 0


class Page:
    """Runs the blocks of one page: commands in the working folder, Python in one namespace."""

    def __init__(self, commands: Commands, prepared: Path) -> None:
        self._commands, self._prepared = commands, prepared
        self._names: dict[str, object] = {"__name__": "__main__"}

    def run(self, block: Block, place: str) -> None:
        """Run, parse or pass over a block.

        Raises:
            AssertionError: a command failed, or printed something else than the page says.
            Exception: whatever Python raises.
        """
        if block.language == "python":
            if "save as" in block.notes:
                Path(block.notes["save as"]).write_text(block.text, encoding="utf-8")
            self._execute(block, place)
        elif block.language == "sql":
            duckdb.sql(block.text).fetchall()
        elif "prepare" in block.notes:
            self._prepare(block.text)
        elif block.language == "sh":
            code, printed = self._commands.run(block.text)
            assert code == int(block.notes.get("exit code", 0)), printed
        elif block.language == "console":
            self._compare(block.text)
        elif block.language in PARSED:
            PARSED[block.language](block.text)
        else:
            assert block.language in SHOWN, f"a fence of the language {block.language!r}: name one that can be run"

    def _prepare(self, script: str) -> None:
        """Run commands, or copy the runs that the same commands have given another page."""
        alone, runs = script.startswith("metaloom train") and not Path("runs").exists(), self._prepared / script[-100:]
        if alone and runs.exists():
            shutil.copytree(runs, "runs")
            return
        code, printed = self._commands.run(script)
        assert code == 0, printed
        if alone:
            shutil.copytree("runs", runs)

    def _execute(self, block: Block, place: str) -> None:
        raised = "nothing"
        try:
            exec(compile(block.text, place, "exec"), self._names)
        except Exception as error:
            if "raises" not in block.notes:
                raise
            raised = type(error).__name__
        assert raised == block.notes.get("raises", "nothing")

    def _compare(self, session: str) -> None:
        for command, shown in re.findall(r"^\$ (.*\n)((?:(?!\$ ).*\n)*)", session, flags=re.MULTILINE):
            pattern = r"\s+".join(re.escape(word).replace(r"\.\.\.", ".*") for word in shown.split())
            printed = self._commands.run(command)[1]
            assert re.fullmatch(pattern, printed.strip(), flags=re.DOTALL), f"{command}{printed}"
