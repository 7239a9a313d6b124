"""Pages in a real browser, where there is one."""

import shutil
import subprocess
from pathlib import Path

import pytest

# Has the address of this machine in the browser.
OTHER_HOST = "evil.example"
NAMES = f"MAP {OTHER_HOST} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
_INSTALLERS = {"apt-get": "apt-get install", "dnf": "dnf install", "zypper": "zypper install", "pacman": "pacman -S"}
INSTALL = (
    f"sudo {next((words for name, words in _INSTALLERS.items() if shutil.which(name)), 'apt-get install')} chromium"
)
NO_BROWSER = f"none of {', '.join(BROWSERS)} is installed; `{INSTALL}` brings one"
# plotly.js says it where margins for labels and legends have not settled after a few drawings; it draws all the same.
SETTLED = "Too many auto-margin redraws"
NEEDS_BROWSER = pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)


def look(address: str, folder: Path) -> tuple[str, list[str]]:
    """Markup of a page after its scripts have run, and what the browser had to say."""
    assert BROWSER is not None
    # No host but this one and `OTHER_HOST` has an address; scripts get ten seconds of a clock that waits for answers.
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1280,2000",
        f"--user-data-dir={folder}", f"--host-resolver-rules={NAMES}",
        "--virtual-time-budget=10000", "--enable-logging=stderr", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run([BROWSER, *options, address], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line and SETTLED not in line]
    return done.stdout, said
