"""Output of commands, as rich renderables and as plain data for `--json`. This module prints nothing."""

import re
from collections.abc import Mapping, Sequence
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from metaloom.flows.formatting import (
    adaptation_label,
    age,
    as_json,
    dotted,
    duration,
    interval,
    number,
    plural,
    short_time,
    size,
    stage_label,
    stage_name,
    trial_length,
)
from metaloom.flows.results.class_returns import OFFICIAL, class_rows, success_rows
from metaloom.flows.results.disk import DiskUsage, bytes_freed, bytes_together
from metaloom.flows.runs import require_settings
from metaloom.flows.views.parts import as_text, fact_grid, heading, new_table, one_line, optional
from metaloom.flows.views.run_info import changed_settings, iteration_info, run_info
from metaloom.pipeline.estimation.statistics import BALANCED
from metaloom.pipeline.shown import printable
from metaloom.pipeline.types import Params
from metaloom.storage import Run, argument, location, url_of

if TYPE_CHECKING:
    # Listing runs must not wait for torch.
    from metaloom.flows.results.checks import Check, Verification
    from metaloom.flows.results.comparison import Comparison
    from metaloom.flows.results.counterfactual import Counterfactual
    from metaloom.flows.results.evaluation import EvaluationOutcome
    from metaloom.flows.results.replay import ArrayDifference, RunDiff, StageReplay
    from metaloom.flows.results.run_rows import Rows
    from metaloom.storage import Fork
    from metaloom.storage.export import Export


STATE_STYLES = {
    **{"complete": "green", "training": "cyan", "stopped": "yellow", "waiting": "dim"},
    **dict.fromkeys(("killed", "damaged", "unreadable"), "red"),
}
CHECK_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
DIGEST_PREFIX = 12


def runs_view(rows: "Rows") -> RenderableType:
    """Return the output of `metaloom ls`: a table of runs, or a message that explains why there are none."""
    if not rows:
        return as_text(rows.nothing)
    # A column for success, if any environment reports it.
    rate = [">success rate"] if any("last_success_rate" in row for row in rows) else []
    columns = ("run", "started", "environment", "algorithm", ">iterations", ">last return", *rate, ">on disk", "state")
    cells = (
        (
            one_line(row["name"]),
            *(age(row.get("started")), row.get("env", ""), row.get("algorithm", "")),
            f"{row['iterations_done']} / {row['iterations']}" if "iterations" in row else "",
            optional(row.get("last_return")),
            *(optional(row.get("last_success_rate")) for _ in rate),
            *(size(row["bytes"]), Text(row["state"], STATE_STYLES[row["state"]])),
        )
        for row in rows
    )
    table = new_table(*columns, rows=cells, drop=("on disk", "algorithm", "environment", "success rate", "started"))
    details = ((row["name"], row.get("writer") or row.get("problem")) for row in rows)
    return Group(table, *(as_text(one_line(f"{name}: {detail}")) for name, detail in details if detail))


