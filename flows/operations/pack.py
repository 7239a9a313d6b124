"""`pack`: packs old iterations into a few files."""

from metaloom.flows.arguments import checked
from metaloom.flows.operations.options import RunArgument
from metaloom.flows.results.disk import Packed
from metaloom.flows.runs import folder_of
from metaloom.flows.views.status import STATUS
from metaloom.storage import open_writer


@checked
def pack(run: RunArgument) -> Packed:
    """Pack old iterations into a few files.

    Their contents do not change. All complete iterations except the newest are packed. Training also packs the oldest
    500 iterations whenever 600 are unpacked.

    Example: `metaloom pack first`

    Args:
        run: Run to pack.
    """
    with open_writer(folder_of(run)) as writer:
        return Packed(tuple(writer.pack(STATUS.counted("iterations"))))
