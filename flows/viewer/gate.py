"""Access control for a local server, which rejects requests from other pages in the same browser."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost")
"""Host names of this machine in browser requests. Any port is accepted, since tunnels change it."""
REQUIRED_HOST = f"the host must be {' or '.join(HOSTS)}"
# Inline styles are allowed because plotly.js writes styles into the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
KEPT_TO_ITSELF: Mapping[str, str] = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every response from a gate, including rejections."""
HEADERS: Mapping[str, str] = {"Content-Security-Policy": POLICY, **KEPT_TO_ITSELF}
"""Headers of every response from the page."""
OTHER_PAGE = 403, "the request must come from the page itself"

Refusal = tuple[int, str]  # HTTP status and reason of a rejection


def names_this_machine(hosts: Sequence[str]) -> bool:
    """Return True if a request is addressed to this machine by exactly one `Host` header.

    A page from another host whose name resolves to this machine (DNS rebinding) still sends that name.
    """
    if len(hosts) != 1:
        return False
    try:
        return urlsplit(f"//{hosts[0]}").hostname in HOSTS
    except ValueError:
        return False


class Gate:
    """ASGI middleware that rejects requests and websockets for which `refusal` returns a status and reason."""

    def __init__(
        self, app: ASGIApp, refusal: Callable[[Scope], Refusal | None], headers: Mapping[str, str] = KEPT_TO_ITSELF
    ) -> None:
        self._app, self._refusal = app, refusal
        self._headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    """Return a gate that rejects requests from other pages, with methods except GET and HEAD, or without the token."""

    def refusal(scope: Scope) -> Refusal | None:
        if found := refusal_of_other_pages(scope):
            return found
        if scope.get("method") not in ("GET", "HEAD"):
            return 405, "use GET: this page is read-only"
        # The path of handmade requests may be `*` or empty.
        asked = f"{scope['path']}/".split("/")[1]
        if not secrets.compare_digest(asked.encode(), token.encode()):
            return 403, "open the address that `metaloom view` printed; it contains a token"
        return None

    return Gate(app, refusal, HEADERS)


def refusal_of_other_pages(scope: Scope, *, any_host: bool = False) -> Refusal | None:
    """Return the status and reason for refusing a request from another page in the user's browser, or None.

    With `any_host`, any host name is accepted. A page whose name resolves to this machine (DNS rebinding) then passes,
    so the application must require a password that browsers do not send automatically.
    """
    headers = Headers(scope=scope)
    if not any_host and not names_this_machine(headers.getlist("host")):
        return 421, REQUIRED_HOST
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return OTHER_PAGE
    # Browsers send the origin of a request. Links to the page are allowed anywhere.
    is_opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not is_opened:
        return OTHER_PAGE
    return None
