"""Folders on any filesystem, local paths and URIs such as `s3://bucket/runs` alike, through pyarrow.fs."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.fs as pafs

from invdist.runtime.errors import UserError

UNFINISHED = ".unfinished"
"""How the name of a file ends while it is being written; a killed process may leave one behind."""

_LOCK_FILE = ".lock"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


def is_plain_name(name: object) -> bool:
    """Whether `name` is one step down: no separator, no `..`, nothing hidden, nothing absolute."""
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None


def absolute(path: str) -> str:
    """A path that means the same in every process of a machine, wherever that works; a URI as it is."""
    return path if "://" in path else str(Path(path).absolute())


def describe_os_error(error: OSError) -> str:
    """What an operating-system error means for a person."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no room on the disk ({os.strerror(error.errno)})"
    return str(error)


@contextmanager
def replacing(path: str | os.PathLike[str], flush: bool = True) -> Iterator[Path]:
    """A free path beside `path` to write a file to, which becomes `path` when the block ends without an error.

    A reader sees the old file or the whole new one, never half of it. After an error nothing is left. Without `flush`
    that is so unless the machine itself stops.
    """
    final = Path(path)
    # A name of its own: two processes may write the same file.
    unfinished = final.with_name(f".{final.name[:50]}.{uuid.uuid4().hex[:12]}{UNFINISHED}")
    try:
        yield unfinished
        if flush:
            _flush(unfinished)
        os.replace(unfinished, final)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


class WholeWriter(Protocol):
    """A file that is always replaced as a whole."""

    def write_bytes(self, content: bytes) -> None:
        """Replaces the content."""
        ...


def write_atomically(path: str | os.PathLike[str] | WholeWriter, content: str | bytes) -> None:
    """Writes a small file (text as UTF-8) so that a reader sees the old one or the whole new one."""
    if not isinstance(path, str | os.PathLike):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_folder(output: str | os.PathLike[str]) -> Iterator[Path]:
    """A hidden folder beside `output` to write into, renamed to `output` when the block ends without an error.

    `UserError` if something is at `output` before or after. After an error nothing is left; a killed process leaves
    a folder named `.NAME.partial-...`.
    """
    final = Path(output)
    if os.path.lexists(final):
        raise UserError(f"{final} is already there; choose another --output or remove it first")
    partial = final.parent / f".{final.name[:50]}.partial-{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
        yield partial
        try:
            os.rename(partial, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise UserError(f"{final} appeared while it was being written; nothing was overwritten") from error
            raise
    except OSError as error:
        raise UserError(f"cannot write {final}: {describe_os_error(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def exclusive(folder: object) -> Iterator[None]:
    """Inside, no other process is in a block like this for the same local folder; `UserError` if one is already.

    The kernel holds the lock and takes it back when the process ends, however it ends. Where a filesystem has no
    locks the block goes on without, and so it does in an object store.
    """
    if not isinstance(folder, Path):
        yield
        return
    with open(folder / _LOCK_FILE, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is in use by another process: wait for it, or end it first") from None
        except OSError:
            pass
        yield


class Folder:
    """A folder that may not be there yet. Names given to its methods are plain: see `is_plain_name`.

    Symbolic links inside a local folder are never followed: they are not listed, so they cannot be read.
    """

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        self.filesystem = filesystem
        self.path = path.rstrip("/") or "/"
        self.local = isinstance(filesystem, pafs.LocalFileSystem)

    @classmethod
    def at(cls, where: str | os.PathLike[str]) -> Folder:
        """The folder at a local path or a URI."""
        text = os.fspath(where)
        if "://" not in text:
            return cls(pafs.LocalFileSystem(), os.path.abspath(text))
        try:
            return cls(*pafs.FileSystem.from_uri(text))
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"cannot reach {text}: {error}") from error

    def __str__(self) -> str:
        return self.path if self.local else f"{self.filesystem.type_name}:{self.path}"

    def child(self, name: str) -> Folder:
        """The folder `name` in this one."""
        return Folder(self.filesystem, self._inside(name))

    def parent(self) -> Folder:
        """The folder that this one is in."""
        return Folder(self.filesystem, self.path.rpartition("/")[0])

    def files(self) -> dict[str, int]:
        """Sizes in bytes of the files in this folder, by name; empty if it is not there."""
        return {i.base_name: i.size for i in self._entries() if i.type == pafs.FileType.File}

    def folders(self) -> list[str]:
        """Names of the folders in this folder."""
        return sorted(i.base_name for i in self._entries() if i.type == pafs.FileType.Directory)

    def open(self, name: str) -> pa.NativeFile:
        """A file to read, at any position."""
        return self.filesystem.open_input_file(self._inside(name))

    @contextmanager
    def create(self, name: str, flush: bool = True) -> Iterator[pa.NativeFile]:
        """A file to write, which has its name only after the block ended without an error.

        On a local disk it is flushed to the medium, too, unless `flush` is False. Objects of a store such as S3 appear
        when they are closed.
        """
        path = self._inside(name)
        if not self.local:
            with self.filesystem.open_output_stream(path) as file:
                yield file
            return
        with replacing(path, flush) as unfinished, self.filesystem.open_output_stream(str(unfinished)) as file:
            yield file

    def flush(self) -> None:
        """Has the disk keep the files of a local folder that were written without."""
        for name in self.files() if self.local else ():
            _flush(self._inside(name))

    def make(self) -> None:
        """Makes the folder and those above it, unless they are there."""
        self.filesystem.create_dir(self.path, recursive=True)

    def remove(self) -> None:
        """Removes the folder with all that is in it, if it is there."""
        if self.local:
            shutil.rmtree(self.path, ignore_errors=not os.path.isdir(self.path))
        elif self.filesystem.get_file_info(self.path).type == pafs.FileType.Directory:
            self.filesystem.delete_dir(self.path)

    def rename(self, name: str) -> Folder:
        """Gives the folder another name beside the present one, which must be free; local folders only."""
        assert self.local, self
        assert is_plain_name(name), name
        parent = os.path.dirname(self.path)
        target = Folder(self.filesystem, os.path.join(parent, name))
        _flush(self.path)
        os.rename(self.path, target.path)
        _flush(parent)
        return target

    def _inside(self, name: str) -> str:
        assert is_plain_name(name), name
        return f"{self.path}/{name}"

    def _entries(self) -> list[pafs.FileInfo]:
        entries = self.filesystem.get_file_info(pafs.FileSelector(self.path, allow_not_found=True))
        return [i for i in entries if not (self.local and os.path.islink(i.path))]


def _flush(path: str | os.PathLike[str]) -> None:
    """Asks the disk to keep what was written to a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
