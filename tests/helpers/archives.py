"""Archives that tests unpack."""

import tarfile
from pathlib import Path


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive of ours, with the filter that later versions of Python warn without; 3.11.3 has none."""
    with tarfile.open(archive) as content:
        content.extraction_filter = getattr(tarfile, "data_filter", None)
        content.extractall(folder)
