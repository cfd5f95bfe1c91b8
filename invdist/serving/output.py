"""Output folders that appear complete or not at all, and tables written into them.

Results are written into `NAME.partial/`, then `manifest.json`, and the folder is renamed to `NAME/`. An object store
(`s3://`) cannot rename a folder: there the files are written in place, and the manifest, written last, completes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Literal, Protocol, get_args

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from invdist.runtime.errors import UserError
from invdist.runtime.files import UNFINISHED, Folder, describe_os_error
from invdist.serving.run import TrainedRun

MANIFEST = "manifest.json"
_JOB = "job.json"

Format = Literal["parquet", "csv", "jsonl"]
FORMATS: tuple[str, ...] = get_args(Format)


class OutputFolder:
    """A new folder of results at a path or URI, as a context manager.

    `job` says what is being made, as plain data; it becomes part of the manifest, the file `manifest`. After an error
    nothing is left, unless `resume`: then `NAME.partial` stays, and the same `job` continues it.
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
        self._final, self._manifest, self._resume = Folder.at(self.where), manifest, resume
        self.folder = Folder.at(f"{self.where}.partial") if self._final.local else self._final
        self.job = json.loads(json.dumps(job))

    def __enter__(self) -> OutputFolder:
        check_free(self.where, self._manifest)
        with self._clear_errors():
            interrupted = self._interrupted_job()
            if self._resume and interrupted is not None:
                self._check_same_job(interrupted)
            else:
                self.folder.remove()
                self.folder.make()
                self.write(_JOB, json.dumps(self.job, indent=1).encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if not self._resume:
            with suppress(OSError):
                self.folder.remove()
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            kept = f"; {kept_parts(self.folder)}" if self._resume else "; nothing was kept"
            raise UserError(f"cannot write {self.where}: {describe_os_error(error)}{kept}") from error

    def create(self, name: str) -> Any:
        """A file to write, as a context manager; it has its name only after the block ended without an error."""
        return self.folder.create(name)

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        with self.create(name) as file:
            file.write(content)

    def finish(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Writes the manifest, which is also returned, and gives the folder its name."""
        content = {**self.job, **manifest}
        for name in self.folder.files():
            if name.endswith(UNFINISHED):  # of a writer that was killed
                self.folder.filesystem.delete_file(f"{self.folder.path}/{name}")
        self.write(self._manifest, (json.dumps(content, indent=1) + "\n").encode())
        if self.folder.local:
            check_free(self.where, self._manifest)
            os.rename(self.folder.path, self._final.path)
        self._final.filesystem.delete_file(f"{self._final.path}/{_JOB}")
        return content

    def _interrupted_job(self) -> dict[str, Any] | None:
        """The job that was interrupted here, None if the place is free; `UserError` if something else is there."""
        path = self.folder.path
        if self.folder.local and os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
            kind = "a symbolic link" if os.path.islink(path) else "a file"
            raise UserError(
                f"{self.folder} is {kind}, but the output is written there first: remove it or choose another --output"
            )
        files = self.folder.files()
        if _JOB in files:
            with self.folder.open(_JOB) as file, suppress(ValueError):
                job = json.loads(file.read())
                if isinstance(job, dict):
                    return job
        if files or self.folder.folders():
            raise UserError(
                f"{self.folder} is not an unfinished output, but the output is written there first: "
                "remove it or choose another --output"
            )
        return None

    def _check_same_job(self, interrupted: dict[str, Any]) -> None:
        names = self.job.keys() | interrupted.keys()
        other = sorted(name for name in names if self.job.get(name) != interrupted.get(name))
        if other:
            raise UserError(
                f"{self.folder} holds an unfinished output that was made with another {', '.join(other)}: "
                "repeat the command that began it, or remove that folder"
            )

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
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


def kept_parts(folder: Folder) -> str:
    """What to do about an unfinished output that can be continued."""
    return f"finished parts are kept in {folder}: repeat the command to continue, or remove that folder"


class TableWriter(Protocol):
    """Takes the tables of one file in turn."""

    def write_table(self, table: pa.Table) -> None:
        """Adds rows."""
        ...


@contextmanager
def table_writer(file: Any, schema: pa.Schema, kind: str) -> Iterator[TableWriter]:
    """A writer of tables with this schema into an open file; the file is complete when the block ends."""
    if kind == "parquet":
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            yield writer
    elif kind == "csv":
        with pacsv.CSVWriter(file, schema) as writer:
            yield writer
    else:
        yield _JsonLines(file)


class _JsonLines:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write_table(self, table: pa.Table) -> None:
        lines = (json.dumps(row, ensure_ascii=False) for row in table.to_pylist())
        self._file.write("".join(f"{line}\n" for line in lines).encode())


def write_tables(
    run: TrainedRun,
    where: str,
    name: str,
    kind: str,
    schema: pa.Schema,
    tables: Iterator[pa.Table],
    about: Callable[[], dict[str, Any]] = dict,
    progress: Callable[[int], None] = lambda rows: None,
) -> dict[str, Any]:
    """Streams tables into the new folder `where` as `NAME.KIND` with a manifest, which is returned.

    `about` is called at the end for what else the manifest should say; `progress` with the rows written so far.
    """
    job = {
        "kind": f"invdist {name}",
        "checkpoint": run.about_checkpoint(),
        "dataset": run.dataset.fingerprint,
    }
    with OutputFolder(where, job) as output:
        rows = 0
        with output.create(f"{name}.{kind}") as file, table_writer(file, schema, kind) as writer:
            for table in tables:
                writer.write_table(table)
                rows += len(table)
                progress(rows)
        return output.finish({"run": str(run.folder), "file": f"{name}.{kind}", "rows": rows, **about()})
