"""Which machine code computes in this process. No torch: workers that do not need it ask, too."""

from functools import cache
from typing import Any, cast

import numpy as np
from threadpoolctl import threadpool_info


def blas_facts() -> tuple[str, ...]:
    """Name and processor of every BLAS that this process has loaded, sorted.

    Another processor's code rounds sums in another order. It is chosen by the processor it runs on, but also by
    variables such as OPENBLAS_CORETYPE. Without versions, which NumPy's and torch's imply: whether SciPy has loaded an
    OpenBLAS of its own must not matter.
    """
    libraries = (library for library in threadpool_info() if library["user_api"] == "blas")
    names = ("internal_api", "architecture")
    return tuple(sorted({" ".join(str(library[key]) for key in names if library.get(key)) for library in libraries}))


@cache
def numpy_facts() -> str:
    """Name the instructions of the processor that NumPy's own functions use.

    With AVX-512 some of them, such as arcsinh and the float64 exp, are other functions that round otherwise. It is
    chosen by the processor, but also by NPY_DISABLE_CPU_FEATURES.
    """
    known = cast(dict[str, Any], np.show_config(mode="dicts")).get("SIMD Extensions", {})
    return " ".join(known.get("found") or known.get("baseline", ())) or "scalar"


def acting_facts() -> tuple[str, ...]:
    """Name all machine code that acts without torch, sorted."""
    return tuple(sorted((*blas_facts(), f"numpy {numpy_facts()}")))
