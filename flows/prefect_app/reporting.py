"""Reports to Prefect's server while a run trains. If it is gone, training continues: the store is the truth."""

import logging
import math
from collections.abc import Callable

from httpx import TransportError
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

ASK_SECONDS = 5.0
# A server that does not answer within it counts as away.
ANSWER_SECONDS = 3.0

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


class Reporting:
    """Calls what reports to the server, unless that does not answer."""

    def __init__(self, logger: Logger, clock: Callable[[], float], answers_again: Callable[[], None]) -> None:
        self._logger, self._clock, self._answers_again = logger, clock, answers_again
        self._is_away = self._is_troubled = False
        self._asked = -math.inf

    def __call__(self, show: Callable[[], None]) -> None:
        """Report something. Warn once about what the page cannot show; training continues."""
        if self._is_away and not self._is_back():
            return
        try:
            # Prefect's client would try again for a minute, in which nothing is trained.
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                show()
        except TransportError as error:
            self._is_away, self._asked = True, self._clock()
            self._logger.warning(
                "Prefect's server does not answer (%s); training continues, and the page waits for the server",
                type(error).__name__,
            )
        except Exception as error:
            if not self._is_troubled:
                self._is_troubled = True
                self._logger.warning("The page does not show all of this training, which continues: %s", error)

    def _is_back(self) -> bool:
        """Ask whether the server answers again, now and then."""
        now = self._clock()
        if now - self._asked < ASK_SECONDS:
            return False
        self._asked = now
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), _quick_client() as client:
            self._is_away = client.api_healthcheck() is not None
        if not self._is_away:
            self._logger.info("Prefect's server answers again")
            self._answers_again()
        return not self._is_away


def _quick_client() -> SyncPrefectClient:
    return get_client(httpx_settings={"timeout": ANSWER_SECONDS}, sync_client=True)
