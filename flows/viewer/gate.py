"""Access control for a server of this machine: only its own page and programs, no other page in the same browser."""

import secrets
from collections.abc import Callable, Mapping

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
KEPT_TO_ITSELF: Mapping[str, str] = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer of a gate, refusals included."""
HEADERS: Mapping[str, str] = {"Content-Security-Policy": POLICY, **KEPT_TO_ITSELF}
"""Headers of every answer of the page over runs."""
OTHER_PAGE = 403, "required a request of the page itself"

Refusal = tuple[int, str]
"""Status, and reason."""


class Gate:
    """Lets requests and websockets through that are not refused.

    Args:
        app: Guarded application.
        refusal: Returns why a request is refused, None if it is allowed.
        headers: Headers of every answer.
    """

    def __init__(
        self, app: ASGIApp, refusal: Callable[[Scope], Refusal | None], headers: Mapping[str, str] = KEPT_TO_ITSELF
    ) -> None:
        self._app, self._refusal = app, refusal
        self._headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is not None and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[1]})
            return
        answer = self._app if refusal is None else PlainTextResponse(f"{refusal[1]}\n", refusal[0])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        await answer(scope, receive, send_with_headers)


def token_gate(app: ASGIApp, token: str) -> Gate:
    """Return the gate of a page that changes nothing and is opened by an address with a token."""

    def refusal(scope: Scope) -> Refusal | None:
        if found := refusal_of_other_pages(scope):
            return found
        if scope.get("method") not in ("GET", "HEAD"):
            return 405, "required GET: this page changes nothing"
        # A request by hand may ask for `*`, or for nothing.
        asked = f"{scope['path']}/".split("/")[1]
        if not secrets.compare_digest(asked.encode(), token.encode()):
            return 403, "open the address that `metaloom view` has printed: it has a token in it"
        return None

    return Gate(app, refusal, HEADERS)


def refusal_of_other_pages(scope: Scope, *, any_host: bool = False) -> Refusal | None:
    """Return why a request is refused that another page in the user's browser has made, or None.

    Args:
        scope: The request.
        any_host: Accept requests by every name of this machine. A page whose own name leads here (DNS rebinding) then
            gets through, so what is guarded must ask for a password that no browser sends by itself.
    """
    headers = Headers(scope=scope)
    if not any_host and not names_this_machine(headers.getlist("host")):
        return 421, REQUIRED_HOST
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return OTHER_PAGE
    # Browsers say where a request comes from. A link that opens the page may be anywhere.
    is_opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not is_opened:
        return OTHER_PAGE
    return None
