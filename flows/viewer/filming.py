"""Videos of stored episodes as sheets of frames for the page.

`metaloom video` makes them in a separate process, which checks trust before it imports the run's modules, and keeps
crashes of OpenGL or the simulator out of the server.
"""

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock

from PIL import Image

from metaloom.flows.errors import UsageError
from metaloom.pipeline.shown import printable
from metaloom.storage import Run

MOST_FRAMES = 120  # maximum number of frames per sheet; longer episodes are shown at every second, third, ... step
KEPT = 12
SECONDS = 300
_COLUMNS = 10
_ONE_AT_A_TIME = Lock()
_SIZE = "320x240"


def sheet(run: Run, iteration: int, step: int, task: int, episode: int, length: int) -> tuple[bytes, Mapping[str, str]]:
    """Return an episode's frames as one WebP image, row by row, and HTTP headers that describe the image.

    The headers contain the number of frames, frames per row, steps between frames, and the command's message about how
    well the observations agree with the stored ones. Videos are made one at a time, and recent ones are cached.
    """
    chosen = ("--task", str(task), "--episode", str(episode), "--step", str(step))
    with _ONE_AT_A_TIME:
        return _film(run.info["sha256"], f"{run.location}@{iteration}", chosen, -(-length // (MOST_FRAMES - 1)))


@lru_cache(KEPT)
def _film(identity: str, run_at: str, chosen: tuple[str, ...], every: int) -> tuple[bytes, Mapping[str, str]]:
    with tempfile.TemporaryDirectory(prefix="metaloom-view-") as folder:
        out = Path(folder) / "film.webp"
        # With -P, the working directory is searched last, and only for the run's trusted modules.
        command = [sys.executable, "-P", "-m", "metaloom.flows.cli", "video", run_at, *chosen]
        command += ["--out", str(out), "--size", _SIZE, "--every", str(every)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            raise UsageError(f"no video of {run_at} after {SECONDS} s; `metaloom video` waits longer") from None
        if not out.exists():
            raise UsageError(printable(done.stderr.strip() or f"`metaloom video` ended with code {done.returncode}"))
        with Image.open(out) as pictures:
            frames, (width, height) = int(getattr(pictures, "n_frames", 1)), pictures.size
            columns = min(_COLUMNS, frames)
            whole = Image.new("RGB", (width * columns, height * -(-frames // columns)))
            for n in range(frames):
                pictures.seek(n)
                whole.paste(pictures.convert("RGB"), (n % columns * width, n // columns * height))
    image, printed = io.BytesIO(), done.stdout.strip().splitlines() or [""]
    whole.save(image, "WEBP", quality=80)
    about = {"X-Frames": str(frames), "X-Columns": str(columns), "X-Every": str(every)}
    return image.getvalue(), about | {"X-Told": json.dumps(printable(printed[-1]))}
