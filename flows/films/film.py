"""Pictures side by side under their captions, written as a film."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from metaloom.flows.errors import ExtraMissing, UsageError
from metaloom.pipeline.types import Array
from metaloom.storage.errors import system_errors
from metaloom.storage.unfinished import unfinished_folder

FORMATS = (".gif", ".webp", ".mp4", ".png")
"""Formats of a film; .png is its last picture."""
_INK, _PAPER, _BAR = (30, 30, 30), (255, 255, 255), 26
_NARROWEST = 400
"""Pixels that captions need."""


@dataclass(frozen=True)
class Panel:
    """A picture of a film.

    Attributes:
        picture: Pixels [height, width, 3] uint8.
        above, below: Captions.
    """

    picture: Array
    above: str
    below: str


def check_film_file(out: Path, option: str = "--out") -> None:
    """Refuse a file that no film can be written to, before anything is drawn."""
    if out.suffix.lower() not in FORMATS:
        raise UsageError(f"{option} {out}: found {out.suffix or 'no ending'}; required one of {', '.join(FORMATS)}")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{option} {out}: found no folder {out.absolute().parent}; required one that exists")
    if out.is_dir():
        raise UsageError(f"{option} {out}: found a folder; required a file, which may exist")
    if out.suffix.lower() == ".mp4":
        _mp4_writer()


def write_film(frames: Iterable[Sequence[Panel]], out: Path, fps: float, caption: str) -> None:
    """Write frames, each of the same number of panels, to a file that appears whole or not at all."""
    suffix = out.suffix.lower()
    with (
        system_errors(out, required="room and permission to write a film", action="Free space, or choose another file"),
        unfinished_folder(out.absolute().parent, out.stem) as folder,
    ):
        unfinished = folder / f"film{suffix}"
        pictures = (compose(panels, caption) for panels in frames)
        if suffix == ".mp4":
            # Every player shows this pixel format, and none of ours is a photograph.
            with _mp4_writer()(unfinished, fps=fps, codec="libx264", pixelformat="yuv420p", macro_block_size=2) as film:
                for picture in pictures:
                    film.append_data(np.asarray(picture))
        elif suffix == ".png":
            *_, last = pictures
            last.save(unfinished)
        else:
            _write_animation(pictures, unfinished, fps)
        unfinished.replace(out)


def compose(panels: Sequence[Panel], caption: str) -> Image.Image:
    """Draw one picture: the film's caption, and the panels side by side under it."""
    # Every pixel becomes several where captions would be wider than all pictures.
    times = -(-_NARROWEST // sum(panel.picture.shape[1] for panel in panels))
    pictures = [panel.picture.repeat(times, axis=0).repeat(times, axis=1) for panel in panels]
    widths = [picture.shape[1] for picture in pictures]
    height = max(picture.shape[0] for picture in pictures)
    image = Image.new("RGB", (sum(widths) + 4 * (len(panels) - 1), height + 3 * _BAR), _PAPER)
    canvas, left = ImageDraw.Draw(image), 0
    _write(canvas, caption, 0, image.width, 0)
    for panel, picture, width in zip(panels, pictures, widths, strict=True):
        _write(canvas, panel.above, left, width, _BAR)
        image.paste(Image.fromarray(picture), (left, 2 * _BAR))
        _write(canvas, panel.below, left, width, 2 * _BAR + height)
        left += width + 4
    # Video codecs want even sides.
    return image.crop((0, 0, image.width + image.width % 2, image.height + image.height % 2))


def _write(canvas: ImageDraw.ImageDraw, text: str, left: int, width: int, top: int) -> None:
    """Write a line in the middle of a bar, as large as it fits."""
    for size in (15, 13, 11, 9):
        font = ImageFont.load_default(size)
        if canvas.textlength(text, font=font) <= width - 8:
            break
    canvas.text((left + width / 2, top + _BAR / 2), text, fill=_INK, font=font, anchor="mm")


def _write_animation(pictures: Iterable[Image.Image], out: Path, fps: float) -> None:
    rest = iter(pictures)
    if out.suffix == ".gif":
        # Without dithering, which changes every pixel of a film from frame to frame, and is three times as large.
        few: dict[str, Any] = {"method": Image.Quantize.FASTOCTREE, "dither": Image.Dither.NONE}
        rest = (picture.quantize(128, **few) for picture in pictures)
    first = next(rest)
    # Both formats count whole milliseconds, GIF tens of them, and what is shown for less is slowed down by viewers.
    duration = max(round(1000 / fps), 20)
    options: dict[str, Any] = {"quality": 80} if out.suffix == ".webp" else {"optimize": False}
    first.save(out, save_all=True, append_images=rest, duration=duration, loop=0, **options)


def _mp4_writer() -> Any:
    try:
        import imageio_ffmpeg  # pyright: ignore[reportMissingImports]
        from imageio import get_writer  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ImportError:
        raise ExtraMissing("video", "imageio with imageio-ffmpeg") from None
    try:
        imageio_ffmpeg.get_ffmpeg_exe()  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError:
        # Its wheels bring one for most machines only.
        raise UsageError("an .mp4 needs ffmpeg; found none. Install it, or write a .webp or .gif") from None
    return get_writer  # pyright: ignore[reportUnknownVariableType]
