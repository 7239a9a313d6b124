"""A page in headless Chromium with a mouse and a keyboard, by the browser's DevTools protocol."""

import base64
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from browsing import BROWSER, SETTLED
from websockets.sync.client import ClientConnection, connect

_PATIENCE = 60.0


class Page:
    """A page that has loaded.

    `said` is what the browser had to say of it: messages, refusals, exceptions. `asked` has the URL of everything that
    it asked for, of windows that it opened, and of pages that it went to.
    """

    def __init__(self, socket: ClientConnection):
        self._socket = socket
        self._sent = 0
        self.said: list[str] = []
        self.asked: list[str] = []

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """What the browser answers to a command of its DevTools protocol."""
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while (message := json.loads(self._socket.recv(_PATIENCE))).get("id") != self._sent:
            self._note(message)
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page, as JSON has it."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Value of an expression as soon as it is true."""
        deadline = time.monotonic() + _PATIENCE
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)
        return value

    def resize(self, width: int, height: int) -> None:
        """Give the page a window of so many pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def move(self, x: float, y: float, *, pressed: bool = False) -> None:
        """Move the mouse to a place of the window, with or without its left button pressed."""
        self._mouse("mouseMoved", x, y, button="left" if pressed else "none", buttons=int(pressed))

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press at one place and release at another."""
        self.move(*start)
        self._mouse("mousePressed", *start, button="left", buttons=1, clickCount=1)
        for share in (0.25, 0.5, 0.75, 1.0):
            self.move(*(a + share * (b - a) for a, b in zip(start, end, strict=True)), pressed=True)
        self._mouse("mouseReleased", *end, button="left", clickCount=1)

    def click(self, x: float, y: float, *, times: int = 1) -> None:
        """Click once, or twice for a double-click."""
        self.move(x, y)
        for count in range(1, times + 1):
            self._mouse("mousePressed", x, y, button="left", buttons=1, clickCount=count)
            self._mouse("mouseReleased", x, y, button="left", clickCount=count)

    def press(self, key: str) -> None:
        """Press and release a key, by the name that the page sees."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " ")}[key]
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def violations(self) -> list[str]:
        """Rules of accessibility that the page breaks, each with its first elements, by axe-core."""
        self.value(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8") + ";1")
        nodes = "v.nodes.slice(0, 3).map(n => n.html.slice(0, 200) + ' ' + n.failureSummary)"
        return self.value(f"axe.run().then(r => r.violations.map(v => [v.id, ...{nodes}].join('\\n')))")

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what the window shows as PNG, or the whole page."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _mouse(self, kind: str, x: float, y: float, **params: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **params)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            told = json.dumps(message["params"])
            if SETTLED not in told:
                self.said.append(told)
        elif message.get("method") == "Network.requestWillBeSent":
            self.asked.append(message["params"]["request"]["url"])
        elif message.get("method") in ("Page.windowOpen", "Page.frameRequestedNavigation"):
            self.asked.append(message["params"]["url"])


@contextmanager
def open_page(
    address: str, folder: Path, *, width: int = 1280, height: int = 900, hovers: bool = False
) -> Iterator[Page]:
    """A page of this machine in a window of its own, which ends with the block; `hovers`: its mouse can hover."""
    assert BROWSER is not None
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
        f"--user-data-dir={folder}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--remote-debugging-address=127.0.0.1", "--remote-debugging-port=0",
        *(["--blink-settings=primaryHoverType=2,availableHoverTypes=2"] if hovers else []),
    ]  # fmt: skip
    with subprocess.Popen([BROWSER, *options, "about:blank"], stderr=subprocess.DEVNULL) as browser:
        try:
            with connect(_page_socket(folder / "DevToolsActivePort"), max_size=None) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    page.send(f"{domain}.enable")
                page.resize(width, height)
                page.send("Page.navigate", url=address)
                page.wait("location.href != 'about:blank' && document.readyState == 'complete'")
                yield page
        finally:
            browser.terminate()


def _page_socket(written: Path) -> str:
    """Address of the first page's socket, which the browser's own interface tells."""
    deadline = time.monotonic() + _PATIENCE
    while not (written.exists() and "\n" in written.read_text()):
        assert time.monotonic() < deadline, "the browser did not start"
        time.sleep(0.05)
    port = written.read_text().split("\n")[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=_PATIENCE) as answer:
        pages = [target for target in json.load(answer) if target["type"] == "page"]
    return pages[0]["webSocketDebuggerUrl"]
