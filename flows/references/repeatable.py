"""Requirements for a run that others can compute again: complete, and made only of what Metaloom ships."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import plural
from metaloom.flows.graph.run_stages import stages_of_run
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.trust import names_of_run
from metaloom.flows.views.run_info import state_of
from metaloom.storage import Run, argument
from metaloom.storage.read.sessions import mapping

_PATH = re.compile(r"/|~|\.\.?/")
"""Beginning of a path, which is one of this machine; names of environments have a slash only within."""


def require_repeatable(run: Run) -> None:
    """Refuse a run that others could not compute again."""
    done = len(run.iterations)
    if not done or state_of(run, None) != "complete":
        raise UsageError(
            f"{run.location}: found {done} of {plural(run.capacity, 'iteration')}; required a complete run: "
            f"metaloom resume {argument(run.path)}"
        )
    infos: list[Mapping[str, Any]] = [run.info, *run.info.get("ancestors", [])]
    for info in infos:
        if start := mapping(info.get("config")).get("init_from"):
            raise UsageError(
                f"{run.location}: found init_from={mapping(start).get('run')}, a run that others do not have; required "
                "a run whose first learner comes from its seed: train one without init_from"
            )
    # Installed packages bring plug-ins under names without a module.
    environments = [run.info["environment"], *(session.environment for session in run.sessions())]
    plugins = {str(name) for environment in environments for name in mapping(environment.get("plugins"))}
    if names := [*names_of_run(run), *sorted(plugins)]:
        raise UsageError(
            f"{run.location}: found settings that name {', '.join(names)}; required a run of nothing but what Metaloom "
            "brings, since others could not compute it again"
        )
    if paths := sorted({path for info in infos for path in _paths_in(info.get("config"))}):
        raise UsageError(
            f"{run.location}: found settings that name {', '.join(paths)}, a path of this machine; required a run of "
            "nothing but what Metaloom brings, since others could not compute it again"
        )
    # A complete iteration may lack an output, such as an evaluation before which the run was killed.
    with stages_of_run(run, Backend(workers=0)) as stages:
        for ref in (ref for i in run.iterations for ref in stages.order(i) if not run.contains(ref)):
            raise UsageError(
                f"{run.location}: found no {ref.stage} of iteration {ref.iteration}, which the settings ask for; "
                f"required a complete run: metaloom resume {argument(run.path)}"
            )


def _paths_in(settings: object) -> Iterator[str]:
    if isinstance(settings, str) and _PATH.match(settings):
        yield settings
    elif isinstance(settings, Mapping):
        for value in cast(Mapping[object, object], settings).values():
            yield from _paths_in(value)
    elif isinstance(settings, list | tuple):
        for value in cast(list[object], settings):
            yield from _paths_in(value)
