"""Hooks of the documentation's site, which leave the pages readable beside the sources."""

import html
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BESIDE = ("examples",)
"""Folders beside docs/ to which pages link; the site has their files too."""
RAISED = ("data_format.md", "environments/README.md")
"""Pages that answer "what is stored where" and "can I use my own environment"."""
_MATH = re.compile(r'class="arithmatex">\\[(\[](.*?)\\[)\]]</(span|div)>', re.DOTALL)
_MERMAID = re.compile(r"`metaloom (graph [^`]*) --format mermaid`(.*?)```mermaid\n.*?```", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the programs and notebooks that pages link to."""
    for folder in BESIDE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".ipynb") and "runs" not in path.parts:
                files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Lead links to what lies beside docs/ into the site, list commands, settings, environments, names; draw."""
    if "<!-- commands -->" in markdown:
        from metaloom.flows.cli import app

        commands = app.generate_docs(heading_level=2).partition("\n")[2]
        # Cyclopts and the site make different anchors of the two dashes.
        commands = commands.replace("#metaloom-install-completion", "#metaloom---install-completion")
        return markdown.replace("<!-- commands -->", commands)
    if "<!-- settings -->" in markdown:
        return markdown.replace("<!-- settings -->", "\n\n".join(_settings()))
    if "<!-- environments -->" in markdown:
        return markdown.replace("<!-- environments -->", "\n\n".join(_environments()))
    if "<!-- arrays -->" in markdown:
        markdown = markdown.replace("<!-- arrays -->", "\n".join(_arrays()))
    if "<!-- names -->" in markdown:
        import metaloom

        inherited = "\n    options:\n      inherited_members: true"
        names = (f"::: metaloom.{name}{inherited if name == 'Run' else ''}" for name in metaloom._names())
        markdown = markdown.replace("<!-- options of the terminal -->", _of_terminal())
        return markdown.replace("<!-- names -->", "\n\n".join(names))
    markdown = re.sub(r"<!-- (::: [\w.]+) -->", r"\n\1\n", markdown)
    for folder in BESIDE:
        markdown = re.sub(rf"\]\(\.\./((?:\.\./)*{folder}/)", r"](\1", markdown)
    return _MERMAID.sub(lambda found: f"`metaloom {found[1]} --format svg`{found[2]}{_drawn(found[1])}", markdown)


def on_page_content(content: str, page: Any, **context: Any) -> str:
    """Raise pages in the search whose word most pages have; set equations; make empty corners of tables no headers."""
    if page.file.src_uri in RAISED:
        page.meta["search"] = {"boost": 2}
    content = _MATH.sub(lambda found: f'class="math">{_typeset(found[1], found[2] == "div")}</{found[2]}>', content)
    return content.replace("<th></th>", "<td></td>")


def _typeset(tex: str, on_its_own: bool) -> str:
    """Convert an equation to MathML, which browsers set without scripts or fonts of ours."""
    equation = convert(html.unescape(tex.strip()), display="block" if on_its_own else "inline")
    # Names of functions, as TeX spaces them.
    name = r"<(m[io])[^>]*>([A-Za-z]{2,})</\1>"
    return re.sub(name, r'<mo lspace="0.17em" rspace="0.17em">\2</mo>', equation).replace(r"\_", "_")


def _settings() -> Iterator[str]:
    """Yield a heading, a description and a table for every section of a run's settings, from its schema."""
    from metaloom.pipeline.algorithms import ALGORITHMS
    from metaloom.pipeline.algorithms.contract import AlgorithmSettings
    from metaloom.pipeline.config.run import RunConfig
    from metaloom.pipeline.nn.cells import AttentionOptions
    from metaloom.pipeline.nn.spec import ConvolutionOptions

    run = RunConfig.model_json_schema()
    shown: dict[str, tuple[str, dict[str, Any]]] = {"": ("", run)}
    for path, section in (pages := [("", run)]):  # which grows
        for key, field in section["properties"].items():
            for name in _sections(field):
                if name not in shown:
                    inner = f"{path}{key}.NAME." if "additionalProperties" in field else f"{path}{key}."
                    shown[name] = (inner, run["$defs"][name])
                    pages.append(shown[name])
    for network, options in (("cnn", ConvolutionOptions), ("linear-attention", AttentionOptions)):
        shown[network] = ("policy.network_options.", options.model_json_schema())

    for name, (path, section) in shown.items():
        fields = section["properties"]
        title = fields.get("name", {}).get("const") or path.strip(".") or "The run"
        yield f"## {title}{f' of {name}' if title == 'policy.network_options' else ''}\n\n{section['description']}"
        if title in ALGORITHMS.builtin and (own := ALGORITHMS.find(title, AlgorithmSettings)().run_defaults):
            yield f"Other defaults of a run under {title}: `{json.dumps(own)}`."
        rows = ["| setting | type | default | description |", "| --- | --- | --- | --- |"]
        for key, field in fields.items():
            default = field.get("default", {})
            if default and isinstance(default, dict):
                default = default.get("name") or "see its section"
            default = "required" if key in section.get("required", ()) else default
            text = default if isinstance(default, str) else json.dumps(default)
            about = field.get("description", "") if "const" not in field else f"Always {field['const']}."
            if not about:
                about = "See its section." if key != "algorithm" else "One of the algorithms below, by name."
            cells = (f"`{path}{key}`", _type(field), f"`{text}`", " ".join(about.split()))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        yield "\n".join(['<div class="settings" markdown="1">', "", *rows, "", "</div>"])


def _environments() -> Iterator[str]:
    """Yield a table of the built-in environments, then what each class says of itself."""
    from inspect import getdoc, signature

    from gymnasium.spaces import Discrete

    from metaloom.pipeline.envs import ENVS
    from metaloom.pipeline.envs.config import EnvConfig
    from metaloom.pipeline.envs.contract import MetaEnv
    from metaloom.pipeline.envs.registry import make_env
    from metaloom.pipeline.plugins import load

    rows = ["| name | tasks | observation, action |", "| --- | --- | --- |"]
    classes: dict[type, str] = {}
    for name, path in ENVS.items():
        if name.startswith("metaworld-ml1-") and name != "metaworld-ml1-reach":
            continue  # its fifty classes differ in their name
        cls, sizes = load(path), "see its page"
        if not name.startswith("metaworld-"):  # which take long to make
            env = make_env(EnvConfig(name=name))
            spaces = (env.observation_space, env.action_space)
            sizes = ", ".join(
                f"{space.n} discrete" if isinstance(space, Discrete) else str(*space.shape or ()) for space in spaces
            )
        rows.append(f"| [`{name}`](#{name}) | {str(getdoc(cls)).splitlines()[0]} | {sizes} |")
        for base in reversed(cls.__mro__[: cls.__mro__.index(MetaEnv)]):
            if "| ---" in (base.__doc__ or "") or (issubclass(base, MetaEnv) and not base.__name__.startswith("_")):
                classes.setdefault(base, base.__name__)
        classes[cls] = name
    yield "\n".join(rows)
    for cls, title in classes.items():
        options = [f"`{option}`" for option in signature(cls).parameters.values() if option.name != "render_mode"]
        yield f"## {title}\n\n" + re.sub(r"\n(Args|Raises):\n.*", "", str(getdoc(cls)), flags=re.DOTALL)
        if title != cls.__name__:
            yield f"Class `{cls.__name__}`. Options (`env.options`): {', '.join(options) or 'none'}."
            if groups := getattr(cls, "task_classes", None):
                yield f"Classes of tasks: {', '.join(groups.names)}."


def _sections(field: Any) -> list[str]:
    """Return the names of the sections that a field of a JSON schema refers to."""
    return [name for name in re.findall(r'"#/\$defs/(\w+)"', json.dumps(field)) if name != "JsonValue"]


def _type(field: dict[str, Any]) -> str:
    """Describe the values that a field of a JSON schema allows."""
    kind = "section" if _sections(field) else str(field.get("type", "any"))
    if several := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(one) for one in several))
    if choices := field.get("enum"):
        return ", ".join(f"`{choice}`" for choice in choices)
    if field.get("type") in ("array", "object"):
        items = field.get("items") or field.get("additionalProperties") or {}
        return f"{'list' if field['type'] == 'array' else 'mapping'} of {_type(items) if items else 'values'}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return " ".join([kind, *(f"{sign} {field[name]}" for name, sign in signs.items() if name in field)])


def _arrays() -> Iterator[str]:
    """Yield a table of the arrays of a run: axes, unit, meaning and the stages that write them."""
    from metaloom.storage.format.stages import ARRAYS, EARLIER, METRICS, METRICS_GROUP, STEP

    stages = [stage for table in EARLIER.values() for stage in table.stages]
    writers: dict[str, dict[str, None]] = {}
    for stage in stages:
        writers.setdefault(stage.group, {})[stage.name] = None
    writers[METRICS_GROUP] = {stage.name: None for stage in stages if stage.ends_iteration}
    plans = {stage.group: ARRAYS[stage.output] for stage in stages} | {METRICS_GROUP: (METRICS,)}
    yield "| array | axes | unit | content | written by |"
    yield "| --- | --- | --- | --- | --- |"
    for group, names in writers.items():
        for plan in plans[group]:
            path = f"{group.replace(STEP, '{k}')}/{plan.pattern}"
            yield f"| `{path}` | {', '.join(plan.dims)} | {plan.unit} | {plan.description} | {', '.join(names)} |"


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
