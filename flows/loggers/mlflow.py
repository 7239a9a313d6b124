"""Logger for MLflow, with a database beside the runs unless MLFLOW_TRACKING_URI is set. Requires the extra `mlflow`."""

import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from metaloom.flows.loggers.numbers import distributions, scalars, timings
from metaloom.flows.observer import IterationReport
from metaloom.storage import Run
from metaloom.storage.format.settings import dotted

# An unreachable server should delay an iteration by seconds, not minutes.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
_QUARTILES = {"lowest": 0.0, "lower_quartile": 0.25, "median": 0.5, "upper_quartile": 0.75, "highest": 1.0}
_LONGEST_PARAM = 500
_ID = "metaloom.id"


class _MlflowRun:
    """Logger that writes to an MLflow run. Without a server, the database and files are in `folder`."""

    def __init__(self, run: Run, folder: Path) -> None:
        # Set before importing MLflow, which would otherwise report usage to the vendor.
        for name, value in {**_PATIENCE, "MLFLOW_DISABLE_TELEMETRY": "true"}.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        # MLflow logs every table that it creates.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        if not server:
            folder.mkdir(exist_ok=True)
        self._client: Any = MlflowClient(server or f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        self._run = self._run_of(run, folder)

    def iteration(self, report: IterationReport, ended: float) -> None:
        from mlflow.entities import Metric

        numbers = {**scalars(report), **timings(report)}
        # MLflow has no histograms, so log five statistics of each distribution.
        for name, returns in distributions(report).items():
            quantiles = np.quantile(returns, [*_QUARTILES.values()]).tolist()
            numbers |= {f"{name}.{which}": value for which, value in zip(_QUARTILES, quantiles, strict=True)}
        at = round(1000 * ended), report.iteration
        self._client.log_batch(self._run, metrics=[Metric(_allowed(name), n, *at) for name, n in numbers.items()])

    def film(self, file: Path, report: IterationReport) -> None:
        self._client.log_artifact(self._run, str(file), "films")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")

    def _run_of(self, run: Run, folder: Path) -> str:
        """Return the id of the MLflow run, which is an existing one if training is resumed."""
        name, identity = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "metaloom", run.info["id"]
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            experiment = known.experiment_id
        else:
            # A server determines where it stores files.
            place = None if os.environ.get("MLFLOW_TRACKING_URI") else (folder / "mlflow").resolve().as_uri()
            experiment = self._client.create_experiment(name, artifact_location=place)
        found = self._client.search_runs([experiment], filter_string=f"tags.`{_ID}` = '{identity}'", max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
            return found[0].info.run_id
        from mlflow.entities import Param

        made = self._client.create_run(experiment, run_name=run.path.name, tags={_ID: identity})
        settings = dict(dotted(run.config)).items()
        params = [Param(_allowed(name), str(value)[:_LONGEST_PARAM]) for name, value in settings]
        for start in range(0, len(params), 100):  # the maximum per request
            self._client.log_batch(made.info.run_id, params=params[start : start + 100])
        return made.info.run_id


def _allowed(name: str) -> str:
    """Return a name with the characters that MLflow does not allow replaced by "_"."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


open_logger = _MlflowRun
