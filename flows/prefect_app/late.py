"""Lazy imports of Prefect, which must not be imported in a foreign folder; see `pipeline/lazy.py`."""

# pyright: reportUnusedImport=false
from typing import TYPE_CHECKING

from metaloom.pipeline.lazy import lazily

if TYPE_CHECKING:
    from httpx import HTTPError
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
    from prefect.exceptions import PrefectException
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
    from prefect.states import AwaitingRetry, Cancelled, Cancelling, Crashed, Running
else:
    __getattr__ = lazily(__name__)
