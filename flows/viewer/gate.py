"""Who may ask: this machine's user, who has the address with its token, and no other page in the same browser."""

import secrets
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from metaloom.flows.this_machine import REQUIRED_HOST, names_this_machine

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        # plotly.js writes styles into the page.
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Of every answer, refusals included."""


class Gate:
    """Lets requests through that come from the page itself, or open it with the token.

    Args:
        app: what is behind it.
        token: first part of every path.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":  # there is nothing else to ask for
            return
        refusal = self._refusal(scope)
        answer = self._app if refusal is None else PlainTextResponse(f"{refusal[1]}\n", refusal[0])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_encoded(HEADERS.items())]
            await send(message)

        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason for which a request is refused."""
        headers = Headers(scope=scope)
        if not names_this_machine(headers.getlist("host")):
            return 421, REQUIRED_HOST
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "required GET: this page changes nothing"
        # A request by hand may ask for `*`, or for nothing.
        token = f"{scope['path']}/".split("/")[1]
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return 403, "open the address that `metaloom view` has printed: it has a token in it"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers["host"]:
            return 403, "required a request of the page itself"
        # Browsers say where a request comes from. A link that opens the page may be anywhere.
        is_opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not is_opened:
            return 403, "required a request of the page itself"
        return None


def _encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
