"""Possible contents of a disk after a power cut, rebuilt from the recorded file operations of a process.

The disk of the model promises what POSIX promises and no more. What was written to a file is safe once that file was
synced, a name once its folder was; renames are atomic. Of everything else any part may be there or not, in any order.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = 0

ADVERSARIES = ("nothing", "names", "data", "torn", "random")
"""Remains of all that was not synced: nothing, all names, all data, all names with half of the data, any part.

A sixth, "everything", is a kill without a power cut.
"""


@dataclass(frozen=True)
class Names:
    """Names that appear in folders (with an inode) or vanish from them (None), in one atomic step."""

    entries: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True)
class Data:
    """Bytes written to a file at a position; None cuts the file there."""

    inode: int
    position: int
    content: bytes | None


@dataclass(frozen=True)
class Sync:
    """A file's content, or a folder's names, are on the disk."""

    inode: int


Operation = Names | Data | Sync


@dataclass
class Disk:
    """Records what happens below a folder, once `watched` stands in for the functions of `os`."""

    root: Path
    operations: list[Operation] = field(default_factory=list)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    _open: dict[int, tuple[int, int]] = field(default_factory=dict)
    _inodes: Iterator[int] = field(default_factory=lambda: iter(range(1, 10**9)))

    def watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function of `os` that also records what it does."""

        def call(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            getattr(self, f"_on_{name}")(result, *arguments)
            return result

        return call

    def _find(self, path: Any) -> tuple[int, str] | None:
        """The folder and the name that a path stands for; None outside the root."""
        try:
            parts = Path(path).relative_to(self.root).parts
        except ValueError:
            return None
        folder = ROOT
        for part in parts[:-1]:
            folder = self.folders[folder][part]
        return folder, parts[-1] if parts else ""

    def _name(self, *entries: tuple[int, str, int | None]) -> None:
        for folder, name, inode in entries:
            if inode is None:
                self.folders[folder].pop(name, None)
            else:
                self.folders[folder][name] = inode
        self.operations.append(Names(entries))

    def _on_open(self, descriptor: int, path: Any, flags: int, *_: Any) -> None:
        self._open.pop(descriptor, None)
        found = self._find(path)
        if found is None:
            return
        folder, name = found
        inode = self.folders[folder].get(name) if name else ROOT
        if inode is None:
            inode = next(self._inodes)
            self._name((folder, name, inode))
        self._open[descriptor] = (inode, 0)

    def _on_write(self, written: int, descriptor: int, content: Any) -> None:
        if descriptor in self._open:
            inode, position = self._open[descriptor]
            self.operations.append(Data(inode, position, bytes(content[:written])))
            self._open[descriptor] = (inode, position + written)

    def _on_pwrite(self, written: int, descriptor: int, content: bytes, position: int) -> None:
        if descriptor in self._open:
            self.operations.append(Data(self._open[descriptor][0], position, content[:written]))

    def _on_ftruncate(self, _: None, descriptor: int, size: int) -> None:
        if descriptor in self._open:
            self.operations.append(Data(self._open[descriptor][0], size, None))

    _on_truncate = _on_ftruncate

    def _on_fsync(self, _: None, descriptor: int) -> None:
        if descriptor in self._open:
            self.operations.append(Sync(self._open[descriptor][0]))

    def _on_mkdir(self, _: None, path: Any, *__: Any) -> None:
        if (found := self._find(path)) is not None and found[1]:
            inode = next(self._inodes)
            self.folders[inode] = {}
            self._name((*found, inode))

    def _on_replace(self, _: None, source: Any, target: Any) -> None:
        old, new = self._find(source), self._find(target)
        if old and new:
            self._name((*new, self.folders[old[0]][old[1]]), (*old, None))

    _on_rename = _on_replace

    def _on_link(self, _: None, source: Any, target: Any) -> None:
        old, new = self._find(source), self._find(target)
        if old and new:
            self._name((*new, self.folders[old[0]][old[1]]))

    def _on_unlink(self, _: None, path: Any, *__: Any) -> None:
        if (found := self._find(path)) is not None:
            self._name((*found, None))

    _on_rmdir = _on_unlink

    def after_power_cut(self, length: int, adversary: str) -> dict[str, bytes | None]:
        """Return what is on the disk if the power fails after so many operations: files by path, None for folders."""
        happened = self.operations[:length]
        synced: dict[int, int] = {op.inode: i for i, op in enumerate(happened) if isinstance(op, Sync)}
        dice = random.Random(f"{length} {adversary}")
        folders: dict[int, dict[str, int]] = {inode: {} for inode in self.folders}
        files: dict[int, bytearray] = {}
        for i, op in enumerate(happened):
            match op:
                case Names(entries):
                    if any(synced.get(folder, -1) > i for folder, _, _ in entries) or _name_survives(adversary, dice):
                        _apply_names(folders, entries)
                case Data(inode):
                    content = files.setdefault(inode, bytearray())
                    _apply_data(content, op, "all" if synced.get(inode, -1) > i else _data_fate(adversary, dice))
        return dict(_tree(folders, files, ROOT, ""))

    def safe(self, length: int, folder: str, name: str) -> bool:
        """Tell if a name in a folder of the root must have survived a power cut after so many operations."""
        inode = self.folders[ROOT][folder]
        appeared = [
            i
            for i, op in enumerate(self.operations[:length])
            if isinstance(op, Names) and any(entry[:2] == (inode, name) and entry[2] for entry in op.entries)
        ]
        return bool(appeared) and Sync(inode) in self.operations[appeared[0] + 1 : length]


def build(content: dict[str, bytes | None], root: Path) -> None:
    """Make folders and files as described."""
    root.mkdir()
    for path, data in content.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


def _name_survives(adversary: str, dice: random.Random) -> bool:
    return adversary in ("names", "torn", "everything") or (adversary == "random" and dice.random() < 0.5)


def _data_fate(adversary: str, dice: random.Random) -> str:
    if adversary == "random":
        return dice.choice(("all", "none", "half", "zeros"))
    return {"data": "all", "everything": "all", "torn": "half"}.get(adversary, "none")


def _apply_names(folders: dict[int, dict[str, int]], entries: tuple[tuple[int, str, int | None], ...]) -> None:
    for folder, name, inode in entries:
        if inode is None:
            folders[folder].pop(name, None)
        else:
            folders[folder][name] = inode


def _apply_data(file: bytearray, op: Data, fate: str) -> None:
    if fate == "none":
        return
    if op.content is None:
        del file[op.position :]
        return
    half = len(op.content) // 2
    kept = {"all": op.content, "half": op.content[:half], "zeros": op.content[:half] + bytes(len(op.content) - half)}
    file.extend(bytes(max(0, op.position - len(file))))
    file[op.position : op.position + len(kept[fate])] = kept[fate]


def _tree(
    folders: dict[int, dict[str, int]], files: dict[int, bytearray], folder: int, path: str
) -> Iterator[tuple[str, bytes | None]]:
    for name, inode in sorted(folders[folder].items()):
        if inode in folders:
            yield path + name, None
            yield from _tree(folders, files, inode, f"{path}{name}/")
        else:
            yield path + name, bytes(files.get(inode, b""))