def run_view(run: Run, *, path: str | None = None, everything: bool = False) -> RenderableType:
    """Return the output of `metaloom show RUN`; `path` is shown instead of the location from which the run was opened.

    Without `everything`, the output contains only the settings that differ from the defaults, and the total size.
    """
    require_settings(run)
    info = run_info(run)
    config, state = info["config"], Text(info["state"], STATE_STYLES[info["state"]])
    facts: dict[str, object] = {
        "path": info["path"] if path is None else path,
        "state": Text.assemble(state, f" ({printable(info['writer'])})") if info["writer"] else state,
        "iterations": f"{info['iterations_done']} / {info['iterations']}",
        "created": f"{info['created'][:19].replace('T', ' ')} UTC",
        "environment": config["env"]["name"],
        "algorithm": config["algorithm"]["name"],
        "sizes": _sizes(config),
        "seed": config["seed"],
        "on disk": size(sum(info["bytes"].values())),
    }
    if info["usage"] is not None:
        is_done = info["iterations_done"] >= info["iterations"]
        facts["took" if is_done else "took so far"] = _usage_line(info["usage"])
    # Not recorded by earlier versions.
    if kernel := info["environment"].get("kernel"):
        facts["updates by"] = ", ".join(f"{value}" for _, value in dotted(kernel))
    if witness := info["witness"]:
        replayed = plural(witness["replayed"], "episode")
        facts["witness"] = f"{replayed} played again, {witness['reproduced']:,} reproduced bit for bit"
    if info["parent"]:
        facts["forked from"] = f"{info['parent']['name']}@{info['parent']['iteration']}"
    if info["thinned_iterations"]:
        facts["thinned"] = plural(info["thinned_iterations"], "iteration")
    parts: list[RenderableType] = [heading(info["name"]), fact_grid(facts.items())]
    if info["last_metrics"]:
        parts += [heading(f"metrics of iteration {info['last_iteration']}"), _metrics_view(info["last_metrics"])]
    parts += _classes_view(info["last_class_returns"])
    if everything:
        sizes = new_table("group", ">size", rows=((name, size(taken)) for name, taken in info["bytes"].items()))
        sizes.add_section()
        sizes.add_row("all", size(sum(info["bytes"].values())))
        parts += [heading("on disk"), sizes]
    # Not recorded by earlier versions.
    if everything and (env := info["environment"].get("env")):
        parts += [heading("environment, with defaults"), fact_grid(dotted(env))]
    if info["sessions"]:
        parts += [heading("sessions with other versions, sources or hardware"), _sessions_table(info["sessions"])]
    if info["quarantine"]:
        parts += [heading("quarantine: stored stage failures"), _quarantine_table(info["quarantine"])]
    settings = list(dotted(config))
    changed = settings if everything else changed_settings(config)
    title = "settings" if changed == settings else "settings that differ from the defaults (--all shows all)"
    parts += [heading(title), fact_grid(changed)]
    return Group(*parts)


def _usage_line(usage: Mapping[str, Mapping[str, Any] | None]) -> str:
    taken, said = usage["taken"] or {}, usage["predicted"]
    shown = (("memory", "memory_bytes", size), ("disk", "disk_bytes", size), ("time", "seconds", duration))
    parts = [f"{what} {text(taken[name])}{f' ({text(said[name])})' if said else ''}" for what, name, text in shown]
    after = f"; in brackets, the prediction made after {said['after_iterations']} iterations" if said else ""
    return ", ".join(parts) + after


