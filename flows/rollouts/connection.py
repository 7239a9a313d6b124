"""Connection to workers: processes of this session, or those of a scheduler that is there already."""

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from distributed import Client

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.local_cluster import local_client
from metaloom.flows.rollouts.versions import check_worker, fingerprint, require_versions
from metaloom.flows.rollouts.waiting import LONGER, NoWorkerError, wait_for
from metaloom.flows.rollouts.workers import Backend, SamplerSpec, usable_cores
from metaloom.pipeline.arithmetic import blas_facts

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 10.0


@contextmanager
def dask_client(backend: Backend, spec: SamplerSpec, session: str) -> Iterator[Client]:
    """A client of the backend's scheduler, or of worker processes of this session that live as long as the context.

    Raises:
        WorkersError: there is no such scheduler, it has no workers, or they run other code than this process.
        EnvError: its workers cannot build the environment.
    """
    workers, retries = backend.workers or 0, backend.retries or 0
    with _connect(backend.scheduler, spec) if backend.scheduler else local_client(workers, retries, session) as client:
        client.forward_logging()  # what environments log, to this process's loggers
        yield client


@contextmanager
def _connect(address: str, spec: SamplerSpec) -> Iterator[Client]:
    try:
        client = Client(address, timeout=_ANSWER_SECONDS)
    except (OSError, ValueError) as error:
        raise WorkersError(
            f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler` and workers with "
            "`dask worker`, or leave --scheduler out to use processes on this machine"
        ) from None
    except TypeError as error:  # Dask's word for a certificate that it was not given
        raise WorkersError(
            f"found no certificate to connect to {address} with ({error}); required Dask's TLS configuration, as in "
            "DASK_DISTRIBUTED__COMM__TLS__CA_FILE=ca.pem and __CLIENT__CERT, __CLIENT__KEY (docs/scale.md)"
        ) from None
    with client:
        _wait_for_a_worker(client, address)
        _require_same_code(client, spec)
        yield client


def _require_same_code(client: Client, spec: SamplerSpec) -> None:
    # The records of a run vouch for one set of versions, the trainer's. Workers that come later tell theirs when they
    # are first given work.
    try:
        found = cast(dict[str, tuple[dict[str, str], tuple[str, ...]]], client.run(check_worker, spec))
    except ImportError as error:
        raise _cannot_import(error) from None
    here = fingerprint(spec)
    for worker, (versions, _) in found.items():
        require_versions(here, versions, f"at {worker}")
    _tell_other_arithmetic({worker: blas for worker, (_, blas) in found.items()})


def _wait_for_a_worker(client: Client, address: str) -> None:
    # By work, not only by waiting: a scheduler that starts workers as there is work has none before.
    probe = client.submit(usable_cores, key=f"is_anybody_there-{secrets.token_hex(8)}", pure=False)
    try:
        wait_for(client, [probe])
        probe.result()
    except ImportError as error:
        raise _cannot_import(error) from None
    except (WorkersError, NoWorkerError):
        raise WorkersError(
            f"the Dask scheduler at {address} has no worker; start one with `dask worker {address}`. {LONGER}"
        ) from None
    finally:
        probe.cancel()


def _cannot_import(error: ImportError) -> WorkersError:
    return WorkersError(
        f"a Dask worker cannot import what rollouts need ({error}); required the same Metaloom and environment on "
        "every worker: install them there, or start the workers in this folder"
    )


def _tell_other_arithmetic(found: Mapping[str, tuple[str, ...]]) -> None:
    """Warn once of workers whose matrix products round in another way than this process's."""
    here = set(blas_facts())
    others = {worker: blas for worker, blas in found.items() if not set(blas) <= here}
    if others:
        worker, blas = next(iter(others.items()))
        log.warning(
            "%d of %d Dask workers multiply matrices by other machine code than this process, and digests may differ "
            "from those of other workers and of `metaloom replay`: %s at %s, %s here. OPENBLAS_CORETYPE=Haswell and "
            "ATEN_CPU_CAPABILITY=avx2 for the trainer and every worker have all x86-64 processors with AVX2 run the "
            "same code",
            len(others),
            len(found),
            ", ".join(blas),
            worker,
            ", ".join(sorted(here)),
        )
