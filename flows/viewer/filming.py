"""Videos of stored episodes as sheets of frames for the page.

Made by `metaloom video` in a separate process, which imports the run's modules with the command's trust check and
contains OpenGL and crashes of the simulator.
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
"""Maximum frames of a sheet; of longer episodes every second, third, ... step is shown."""
KEPT = 12
SECONDS = 300
_COLUMNS = 10
_SIZE = "320x240"


@dataclass(frozen=True)
class Sheet:
    """Frames of an episode in one image, row by row.

    Attributes:
        image: Image data as WebP.
        frames: Number of frames.
        columns: Frames per row.
        every: Steps between frames.
        told: Message of the command about agreement with stored observations.
    """

    image: bytes
    frames: int
    columns: int
    every: int
    told: str


class FilmStudio:
    """Makes sheets, one at a time, and caches the last ones."""

    def __init__(self) -> None:
        self._sheets: dict[tuple[object, ...], Sheet] = {}
        self._lock = Lock()

    def sheet(self, run: Run, iteration: int, step: int, task: int, episode: int, length: int) -> Sheet:
        """Return the sheet of an episode, from the cache if possible."""
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
        # Safe path: the working folder is searched last, only for trusted modules of the run.
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
