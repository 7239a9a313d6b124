"""Recomputation with the CPU code paths that computed stored outputs, as far as this processor supports them.

BLAS, torch and NumPy select their code paths on import, so a command that needs other code paths restarts with changed
environment variables.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from metaloom.flows.errors import StartAgain
from metaloom.pipeline.arithmetic import code_facts, code_for, lacking, variables_for
from metaloom.storage import Run
from metaloom.storage.format.provenance import system
from metaloom.storage.read.info import mapping

_NAMES = {"blas": "BLAS", "torch": "torch", "numpy": "NumPy"}


@dataclass(frozen=True)
class Arithmetic:
    """CPU code paths of this process, compared with a run's."""

    used: Mapping[str, str]  # CPU code paths that this process uses, keyed by library
    wanted: Mapping[str, str]  # CPU code paths that computed the run, keyed by library
    unrecorded: tuple[str, ...]  # libraries whose code path the run does not record; its processor's default is assumed
    missed: Mapping[str, str]  # why the wanted code path was not used, with a remedy, keyed by library
    mixed: bool  # True if iterations used different code paths; `wanted` contains those of the last iteration

    def __str__(self) -> str:
        used = ", ".join(f"{name} {self.used[library]} ({self._origin(library)})" for library, name in _NAMES.items())
        mixed = ". Other iterations record different ones; a process can use only one per library" if self.mixed else ""
        return f"Computed with the CPU code paths {used}{mixed}"

    def _origin(self, library: str) -> str:
        if library not in self.wanted:
            return "not recorded"
        known = "not recorded, assumed" if library in self.unrecorded else "as recorded"
        if library not in self.missed:
            return known
        return f"not {self.wanted[library]} {known}: {self.missed[library]}"


def start_as_recorded(run: Run, iterations: Collection[int]) -> None:
    """Raise StartAgain if the process must restart to use the CPU code paths that the run recorded."""
    wanted, _, _ = _recorded(run, iterations)
    flags = _flags(system())
    able = {library: code for library, code in wanted.items() if not lacking(library, code, flags)}
    variables = {name: value for library, code in able.items() for name, value in variables_for(library, code).items()}
    if any(os.environ.get(name) != value for name, value in variables.items()) and not _acts(able):
        raise StartAgain({name: value for name, value in (os.environ | variables).items() if value is not None})


def arithmetic_of(run: Run, iterations: Collection[int]) -> Arithmetic:
    """Return a comparison of this process's CPU code paths with the ones recorded for the given iterations."""
    wanted, unrecorded, mixed = _recorded(run, iterations)
    used, flags = _acting(), _flags(system())
    missed: dict[str, str] = {}
    for library, code in wanted.items():
        variables = variables_for(library, code)
        if used[library] == code:
            continue
        if reason := lacking(library, code, flags):
            missed[library] = f"{reason}; another processor may compute different bits"
        elif any(os.environ.get(name) != value for name, value in variables.items()):
            given = " ".join(f'{name}="{value or ""}"' for name, value in variables.items())
            missed[library] = f"Python was started without {given}"
        else:
            missed[library] = "the installed version has no such code path; install the version that the run records"
    return Arithmetic(used, wanted, unrecorded, missed, mixed)


def _acts(wanted: Mapping[str, str]) -> bool:
    """Return True if this process uses the wanted CPU code paths; torch is only imported if needed."""
    without_torch = code_facts()
    if any(without_torch.get(library, code) != code for library, code in wanted.items()):
        return False
    return wanted.items() <= _acting().items()


def _acting() -> dict[str, str]:
    from metaloom.pipeline.nn.device import arithmetic_facts

    return arithmetic_facts()


def _flags(about: Mapping[str, object]) -> frozenset[str]:
    return frozenset(str(about.get("cpu_flags", "")).split())


def _recorded(run: Run, iterations: Collection[int]) -> tuple[dict[str, str], tuple[str, ...], bool]:
    """Return the last iteration's code paths, the libraries without a recorded one, and whether iterations differ.

    Earlier versions recorded no code paths, or none for NumPy; the default for the recorded processor is then assumed.
    """
    facts = [mapping(run.environment_of(ref).get("arithmetic")) for ref in run.refs_of(iterations)]
    default = code_for(_flags(mapping(run.info.get("system"))))
    known = {library: str(facts[-1][library]) for library in _NAMES if facts and library in facts[-1]}
    unrecorded = tuple(library for library in default if library not in known)
    return {**default, **known}, unrecorded, any(one != facts[-1] for one in facts)
