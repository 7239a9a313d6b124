"""CPU code paths used for arithmetic in this process. This module does not import torch, which some workers lack."""

from collections.abc import Set
from functools import cache
from typing import Any, cast

import numpy as np
from threadpoolctl import threadpool_info


def blas_facts() -> tuple[str, ...]:
    """Return the name and target processor of each BLAS library loaded in this process, sorted.

    Code paths for different processors sum in a different order. The processor and environment variables such as
    OPENBLAS_CORETYPE select one. Versions are omitted, because the NumPy and torch versions imply them, and
    because the version of SciPy's separate OpenBLAS does not matter.
    """
    libraries = (library for library in threadpool_info() if library["user_api"] == "blas")
    names = ("internal_api", "architecture")
    return tuple(sorted({" ".join(str(library[key]) for key in names if library.get(key)) for library in libraries}))


@cache
def numpy_facts() -> str:
    """Return the SIMD extensions that NumPy's own functions use, separated by spaces; "scalar" if there are none.

    With AVX-512, some functions, such as arcsinh and float64 exp, round differently. The processor and the environment
    variable NPY_DISABLE_CPU_FEATURES select the code path.
    """
    known = cast(dict[str, Any], np.show_config(mode="dicts")).get("SIMD Extensions", {})
    return " ".join(known.get("found") or known.get("baseline", ())) or "scalar"


def acting_facts() -> tuple[str, ...]:
    """Return the CPU code paths that actors without torch depend on, sorted."""
    return tuple(sorted((*blas_facts(), f"numpy {numpy_facts()}")))


def code_facts() -> dict[str, str]:
    """Return the CPU code paths that BLAS and NumPy use in this process, keyed by library."""
    return {"blas": ", ".join(blas_facts()), "numpy": numpy_facts()}


_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})
_ICE_LAKE = frozenset({"avx512ifma", "avx512vbmi", "avx512_vbmi2", "avx512_vnni", "avx512_bitalg", "avx512_vpopcntdq"})
_NEEDED: dict[str, dict[str, frozenset[str]]] = {
    "blas": {
        "openblas Nehalem": frozenset({"sse4_2"}),
        "openblas Sandybridge": frozenset({"avx"}),
        "openblas Haswell": _AVX2,
        "openblas Zen": _AVX2,
        "openblas SkylakeX": _AVX512,
        "openblas Cooperlake": _AVX512 | {"avx512_bf16"},
        "openblas SapphireRapids": _AVX512 | {"avx512_bf16", "avx512_fp16", "amx_tile"},
    },
    "torch": {"DEFAULT": frozenset({"sse2"}), "AVX2": _AVX2, "AVX512": _AVX2 | _AVX512},
    "numpy": {
        "X86_V2": frozenset({"sse4_2"}),
        "X86_V3": _AVX2 | {"bmi1", "bmi2", "f16c", "movbe"},
        "X86_V4": _AVX512,
        "AVX512_ICL": _ICE_LAKE,
        "AVX512_SPR": frozenset({"avx512_fp16"}),
    },
}
"""x86-64 processor flags that each CPU code path requires, as named by Linux, keyed by library and code path."""


def code_for(flags: Set[str]) -> dict[str, str]:
    """Return each library's default CPU code path on an x86-64 processor with these flags; {} without AVX2.

    For OpenBLAS, the default is Haswell, which OpenBLAS also uses on unknown processors.
    """
    if not flags >= _AVX2:
        return {}
    numpy = [name for name in _numpy_extensions() if flags >= _NEEDED["numpy"][name]]
    torch = "AVX512" if flags >= _NEEDED["torch"]["AVX512"] else "AVX2"
    return {"blas": "openblas Haswell", "torch": torch, "numpy": " ".join(numpy)}


def lacking(library: str, code: str, flags: Set[str]) -> str:
    """Return why a processor with these flags cannot run a library's CPU code path, or "" if it can."""
    names = code.split() if library == "numpy" else [code]
    known = _NEEDED[library]
    if unknown := [name for name in names if name not in known]:
        return f"{' '.join(unknown)} is not a code path that can be selected on an x86-64 processor"
    lacks = sorted(frozenset[str]().union(*(known[name] for name in names)).difference(flags))
    return f"the processor lacks {' '.join(lacks)}" if lacks else ""


def variables_for(library: str, code: str) -> dict[str, str | None]:
    """Return the environment variables that make a new process use this CPU code path; None unsets a variable."""
    if library == "blas":
        return {"OPENBLAS_CORETYPE": code.removeprefix("openblas ")}
    if library == "torch":
        return {"ATEN_CPU_CAPABILITY": code.lower()}
    without = " ".join(name for name in _numpy_extensions() if name not in code.split())
    return {"NPY_DISABLE_CPU_FEATURES": without or None}


def _numpy_extensions() -> list[str]:
    """Return all SIMD extensions that this NumPy build supports, including those that the processor lacks."""
    known = cast(dict[str, Any], np.show_config(mode="dicts")).get("SIMD Extensions", {})
    return [name for name in _NEEDED["numpy"] if name in (*known.get("found", ()), *known.get("not found", ()))]