def _sessions_table(sessions: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table(">session", "since", "what", "before", "after")
    for session in sessions:
        for n, (name, values) in enumerate(session["changed"].items()):
            first = ("", "") if n else (str(session["session"]), session["started"][:19].replace("T", " "))
            texts = ["-" if value is None else str(value) for value in values]
            texts = [text[:DIGEST_PREFIX] if re.fullmatch("[0-9a-f]{64}", text) else text for text in texts]
            table.add_row(*first, name, *texts)
    return table


def iteration_view(run: Run, iteration: int) -> RenderableType:
    """Return the output of `metaloom show RUN@ITERATION`."""
    info = iteration_info(run, iteration)
    title = f"{info['run']}, iteration {iteration}{'' if info['complete'] else ' (not complete)'}"
    parts: list[RenderableType] = [heading(title), _stage_table(info["stages"], iteration)]
    if info["metrics"]:
        parts += [heading("metrics"), _metrics_view(info["metrics"])]
    parts += _classes_view(info["class_returns"])
    return Group(*parts)


def _stage_table(stages: Sequence[Mapping[str, Any]], iteration: int) -> Table:
    table = new_table("stage", ">seconds", ">on disk", "digest", "computed from")
    for stage in stages:
        inputs = [
            stage_label(i["stage"], i["step"]) + (f" i={i['iteration']}" if i["iteration"] != iteration else "")
            for i in stage["inputs"]
        ]
        for item in stage["spans"]:
            iterations = f"{item['first']['iteration']}-{item['last']['iteration']}"
            steps = f" with {plural(item['steps'], 'step')}" if item["steps"] else ""
            outputs = f"{plural(item['outputs'], 'output')}{steps}"
            inputs.append(f"all {' and '.join(item['stages'])} i={iterations} ({outputs})")
        taken = "thinned" if stage["thinned"] else size(stage["bytes"])
        name, digest = stage_label(stage["stage"], stage["step"]), stage["digest"][:DIGEST_PREFIX]
        table.add_row(name, f"{stage['seconds']:.3f}", taken, digest, ", ".join(inputs))
    return table


def output_view(info: Mapping[str, Any]) -> RenderableType:
    """Return the output of `metaloom show RUN@ITERATION --stage STAGE`: the inputs and arrays of a stage."""
    table, arrays = _stage_table([info], info["iteration"]), new_table("array", "axes", "dtype", "unit", "meaning")
    for array in info["arrays"]:
        if "problem" in array:
            arrays.add_row(array["name"], "", "", "", array["problem"])
            continue
        axes = ", ".join(f"{dim} {length}" for dim, length in zip(array["dims"], array["shape"], strict=True))
        arrays.add_row(array["name"], axes, array["dtype"], array["unit"], array["description"])
    about = f"{info['output']}: {info['description']}" if info["description"] else info["output"]
    return Group(heading(f"{info['run']}, iteration {info['iteration']}"), table, heading(about), arrays)


def fork_view(fork: "Fork", parent: Path) -> RenderableType:
    """Return the output of `metaloom fork`: which files were shared or copied."""
    shared, place = f"{plural(fork.shared_files, 'file')}, {size(fork.shared_bytes)}", location(fork.path)
    facts = {
        "run": place,
        "begins with": f"{plural(fork.iteration, 'iteration')} of {location(parent)}",
        # Object storage has no hard links; only the cache shares files.
        "shared with it": shared if url_of(fork.path) is None else f"{shared} in the cache; all was uploaded",
    }
    if fork.copied_files:
        copied = f"{plural(fork.copied_files, 'file')}, {size(fork.copied_bytes)}: the file system cannot share them"
        facts["copied"] = copied
    return fact_grid([*facts.items(), ("continue with", f"metaloom resume {argument(fork.path)}")])


def verification_view(found: "Verification") -> RenderableType:
    """Return the output of `metaloom verify`: damage and remedies."""
    from metaloom.flows.results.checks import what_helps

    if found.intact:
        unsealed = (
            "\nThe last session to write the run was killed, is still writing, or used an earlier version, so a loss "
            "of its newest records would not be detected. The next session that ends seals them."
        )
        return as_text(f"{location(found.path)}: every file is intact{'' if found.sealed else unsealed}")
    table = new_table("file", ">iteration", "stage", "array", "problem")
    for damage in found.damages:
        stage = stage_label(damage.stage, damage.step or 0) if damage.stage else ""
        iteration = "" if damage.iteration is None else damage.iteration
        table.add_row(damage.file, iteration, stage, damage.array or "", as_text(damage.problem, "red"))
    return Group(table, *what_helps(found.path, found.damages))


def export_view(done: "Export") -> RenderableType:
    """Return the output of `metaloom export`: skipped iterations, followed by the result."""
    lines = [f"iteration {i} skipped: {reason}" for i, reason in done.skipped]
    lines.append(f"{plural(done.iterations, 'iteration')}, {plural(done.rows, 'row')}  {done.path}")
    return as_text("\n".join(lines))


def replay_line(outcome: "StageReplay") -> Text:
    """Return the output line of `metaloom replay` for one stage."""
    word, style = (outcome.proved, "green") if outcome.identical else ("different", "bold red")
    where = f"  iteration {outcome.ref.iteration}  {stage_name(outcome.ref)}"
    arrays = "" if outcome.identical else f"  ({plural(len(outcome.differences), 'array')})"
    thinned = "  (thinned: compared with its record)" if outcome.with_record else ""
    return Text.assemble((word, style), where, arrays, thinned)


def difference_table(
    differences: Sequence["ArrayDifference"], sides: tuple[str, str] = ("stored", "replayed")
) -> Table:
    """Return a table of the arrays that differ between the outputs of two `sides`, such as stored and replayed."""
    columns = (">iteration", "stage", "array", "first differs at", *sides, ">max abs", ">max ulp", ">elements")
    table = new_table(*columns, drop=("elements", "max ulp", *sides, "first differs at"))
    for difference in differences:
        comparable = difference.count >= 0
        table.add_row(
            *(difference.ref.iteration, stage_name(difference.ref), difference.array),
            list(difference.index) if comparable else "shape or dtype",
            *(difference.stored, difference.replayed),
            f"{difference.max_abs:.3g}" if comparable else "",
            "" if difference.max_ulp is None else f"{difference.max_ulp:,}",
            f"{difference.count:,}" if comparable else "all",
        )
    return table


def recipe_rows() -> list[dict[str, Any]]:
    """Return one row per recipe: name, environment, algorithm, sizes and summary, or the error if it is broken."""
    from metaloom.flows.recipes import RECIPES, Recipe

    rows: list[dict[str, Any]] = []
    for name in RECIPES:
        try:
            recipe = RECIPES[name]
            about = recipe.about if isinstance(recipe, Recipe) else getdoc(recipe) or ""
            config = recipe().model_dump(mode="json")
        except Exception as problem:  # a broken recipe of an installed package must not hide others
            rows.append({"name": name, "problem": printable(f"{type(problem).__name__}: {problem}")})
            continue
        trained = {"env": config["env"]["name"], "algorithm": config["algorithm"]["name"], "sizes": _sizes(config)}
        rows.append({"name": name, **trained, "about": about.partition("\n")[0], "config": config})
    return rows


def recipes_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the output of `metaloom recipes`."""
    columns = ("recipe", "environment", "algorithm", "sizes", "about")
    table = new_table(*columns, drop=("sizes", "algorithm", "environment"), prose=("sizes", "about"))
    for row in rows:
        if "problem" in row:
            table.add_row(row["name"], "", "", "", as_text(f"broken: {row['problem']}", "red"))
        else:
            table.add_row(*(row[name] for name in ("name", "env", "algorithm", "sizes", "about")))
    return table


def parameters_table(fitted: Mapping[str, Params]) -> Table:
    """Return the table of `metaloom show RUN@N --stage process_samples`: statistics of the baselines' parameters."""
    rows = (
        (baseline, name, " x ".join(map(str, v.shape)), *map(number, (v.mean(), v.min(), v.max())))
        for baseline, params in fitted.items()
        for name, v in params.items()
    )
    return new_table("baseline", "parameter", ">shape", ">mean", ">smallest", ">largest", rows=rows)


def evaluation_table(outcome: "EvaluationOutcome") -> Table:
    """Return the main table of `metaloom evaluate`: test returns per number of adaptation steps."""
    table = new_table(
        *(">adaptation steps", ">episodes", ">average return", "95% interval"),
        *(">interquartile mean", "its 95% interval", "middle half of tasks"),
        drop=("middle half of tasks", "its 95% interval", "interquartile mean"),
    )
    new = " that training never drew" if outcome.tasks_are_new else ""
    table.title = f"learner after {plural(outcome.updates, 'update')}, {outcome.counted_tasks}{new}"
    for row in outcome.summary():
        table.add_row(
            *(row.adaptation_steps, row.adaptation_episodes),
            number(row.average_return),
            interval(row.average_low, row.average_high),
            number(row.iqm_return),
            interval(row.iqm_low, row.iqm_high),
            interval(row.lower_quartile, row.upper_quartile),
        )
    episodes = f"{plural(outcome.evaluation.test_returns.shape[2], 'test episode')} per task and row"
    note = f"{episodes}; {plural(outcome.env_steps, 'environment step')}, not counted as training"
    table.caption = "\n".join(filter(None, [note, outcome.extrapolation]))
    return table


def evaluation_view(outcome: "EvaluationOutcome") -> RenderableType:
    """Return the output of `metaloom evaluate`: returns overall and per task class, facts and success rates."""
    rows = class_rows(outcome.by_class())
    steps = outcome.summary()
    labels = [plural(k, "adaptation step") for k in range(len(steps))]
    success = success_view(success_rows(outcome.evaluation, outcome.classes))
    # The environment's facts for test episodes, with steps side by side.
    cells = ((name.replace("_", " "), *(number(step.facts[name]) for step in steps)) for name in steps[0].facts)
    facts = [new_table("of test episodes", *(f">{label}" for label in labels), rows=cells)] if steps[0].facts else []
    return Group(evaluation_table(outcome), *facts, *_classes_view(rows, labels), *success)


def success_view(rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Return a list with a table of the `success_rows` after the last adaptation step; empty if there are none."""
    if not rows:
        return []
    last, names = rows[-1]["adaptation_steps"], [name for name in ("success_rate", OFFICIAL) if name in rows[-1]]
    table = new_table("class", ">tasks", *(f">{name.replace('_', ' ')}" for name in names))
    for row in (row for row in rows if row["adaptation_steps"] == last):
        if row["class"] == BALANCED:
            table.add_section()
        table.add_row(row["class"], row["num_tasks"], *(number(row[name]) for name in names))
    if OFFICIAL in names:
        table.caption = (
            "success rate: over all test episodes; official: over the first three episodes of a class to "
            "finish, which is biased upwards because success ends an episode"
        )
    return [heading(f"success by class of task, after {plural(last, 'adaptation step')}"), table]


def doctor_view(checks: Sequence["Check"]) -> RenderableType:
    """Return the output of `metaloom doctor`: a table, followed by failures at full width."""
    table, below = new_table("check", "", "found", "required", "what helps"), list[Text]()
    for check in checks:
        found, advice = (check.found, check.advice) if check.ok else ("see below", "")
        table.add_row(check.name, Text(check.status, CHECK_STYLES[check.status]), found, check.required, advice)
        if not check.ok:
            below.append(as_text(f"{check.name}: {check.found}", "bold"))
            below += [as_text(f"what helps: {check.advice}")] if check.advice else []
    return Group(table, *below)


def _sizes(config: Mapping[str, Any]) -> str:
    algorithm, tasks, episodes = config["algorithm"], config["num_tasks"], config["episodes_per_task"]
    each = plural(episodes, "episode")
    if (in_trial := trial_length(config)) > 1:
        each = f"{plural(episodes // in_trial, 'trial')} of {plural(in_trial, 'episode')}"
    minimum = (("min_steps", "step"), ("min_rollouts", "episode"))
    enough = [plural(config[name], noun) for name, noun in minimum if config.get(name)]
    steps = plural(config["max_episode_steps"], "step")
    return (
        f"{plural(tasks, 'task')} x {'at most ' if enough else ''}{each} x {steps}"
        + (f", {plural(algorithm['inner_steps'], 'inner step')}" if "inner_steps" in algorithm else "")
        + (f", until {' and '.join(enough)} are reached" if enough else "")
    )


def _metrics_view(metrics: Mapping[str, float | None]) -> RenderableType:
    """Return a table of metrics with a column per inner step, followed by the other metrics."""
    by_step: dict[str, dict[int, str]] = {}
    others: list[tuple[str, str]] = []
    for name, value in metrics.items():
        prefix, _, short = name.partition(".")
        k = prefix.removeprefix("step_")
        if short and k.isdecimal():
            by_step.setdefault(short, {})[int(k)] = optional(value)
        else:
            others.append((name, f"{optional(value)}  {meaning(name, value)}".rstrip()))
    last = max((k for values in by_step.values() for k in values), default=-1)
    table = new_table("by inner step", *(f">{adaptation_label(k, last)}" for k in range(last + 1)))
    table.columns[0].no_wrap = True
    # Show returns first.
    for name in sorted(by_step, key=lambda name: (name != "average_return", name)):
        table.add_row(name, *(by_step[name].get(k, "") for k in range(last + 1)))
    return Group(table, fact_grid(others)) if by_step else fact_grid(others)


def meaning(name: str, value: float | None) -> str:
    """Return an explanation for a loss that is zero by construction; "" for other metrics."""
    if name != "loss_before" or not value or abs(value) > 1e-6:
        return ""
    return "(0 except for rounding: advantages have mean 0)"


def _classes_view(rows: Sequence[Mapping[str, Any]], labels: Sequence[str] | None = None) -> list[RenderableType]:
    """Return a list with a table of per-class returns, with a labeled column per step; empty without classes."""
    if not rows:
        return []
    last = rows[-1]["step"]
    labels = labels or [adaptation_label(k, last) for k in range(last + 1)]
    table = new_table("class", ">tasks", *(f">{label}" for label in labels))
    for first in (row for row in rows if row["step"] == 0):
        of_class = [row for row in rows if row["class"] == first["class"]]
        if first["class"] == BALANCED:
            table.add_section()
        returns = ((row["average_return"], row["standard_error"]) for row in of_class)
        cells = (optional(mean) if error is None else f"{number(mean)} ± {number(error)}" for mean, error in returns)
        table.add_row(first["class"], first["num_tasks"], *cells)
    table.caption = "mean over tasks ± its standard error; balanced: every class has the same weight"
    return [heading("return by class of task"), table]


def _quarantine_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    rows = (
        (
            *(entry["when"][:19].replace("T", " "), entry["iteration"], stage_label(entry["stage"], entry["step"])),
            *(entry["message"], entry["path"], "stored since" if entry["stored_since"] else ""),
        )
        for entry in entries
    )
    return new_table("when", ">iteration", "stage", "what", "kept in", "", rows=rows)


def diff_view(diff: "RunDiff") -> RenderableType:
    """Return the output of `metaloom diff`."""
    parts: list[RenderableType] = []
    for title, rows in (("settings", diff.settings), ("code, packages, machine", diff.environment)):
        if rows:
            cells = ((row.name, *("-" if value is None else value for value in (row.a, row.b))) for row in rows)
            parts += [heading(title), new_table("", diff.a.name, diff.b.name, rows=cells)]
    if diff.first is not None:
        parts += [heading(f"first difference: iteration {diff.first.iteration}, {stage_name(diff.first)}")]
        parts += [difference_table(diff.arrays, ("a", "b"))]
    outputs = f"{plural(diff.compared, 'output')} that both have"
    words = f"equal: all {outputs}" if diff.equal else f"{diff.different} of {outputs} differ"
    for run, missing in ((diff.a, diff.only_a), (diff.b, diff.only_b)):
        words += f"; {missing} {'is' if missing == 1 else 'are'} in {run} only" if missing else ""
    return Group(*parts, as_text(words))


def disk_view(usage: DiskUsage) -> RenderableType:
    """Return the output of `metaloom du`: a row per run, and its contents if `details` is True."""
    uses, paths, leftovers = usage.uses, usage.paths, usage.leftovers
    if not uses and not leftovers:
        return "no runs"
    table = new_table("run", ">on disk", ">shared with forks", ">freed by thinning", ">freed by removing", "")
    for use, path in zip(uses, paths, strict=True):
        known = size(use.thinning) if not use.problem else ""
        note = use.problem or (f"{size(use.only_remote)} not in the cache" if use.only_remote else "")
        freed = size(bytes_freed([path]))
        table.add_row(one_line(use.name), size(use.num_bytes), size(use.shared), known, freed, note)
    table.add_section()
    table.add_row("together", size(bytes_together(paths)))
    parts: list[RenderableType] = [table] if uses else []
    for use in uses if usage.details else ():
        ranges = {f"{first} to {last}": num_bytes for (first, last), num_bytes in (use.ranges or {}).items()}
        for what, sizes in (("group", use.groups), ("stage", use.stages), ("iteration", ranges)):
            if sizes:
                rows = ((name, size(num_bytes)) for name, num_bytes in sizes.items())
                parts += [heading(one_line(f"{use.name}, by {what}")), new_table(what, ">size", rows=rows)]
    if leftovers:
        left = f"{plural(len(leftovers), 'interrupted removal')}, {size(bytes_together(leftovers))}"
        parts.append(as_text(f"{left}: `metaloom rm` finishes the removal", "yellow"))
    return Group(*parts)


def counterfactual_table(result: "Counterfactual") -> Table:
    """Return the output of `metaloom optimize`, which shows both outcomes side by side."""
    table = new_table("", ">as in the run", ">changed", "")
    table.title = f"iteration {result.ref.iteration}, {stage_name(result.ref)}: {_settings(result)}"
    for name, (stored, changed) in result.quantities().items():
        if name == "seconds":
            continue
        style = "" if stored == changed else "bold"
        note = meaning(name, stored) and meaning(name, changed)
        table.add_row(name, optional(stored), Text(optional(changed), style), note)
    table.add_row("time", short_time(result.stored.seconds), short_time(result.changed.seconds))
    distance = ", ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in result.distance().items())
    notes = ["identical to what is stored" if result.changed.identical else f"apart: {distance}"]
    if result.changed.settings and result.first_changed is not None:
        notes.append(f"the first stage that changes is {stage_name(result.first_changed)}")
    elif result.changed.settings:
        computed = ", ".join(map(stage_name, result.changed.digests))
        notes.append(f"none of the recomputed stages ({computed}) is affected by the changed settings")
    table.caption = "; ".join([*notes, _stored_words(result)])
    return table


def grid_table(results: Sequence["Counterfactual"]) -> Table:
    """Return the output of `metaloom optimize --grid`: a row per combination, without constant columns."""
    rows = [{name: c for name, (_, c) in result.quantities().items()} for result in results]
    stored = {name: s for name, (s, _) in results[0].quantities().items()}
    names = [name for name in {**stored, **{n: None for row in rows for n in row}} if name != "seconds"]
    names = [name for name in names if len({row.get(name) for row in (stored, *rows)}) > 1]
    distances = [result.distance() for result in results]
    table = new_table("settings", *(f">{name}" for name in (*names, *distances[0])), ">time")
    table.title = f"iteration {results[0].ref.iteration}, {stage_name(results[0].ref)}"
    as_stored = (*(optional(stored.get(name)) for name in names), *[""] * len(distances[0]))
    table.add_row("as in the run", *as_stored, short_time(results[0].stored.seconds))
    for result, row, distance in zip(results, rows, distances, strict=True):
        values = (*(optional(row.get(name)) for name in names), *map(number, distance.values()))
        table.add_row(_settings(result), *values, short_time(result.changed.seconds))
    table.caption = _stored_words(results[0])
    return table


def _stored_words(result: "Counterfactual") -> str:
    if result.stored.identical:
        return "with the run's own settings the stage reproduces the stored output"
    return "with the run's own settings the stage does NOT reproduce the stored output: see `metaloom replay`"


def _settings(result: "Counterfactual") -> str:
    return " ".join(result.changed.settings) or "no change"


def minibatch_info(run: Run, iteration: int, update: int, rows: slice, *, context: bool) -> dict[str, Any]:
    """Return selected transitions of a gradient step as plain data, with the origin of each."""
    table = run[iteration].transitions(update, context=context, rows=rows)
    batches = run[iteration].minibatches()
    numbers = batches.context_rows if context else batches.rows
    assert numbers is not None
    return {
        "run": run.path.name,
        "iteration": iteration,
        "update": update,
        "num_updates": batches.num_updates,
        "context": context,
        "tasks": batches.task_ids[update].tolist(),
        "rows_per_task": numbers.shape[2],
        "transitions": as_json(table.to_pylist()),
    }


def minibatch_view(info: Mapping[str, Any]) -> Table:
    """Return the result of `minibatch_info` as a table."""
    table = new_table(
        *(">buffer", ">row", ">iteration", "stage", ">task", ">episode", ">t"),
        *("observation", "action", "reward", "next observation", "terminated"),
    )
    for row in info["transitions"]:
        table.add_row(
            *(row[name] for name in ("memory", "row", "iteration")),
            stage_label(row["stage"], row["step"]),
            *(row[name] for name in ("task", "episode", "t")),
            *(_numbers(row[name]) for name in ("observation", "action", "reward", "next_observation")),
            "yes" if row["terminated"] else "",
        )
    kind, num_tasks, each = "context" if info["context"] else "minibatch", len(info["tasks"]), info["rows_per_task"]
    table.title = (
        f"{info['run']}, iteration {info['iteration']}, {kind} of gradient step {info['update']} of "
        f"{info['num_updates']}: {num_tasks} x {each} transitions"
    )
    table.caption = f"{len(info['transitions'])} of {num_tasks * each} transitions; --rows FROM:TO shows others"
    return table


def _numbers(value: Any) -> str:
    """Format a number, or the first components of a vector."""
    if not isinstance(value, list):
        return "-" if value is None else number(value)
    shown = ", ".join(_numbers(component) for component in value[:4])
    return shown if len(value) <= 4 else f"{shown}, ... ({len(value)})"


def comparison_view(found: "Comparison") -> RenderableType:
    """Return the output of `metaloom compare`: groups, pairs, and conclusions about the ranking."""
    columns = ("group", ">runs", ">interquartile mean", "95% interval", ">mean", "its 95% interval")
    dropped = ("lowest to highest run", "its 95% interval", "mean")
    table = new_table(*columns, "lowest to highest run", drop=dropped)
    for group in found.groups:
        means = group.scores.run_means
        estimates = (text for e in (group.iqm, group.mean) for text in (number(e.value), interval(e.low, e.high)))
        ends = f"{number(float(means.min()))} to {number(float(means.max()))}"
        table.add_row(group.name, len(group.scores), *estimates, ends)
    table.title, table.caption = as_text(found.conditions), as_text(found.intervals)
    parts: list[RenderableType] = [table]
    if found.pairs:
        parts += [heading("pairs"), _pairs_table(found)]
    parts += [heading("ranking"), *map(as_text, found.verdicts)]
    if found.notes:
        parts += [heading("notes"), *map(as_text, found.notes)]
    return Group(*parts)


def _pairs_table(found: "Comparison") -> Table:
    columns = ("a", "b", ">a - b", "95% interval", ">P(a > b)", "its 95% interval", ">p")
    table = new_table(*columns, drop=("its 95% interval", "P(a > b)", "p"))
    for pair in found.pairs:
        difference, better = pair.difference, pair.improvement
        table.add_row(
            *(pair.a, pair.b, number(difference.value), interval(difference.low, difference.high)),
            *(f"{better.value:.2f}", interval(better.low, better.high), f"{pair.adjusted_p:.2g}"),
        )
    unit = "on the same task" if found.groups[0].scores.same_tasks else "by their mean scores"
    table.caption = as_text(
        "a - b: difference of interquartile means; P(a > b): probability that a run of a is higher than one of b, "
        f"{unit}; p: adjusted for all pairs"
    )
    return table
