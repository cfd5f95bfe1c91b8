"""`prepare` on Ray: where the data set and the unfinished work are, and how an interrupted call goes on."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from invdist.data.dataset import Dataset
from invdist.data.prepare.cleaning import Progress
from invdist.data.prepare.onto import fixed_labeling
from invdist.data.prepare.options import Kind, Options
from invdist.data.prepare.parallel.driver import ParallelPreparation, Sizes
from invdist.data.prepare.parallel.growing import ParallelGrowth
from invdist.data.prepare.parallel.stages import Stages
from invdist.data.prepare.pipeline import RULES, check_classes, check_without_onto, no_progress, open_log
from invdist.data.prepare.since_until import as_a_day
from invdist.data.schema import MANIFEST
from invdist.runtime.errors import UserError
from invdist.runtime.files import UNFINISHED, Folder, describe_os_error, exclusive
from invdist.runtime.paths import AnyPath, path_as_given

_JOB = "job.json"
_PLAN = 1
"""Raised when tasks of another version could not go on with the files of this one."""


def prepare_on_ray(
    options: Kind,
    inputs: Sequence[str | AnyPath],
    output: str | Path,
    workers: int | None = None,
    progress: Progress = no_progress,
    sizes: Sizes = Sizes(),  # noqa: B008
    measured: dict[str, dict[str, Any]] | None = None,
    onto: str | Path | None = None,
) -> dict[str, Any]:
    """Writes the data set of a raw log to the new folder `output`, a path or URI, by tasks on the Ray of this process.

    Gives its manifest; it is what `prepare_log` gives. At most `workers` processes work at a time, by default one for
    each CPU of the cluster; 0: this one, without Ray. Unfinished work is in `OUTPUT.partial`, on the same filesystem,
    and the same call goes on with it. All nodes must reach the inputs and the output. `onto` is the data set of the day
    before (docs/daily.md). `measured` gets `seconds` and `peak_memory` (of a process, in bytes) by stage.
    """
    if options.label_noise:
        raise UserError("label_noise is for studies of small logs: prepare without --workers")
    log, output = open_log(options, inputs), str(output)
    base, labeling = None, options.labeling()
    if onto is None:
        check_without_onto(options)
    else:
        base = Dataset.open(str(onto))
        labeling = fixed_labeling(labeling, base)
    if workers is None:
        import ray

        workers = int(ray.cluster_resources().get("CPU", 1))
    work, final = Folder.at(f"{output.rstrip('/')}.partial"), Folder.at(output)
    if final.files() or final.folders():
        if final.local or MANIFEST in final.files() or _JOB not in work.files():
            raise UserError(f"{output} is already there; choose another --output or remove it first")
    elif final.local and os.path.lexists(final.path):
        raise UserError(f"{output} is already there; choose another --output or remove it first")
    try:
        with _claimed(work, _identity(options, [path_as_given(path) for path in inputs], sizes, base)):
            target = work.child("dataset") if final.local else final
            stages = Stages(work, workers, progress)
            try:
                day = target if base is None else work.child("day")
                with as_a_day() if base else contextlib.nullcontext():
                    manifest = ParallelPreparation(log, labeling, options, stages, day, sizes).run()
                    if base is not None:
                        _finish(day, manifest)
                        today = Dataset.open(day.path, "fast", day.filesystem)
                        manifest = ParallelGrowth(base, today, options, stages, target, sizes).run()
                    check_classes(manifest, options)
            except UserError:
                # Going on would end here again. A task that is being ended may still write a file.
                with contextlib.suppress(OSError):
                    work.remove()
                    if not final.local:
                        final.remove()
                raise
            _finish(target, manifest)
            if final.local:
                os.rename(target.path, final.path)
            work.remove()
            if measured is not None:
                measured.update(seconds=stages.seconds, peak_memory=stages.peak_memory)
            return manifest
    except OSError as error:
        kept = f"what is done is kept in {work}, and the same command goes on"
        raise UserError(f"cannot write {output}: {describe_os_error(error)}; {kept}") from error


def _identity(options: Options, inputs: Sequence[AnyPath], sizes: Sizes, base: Dataset | None) -> dict[str, Any]:
    files = [file for path in inputs for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    found = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    kind = type(options).__name__
    content = {"plan": _PLAN, "rules": RULES, "kind": kind, "sizes": vars(sizes), "inputs": found}
    content["onto"] = base.fingerprint if base else None
    return json.loads(json.dumps({**content, "options": options.model_dump(mode="json")}))


@contextlib.contextmanager
def _claimed(work: Folder, job: dict[str, Any]) -> Iterator[None]:
    """Inside, the work folder is ours: new, or of the same job that was interrupted."""
    work.make()
    with exclusive(Path(work.path)) if work.local else contextlib.nullcontext():
        if _JOB in work.files():
            with work.open(_JOB) as file:
                before = json.loads(file.read())
            other = sorted(name for name in job.keys() | before.keys() if job.get(name) != before.get(name))
            if other:
                raise UserError(
                    f"{work} has the unfinished work of another prepare (other {', '.join(other)}): "
                    "remove it or choose another --output"
                )
        elif set(work.files()) - {".lock"} or work.folders():
            raise UserError(f"{work} is not of an unfinished prepare: remove it or choose another --output")
        else:
            with work.create(_JOB) as file:
                file.write(json.dumps(job).encode())
        yield


def _finish(target: Folder, manifest: dict[str, Any]) -> None:
    """Removes what killed writers have left, flushes the rest, and writes the manifest: the data set is complete."""
    for folder in (target, *(target.child(name) for name in target.folders())):
        for name in folder.files():
            if name.endswith(UNFINISHED):
                folder.filesystem.delete_file(f"{folder.path}/{name}")
        folder.flush()
    with target.create(MANIFEST) as file:
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
