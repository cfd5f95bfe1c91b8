"""Paths in object stores (`s3://bucket/runs/one`), with the few methods of `pathlib.Path` that are needed."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from invdist.runtime.errors import UserError

if TYPE_CHECKING:  # local paths do not need it, and its import takes a while
    import pyarrow as pa
    import pyarrow.fs as pafs


class Stat(NamedTuple):
    """What `pathlib.Path.stat` says of a file, as far as a store knows it."""

    st_size: int
    st_mtime_ns: int


class StorePath:
    """A file or folder of an object store. A file is written whole: it appears when it is closed."""

    def __init__(self, uri: str, filesystem: pafs.FileSystem | None = None) -> None:
        self._uri = uri.rstrip("/")
        self._filesystem = _filesystem(self._uri) if filesystem is None else filesystem
        self._path = self._uri.partition("://")[2].partition("?")[0]

    def __str__(self) -> str:
        return self._uri

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self._uri}/{name}", self._filesystem)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and self._uri == other._uri

    def __hash__(self) -> int:
        return hash(self._uri)

    def __lt__(self, other: StorePath) -> bool:
        return self._uri < other._uri

    @property
    def name(self) -> str:
        """The last part."""
        return PurePosixPath(self._path).name

    @property
    def suffix(self) -> str:
        """How the name ends, from its last dot on."""
        return PurePosixPath(self._path).suffix

    @property
    def suffixes(self) -> list[str]:
        """The ends of the name, each from a dot on."""
        return PurePosixPath(self._path).suffixes

    @property
    def parent(self) -> StorePath:
        """The folder that this is in."""
        return StorePath(self._uri.rpartition("/")[0], self._filesystem)

    def with_name(self, name: str) -> StorePath:
        """Another path in the same folder."""
        return self.parent / name

    def absolute(self) -> StorePath:
        """The same path."""
        return self

    def resolve(self) -> StorePath:
        """The same path."""
        return self

    def exists(self) -> bool:
        """Whether there is something."""
        return self._type() != "NotFound"

    def is_file(self) -> bool:
        """Whether there is a file."""
        return self._type() == "File"

    def is_dir(self) -> bool:
        """Whether there is a folder, or something below."""
        return self._type() == "Directory"

    def stat(self) -> Stat:
        """The size of a file, and when it was written."""
        info = self._info()
        return Stat(info.size or 0, info.mtime_ns or 0)

    def glob(self, pattern: str) -> list[StorePath]:
        """What is in this folder, the names of which match a pattern."""
        return [path for path in self._below(recursive=False) if fnmatchcase(path.name, pattern)]

    def rglob(self, pattern: str) -> list[StorePath]:
        """The same, of all folders below, too."""
        return [path for path in self._below(recursive=True) if fnmatchcase(path.name, pattern)]

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Makes the folder. Two processes may both do so: stores have no way to be first."""
        if not exist_ok and self.exists():
            raise FileExistsError(str(self))
        self._filesystem.create_dir(self._path, recursive=parents)

    def open(self, mode: str = "rb") -> pa.NativeFile:
        """The file, to read bytes from any position."""
        assert mode == "rb", mode
        return self._filesystem.open_input_file(self._path)

    def read_bytes(self) -> bytes:
        """All of the file."""
        with self.open() as file:
            return file.read()

    def read_text(self, encoding: str = "utf-8") -> str:
        """All of the file as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        """Replaces the file: a reader sees the old one or the whole new one."""
        with self._filesystem.open_output_stream(self._path) as file:
            file.write(content)

    def touch(self) -> None:
        """Makes an empty file."""
        self.write_bytes(b"")

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the file."""
        try:
            self._filesystem.delete_file(self._path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Removes the folder with all that is in it, if it is there."""
        if self.is_dir():
            self._filesystem.delete_dir(self._path)

    def _below(self, recursive: bool) -> list[StorePath]:
        import pyarrow.fs as pafs

        found = self._filesystem.get_file_info(pafs.FileSelector(self._path, recursive=recursive))
        start = len(self._path.rstrip("/")) + 1
        return [self / info.path[start:] for info in found]

    def _type(self) -> str:
        return self._info().type.name

    def _info(self) -> pafs.FileInfo:
        try:
            return self._filesystem.get_file_info(self._path)
        except OSError as error:
            raise UserError(f"cannot reach {self}: {error}") from error


def _filesystem(uri: str) -> pafs.FileSystem:
    from invdist.runtime.files import Folder

    return Folder.at(uri).filesystem


AnyPath = Path | StorePath


def path_at(where: str | os.PathLike[str] | StorePath) -> AnyPath:
    """The absolute path of a local file or folder, or the path of a URI."""
    return path_as_given(where).absolute()


def path_as_given(where: str | os.PathLike[str] | StorePath) -> AnyPath:
    """The path of a local file or folder, relative or not, or the path of a URI."""
    if isinstance(where, StorePath):
        return where
    text = os.fspath(where)
    return StorePath(text) if "://" in text else Path(text)
