"""Which machine code adds and multiplies in this process. No torch: workers that do not need it ask, too."""

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
