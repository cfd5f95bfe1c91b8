"""Folders of results that are whole or not there.

Results are written into `NAME.partial/`, each file under its name only when it is complete, then `manifest.json`, and
the folder is renamed to `NAME/`. A filesystem of objects (`s3://`) cannot rename a folder: there the files lie in their
place and the manifest, last, is what makes them whole.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder, describe_os_error

MANIFEST = "manifest.json"
_JOB = "job.json"
_UNFINISHED = ".unfinished"


class Output:
    """A new folder of results at a path or URI.

    `job` says what is being made, as plain data; it becomes part of the manifest, the file `manifest`. What an
    interrupted job of the same `job` left is continued if `resume`; otherwise, and by default, it is thrown away.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        job: dict[str, Any],
        *,
        resume: bool = False,
        manifest: str = MANIFEST,
    ) -> None:
        self.where = os.fspath(where).rstrip("/")
        final = Folder.at(self.where)
        check_free(self.where, manifest)
        self.folder = Folder.at(f"{self.where}.partial") if final.local else final
        self._final, self._manifest = final, manifest
        self.job = json.loads(json.dumps(job))
        with self._disk():
            left = self._left()
            if left is None and (self.folder.files() or self.folder.folders()):
                raise UserError(f"{self.folder} is in the way: the output is written there first; remove it")
            if resume and left is not None:
                self._check_same_job(left)
            else:
                self.folder.remove()
                self.folder.make()
                self.write(_JOB, json.dumps(self.job, indent=1).encode())

    @contextmanager
    def create(self, name: str) -> Iterator[pa.NativeFile]:
        """A file to write, which has its name only after the block ended well."""
        with self._disk(), complete_file(self.folder, name) as file:
            yield file

    def write(self, name: str, content: bytes) -> None:
        """A small file."""
        with self.create(name) as file:
            file.write(content)

    def finish(self, manifest: dict[str, Any]) -> None:
        """Writes the manifest and gives the folder its name."""
        with self._disk():
            for name in self.folder.files():
                if name.endswith(_UNFINISHED):  # of a writer that was killed
                    self.folder.filesystem.delete_file(f"{self.folder.path}/{name}")
            self.write(self._manifest, (json.dumps({**self.job, **manifest}, indent=1) + "\n").encode())
            if self.folder.local:
                check_free(self.where, self._manifest)
                os.rename(self.folder.path, self._final.path)
            self._final.filesystem.delete_file(f"{self._final.path}/{_JOB}")

    def _left(self) -> dict[str, Any] | None:
        """The job that was interrupted here."""
        if _JOB not in self.folder.files():
            return None
        with self.folder.open(_JOB) as file:
            return json.loads(file.read())

    def _check_same_job(self, left: dict[str, Any]) -> None:
        other = sorted(name for name in self.job.keys() | left.keys() if self.job.get(name) != left.get(name))
        if other:
            raise UserError(
                f"{self.folder} holds an unfinished output that was made with another {', '.join(other)}: "
                "repeat the command that began it, or remove that folder"
            )

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"cannot write {self.where}: {describe_os_error(error)}") from error


def check_free(where: str | os.PathLike[str], manifest: str = MANIFEST) -> None:
    """`UserError` if something is at `where` already."""
    folder = Folder.at(where)
    if folder.local and os.path.lexists(folder.path):
        raise UserError(f"{os.fspath(where)} is already there; choose another --output or remove it first")
    if not folder.local and manifest in folder.files():
        raise UserError(f"{os.fspath(where)} already holds a finished output; choose another --output")


@contextmanager
def complete_file(folder: Folder, name: str) -> Iterator[pa.NativeFile]:
    """A file to write, which has its name only after the block ended well. Objects appear when they are closed."""
    if not folder.local:
        with folder.create(name) as file:
            yield file
        return
    # A name of its own: the worker of a driver that was killed may still write the same file.
    unfinished = f"{name}.{uuid.uuid4().hex[:12]}{_UNFINISHED}"
    with folder.create(unfinished) as file:
        yield file
    os.replace(f"{folder.path}/{unfinished}", f"{folder.path}/{name}")
