"""What can go wrong with a stored run. Every message says where, what was found, what is required and what helps."""


class StoreError(Exception):
    """A run could not be read or written.

    Args:
        where: the file, folder or stage concerned.
        found: what is there.
        required: what must be there instead.
        action: what to do next.
    """

    def __init__(self, where: object, *, found: str, required: str, action: str) -> None:
        super().__init__(str(where), found, required, action)
        self.where = str(where)
        self.found = found
        self.required = required
        self.action = action

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; required: {self.required}. {self.action}"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling, and workers send errors home.
        return _rebuild, (type(self), self.where, self.found, self.required, self.action)


class RunNotFound(StoreError, FileNotFoundError):
    """No folder of that name."""


class NotARun(StoreError):
    """A folder, but not one that holds a run."""


class InvalidRunName(StoreError, ValueError):
    """A name that no run can have."""


class RunExists(StoreError, FileExistsError):
    """A run would have been created over something that is already there."""


class RunLocked(StoreError):
    """Another process writes this run."""


class FencedOut(StoreError):
    """This writer lost the run to a later one; nothing it writes counts any more."""


class StageMissing(StoreError, LookupError):
    """A stage's output was asked for that is not stored."""


class StageExists(StoreError):
    """A stage's output was given twice; outputs are immutable."""


class LayoutMismatch(StoreError, ValueError):
    """A batch does not fit the arrays that earlier iterations of the run created, or cannot be stored at all."""


class DamagedRun(StoreError):
    """A stored file is missing, cut short or changed."""


class IncompatibleFormat(StoreError):
    """The run was written in a format that this version does not read."""


def _rebuild(kind: type[StoreError], where: str, found: str, required: str, action: str) -> StoreError:
    return kind(where, found=found, required=required, action=action)
