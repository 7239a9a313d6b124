"""Fuzz the readers by what of their code each input reaches: `python tests/fuzz/fuzz.py [SECONDS [READER ...]]`.

Needs atheris, which `make fuzz` brings. Each reader has a process of its own. Inputs that a reader did not refuse as
it documents are kept in the working folder, as `READER.N.failure`, or `READER.crash-*` where its process died.
"""

import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["metaloom", "json", "yaml"]):
    from readers import CORPUS, READERS

MEMORY_MIB, TIMEOUT_SECONDS, MOST_BYTES = 2048, 10, 2**16


def _keeping(name: str) -> Callable[[bytes], None]:
    """A reader that keeps the first input by which it fails in a way of its own, and goes on."""
    known: set[tuple[object, ...]] = set()

    def read(raw: bytes) -> None:
        try:
            READERS[name](raw)
        except Exception as error:
            where = (type(error), *((f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)[-3:]))
            if where not in known:
                known.add(where)
                Path(f"{name}.{len(known)}.failure").write_bytes(raw)
                traceback.print_exception(error)

    return read


def _fuzz(name: str, seconds: int) -> None:
    found = tempfile.mkdtemp(prefix=f"fuzz-{name}-")
    limits = [f"-rss_limit_mb={MEMORY_MIB}", f"-timeout={TIMEOUT_SECONDS}", f"-max_len={MOST_BYTES}"]
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={name}.", "-print_final_stats=1", *limits]
    atheris.Setup([sys.argv[0], *options, found, str(CORPUS / name)], _keeping(name))
    atheris.Fuzz()


def main() -> int:
    """Fuzz one reader after the other."""
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    failed: list[str] = []
    for name in sys.argv[2:] or READERS:
        process = multiprocessing.Process(target=_fuzz, args=(name, seconds))
        process.start()
        process.join()
        failed += [name] if process.exitcode else []
    failures = [*failed, *map(str, sorted(Path().glob("*.failure")))]
    sys.stdout.write(f"failed: {', '.join(failures) or 'none'}\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
