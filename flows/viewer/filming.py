"""Films of stored episodes as sheets of pictures, which the page steps through beside the data.

`metaloom video` makes them, in a separate process: it computes with what the run names, asks for trust as the
command does, and takes OpenGL and a crash of the simulator with it.
"""

import io
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from PIL import Image

from metaloom.flows.errors import UsageError
from metaloom.pipeline.shown import printable
from metaloom.storage import Run

MOST_FRAMES = 120
"""In a sheet; of longer episodes every second, third, ... step is shown."""
KEPT = 12
SECONDS = 300
_COLUMNS = 10
_SIZE = "320x240"


@dataclass(frozen=True)
class Sheet:
    """Pictures of an episode side by side, from left to right and from top to bottom.

    Attributes:
        image: Image data as WebP.
        frames: Number of pictures.
        columns: Pictures in a row.
        every: Steps from one picture to the next.
        told: Message of the command: do observations agree with the stored ones?
    """

    image: bytes
    frames: int
    columns: int
    every: int
    told: str


class FilmStudio:
    """Makes sheets, one at a time, and keeps the last ones."""

    def __init__(self) -> None:
        self._sheets: dict[tuple[object, ...], Sheet] = {}
        self._lock = Lock()

    def sheet(self, run: Run, iteration: int, step: int, task: int, episode: int, length: int) -> Sheet:
        """Film an episode, unless that was done."""
        key = (run.info["sha256"], run.location, iteration, step, task, episode)
        with self._lock:
            if key not in self._sheets:
                every = -(-length // (MOST_FRAMES - 1))
                at = ["--task", str(task), "--episode", str(episode), "--step", str(step)]
                self._sheets[key] = _film(f"{run.location}@{iteration}", at, every)
                while len(self._sheets) > KEPT:
                    del self._sheets[next(iter(self._sheets))]
            return self._sheets[key]


def _film(run_at: str, chosen: list[str], every: int) -> Sheet:
    with tempfile.TemporaryDirectory(prefix="metaloom-view-") as folder:
        out = Path(folder) / "film.webp"
        # Safe path: the working folder is searched last, for modules that the run names and the user trusts.
        command = [sys.executable, "-P", "-m", "metaloom.flows.cli", "video", run_at, *chosen]
        command += ["--out", str(out), "--size", _SIZE, "--every", str(every)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            raise UsageError(f"found no film of {run_at} after {SECONDS} s; `metaloom video` waits longer") from None
        if not out.exists():
            raise UsageError(printable(done.stderr.strip() or f"`metaloom video` ended with code {done.returncode}"))
        with Image.open(out) as pictures:
            frames, (width, height) = int(getattr(pictures, "n_frames", 1)), pictures.size
            columns = min(_COLUMNS, frames)
            sheet = Image.new("RGB", (width * columns, height * -(-frames // columns)))
            for n in range(frames):
                pictures.seek(n)
                sheet.paste(pictures.convert("RGB"), (n % columns * width, n // columns * height))
    image, told = io.BytesIO(), done.stdout.strip().splitlines()
    sheet.save(image, "WEBP", quality=80)
    return Sheet(image.getvalue(), frames, columns, every, printable(told[-1] if told else ""))
