"""What the documentation's site does besides: pages stay as they are read beside the sources."""

import re
import shlex
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BESIDE = ("examples",)
"""Folders beside docs/ to which pages link; the site has their files too."""
_MERMAID = re.compile(r"`metaloom (graph [^`]*) --format mermaid`(.*?)```mermaid\n.*?```", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the programs and notebooks that pages link to."""
    for folder in BESIDE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".ipynb") and "runs" not in path.parts:
                files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Lead links to what lies beside docs/ into the site, list commands and names, draw diagrams without scripts."""
    if "<!-- commands -->" in markdown:
        from metaloom.flows.cli import app

        commands = app.generate_docs(heading_level=2).partition("\n")[2]
        # Cyclopts and the site make different anchors of the two dashes.
        commands = commands.replace("#metaloom-install-completion", "#metaloom---install-completion")
        return markdown.replace("<!-- commands -->", commands)
    if "<!-- names -->" in markdown:
        import metaloom

        inherited = "\n    options:\n      inherited_members: true"
        names = (f"::: metaloom.{name}{inherited if name == 'Run' else ''}" for name in metaloom._names())
        markdown = markdown.replace("<!-- options of the terminal -->", _of_terminal())
        return markdown.replace("<!-- names -->", "\n\n".join(names))
    markdown = re.sub(r"<!-- (::: [\w.]+) -->", r"\n\1\n", markdown)
    for folder in BESIDE:
        markdown = markdown.replace(f"](../{folder}/", f"]({folder}/")
    return _MERMAID.sub(lambda found: f"`metaloom {found[1]} --format svg`{found[2]}{_drawn(found[1])}", markdown)


def _of_terminal() -> str:
    """Return a table of the options that only commands have, and of what Python has instead."""
    from metaloom.flows.operations import operations

    rows = [
        f"| `{operation.name}` | `{option}` | {instead} |"
        for operation in operations().values()
        for option, instead in operation.of_terminal.items()
    ]
    return "\n".join(["| command | option | in Python |", "| --- | --- | --- |", *rows])


def _drawn(command: str) -> str:
    """Return the picture that `metaloom graph` prints, as HTML."""
    from contextlib import redirect_stdout
    from io import StringIO

    from metaloom.flows import cli

    with redirect_stdout(StringIO()) as printed:
        if cli.run([*shlex.split(command), "--format", "svg"]):
            raise ValueError(f"`metaloom {command}` failed")
    return f'<div style="overflow-x: auto">{printed.getvalue()}</div>\n'
