"""Possible contents of a disk after a power cut, rebuilt from the recorded file operations of a process.

The disk of the model promises what POSIX promises and no more. What was written to a file is safe once that file was
synced, a name once its folder was; renames are atomic. Of everything else any part may be there or not, in any order.
"""

import builtins
import io
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = 0

ADVERSARIES = ("nothing", "names", "data", "torn", "last", "random")
"""Remains of all that was not synced: nothing, all names, all data, all names with half of the data, the last name with
all data, any part.

A seventh, "everything", is a kill without a power cut.
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
    """A file's content, or a folder's names, are on the disk; `site` is what asked for it, "file:function:line"."""

    inode: int
    site: str = ""


Operation = Names | Data | Sync


@dataclass
class Disk:
    """Records what happens below a folder."""

    root: Path
    operations: list[Operation] = field(default_factory=list)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    _open: dict[int, tuple[int, int]] = field(default_factory=dict)
    _inodes: Iterator[int] = field(default_factory=lambda: iter(range(1, 10**9)))

    @contextmanager
    def recording(self, write_points: ModuleType) -> Iterator[None]:
        """Record what this process does; nothing waits for the real disk."""
        opened, fsync = io.open, os.fsync
        os.fsync = lambda descriptor: None
        builtins.open = io.open = self._opening(opened)  # type: ignore[assignment]
        try:
            with write_points.writes_replaced(self._watched):
                yield
        finally:
            builtins.open = io.open = opened
            os.fsync = fsync

    def load(self) -> None:
        """Take what is there already for safe."""
        inodes: dict[int, int] = {}
        for folder, folders, names in os.walk(self.root):
            (parent, name) = self._find(folder) or (ROOT, "")
            inode = self.folders[parent][name] if name else ROOT
            for entry in folders:
                self._on_mkdir(None, Path(folder, entry))
            for entry in names:
                path = Path(folder, entry)
                known = inodes.get(path.stat().st_ino)
                found = inodes[path.stat().st_ino] = next(self._inodes) if known is None else known
                self._name((inode, entry, found))
                self.operations += [Data(found, 0, path.read_bytes()), Sync(found)]
            self.operations.append(Sync(inode))

    def without(self, site: str) -> "Disk":
        """The same, had a call in the code not synced."""
        kept = [op for op in self.operations if not (isinstance(op, Sync) and op.site == site)]
        return Disk(self.root, kept, self.folders)

    def killed(self, length: int, root: Path) -> "Disk":
        """Build what a process leaves that was killed after so many operations, none of which is safer for that."""
        disk = Disk(root, self.operations[:length], _inodes=self._inodes)
        for op in disk.operations:
            if isinstance(op, Names):
                for _, _, inode in op.entries:
                    if inode in self.folders:
                        disk.folders.setdefault(inode, {})
                _apply_names(disk.folders, op.entries)
        build(disk.after_power_cut(length, "everything"), root)
        return disk

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            options = {"dir_fd": named["dir_fd"]} if named.get("dir_fd") is not None else {}
            getattr(self, f"_on_{name}")(result, *arguments, **options)
            return result

        return call

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            # The log of what people are shown ("ab+") promises nothing.
            if not isinstance(file, str | Path) or mode == "ab+" or not {*mode} & {*"wxa+"} or self._find(file) is None:
                return original(file, mode, *arguments, **named)
            assert "+" not in mode, f"{file}: mode {mode} is not modelled"
            binary = io.BufferedWriter(_RecordedFile(self, file, mode.replace("b", "").replace("t", "")))
            return binary if "b" in mode else io.TextIOWrapper(binary, encoding="utf-8")

        return call

    def _find(self, path: Any, dir_fd: int | None = None) -> tuple[int, str] | None:
        """The folder and the name that a path stands for; None outside the root."""
        if dir_fd is not None:
            return (self._open[dir_fd][0], str(path)) if dir_fd in self._open else None
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

    def _on_open(self, descriptor: int, path: Any, flags: int, *_: Any, dir_fd: int | None = None) -> None:
        self._open.pop(descriptor, None)
        found = self._find(path, dir_fd)
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
            self.operations.append(Sync(self._open[descriptor][0], _site()))

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

    def _on_unlink(self, _: None, path: Any, *__: Any, dir_fd: int | None = None) -> None:
        if (found := self._find(path, dir_fd)) is not None:
            self._name((*found, None))

    _on_rmdir = _on_unlink

    def after_power_cut(self, length: int, adversary: str) -> dict[str, bytes | None]:
        """Return what is on the disk if the power fails after so many operations: files by path, None for folders."""
        happened = self.operations[:length]
        synced: dict[int, int] = {op.inode: i for i, op in enumerate(happened) if isinstance(op, Sync)}
        dice = random.Random(f"{length} {adversary}")
        names = ((i, op) for i, op in enumerate(happened) if isinstance(op, Names))
        last = max((i for i, op in names if not _is_safe(op, synced, i)), default=-1)
        folders: dict[int, dict[str, int]] = {inode: {} for inode in self.folders}
        files: dict[int, bytearray] = {}
        for i, op in enumerate(happened):
            match op:
                case Names(entries):
                    if _is_safe(op, synced, i) or _name_survives(adversary, dice, is_last=i == last):
                        _apply_names(folders, entries)
                case Data(inode):
                    content = files.setdefault(inode, bytearray())
                    _apply_data(content, op, "all" if synced.get(inode, -1) > i else _data_fate(adversary, dice))
        return dict(_tree(folders, files, ROOT, ""))

    def safe(self, length: int, folder: str, name: str) -> bool:
        """Tell if a name in a folder must have survived a power cut after so many operations."""
        parent, last = self._find(self.root / folder) or (ROOT, "")
        inode = self.folders[parent][last]
        appeared = [
            i
            for i, op in enumerate(self.operations[:length])
            if isinstance(op, Names) and any(entry[:2] == (inode, name) and entry[2] for entry in op.entries)
        ]
        later = self.operations[appeared[0] + 1 : length] if appeared else []
        return any(isinstance(op, Sync) and op.inode == inode for op in later)


def _site() -> str:
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or frame.f_code.co_name == "sync_folder":
        assert frame.f_back
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}:{frame.f_lineno}"


def build(content: dict[str, bytes | None], root: Path) -> None:
    """Make folders and files as described."""
    root.mkdir()
    for path, data in content.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


class _RecordedFile(io.FileIO):
    """A file opened by name, which does not go through the functions of `os`."""

    def __init__(self, disk: Disk, path: Any, mode: str) -> None:
        super().__init__(path, mode)
        self._disk = disk
        disk._on_open(self.fileno(), path, 0)
        if mode == "w":
            disk._on_ftruncate(None, self.fileno(), 0)
        disk._open[self.fileno()] = (disk._open[self.fileno()][0], os.fstat(self.fileno()).st_size)

    def write(self, content: Any) -> int:
        written = super().write(content)
        self._disk._on_write(written, self.fileno(), content)
        return written


def _is_safe(op: Names, synced: dict[int, int], i: int) -> bool:
    return any(synced.get(folder, -1) > i for folder, _, _ in op.entries)


def _name_survives(adversary: str, dice: random.Random, *, is_last: bool) -> bool:
    if adversary == "last":
        return is_last
    return adversary in ("names", "torn", "everything") or (adversary == "random" and dice.random() < 0.5)


def _data_fate(adversary: str, dice: random.Random) -> str:
    if adversary == "random":
        return dice.choice(("all", "none", "half", "zeros"))
    return {"data": "all", "last": "all", "everything": "all", "torn": "half"}.get(adversary, "none")


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
