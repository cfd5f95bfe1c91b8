"""invdist from Python: the commands as functions, and `Run`, a trained run.

    import invdist

    invdist.prepare_dataset("synthetic", "data/small")               # makes a data set
    run = invdist.train_model({"data": {"path": "data/small"}})      # trains, as `invdist train` does
    run.metrics["test"]["auc"]
    run.history.to_pandas()                                          # one row per epoch
    run.plot_directions()                                            # the direction of every update
    run.annotate(calibrate=True)                                     # soft labels of the unclear exposures
    run.recommend(k=10, users=[17, 42])

Tables are pyarrow tables: use `.to_pandas()` or `.to_pylist()`. They are built in memory; for large outputs use the
commands, which stream to files.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invdist.runtime.errors import UserError
from invdist.runtime.paths import AnyPath, path_at

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import pyarrow as pa

    from invdist.config import Config
    from invdist.data.dataset import Dataset
    from invdist.serving.inputs import MatchedPairs
    from invdist.serving.recommendation import UnknownUser
    from invdist.serving.run import TrainedRun
    from invdist.serving.scoring import Unknown
    from invdist.training.history import History


def prepare_dataset(
    kind: str,
    output: str | Path,
    inputs: str | Path | Sequence[str | Path] = (),
    onto: str | Path | None = None,
    workers: int | None = None,
    **options: Any,
) -> Dataset:
    """Turns a raw log into the data set `output` and opens it.

    `kind` is one of `invdist prepare`'s (ml-1m, kuairand, microvideo, ratings, synthetic), `inputs` its files and
    `options` its options: `prepare_dataset("ratings", "data/mine", "log.csv", positive_from=4)`. `onto` is the data
    set of the day before. With `workers`, so many processes on Ray share the work.
    """
    from invdist.data.dataset import Dataset
    from invdist.data.prepare.options import build_options
    from invdist.data.prepare.pipeline import prepare_log

    paths = [inputs] if isinstance(inputs, str | Path) else inputs
    built = build_options(kind, options)
    if workers is None:
        prepare_log(built, paths, output, onto=onto)
    else:
        from invdist.data.prepare.parallel.on_ray import prepare_on_ray
        from invdist.training.ray_backend import connected

        if onto is not None:
            raise UserError("onto works in one process only: leave workers out")
        with connected(workers) if workers else contextlib.nullcontext():
            prepare_on_ray(built, paths, output, workers)
    return Dataset.open(str(output))


def train_model(config: str | Path | Mapping[str, Any] | Config, *overrides: str, show: bool = True) -> Run:
    """Trains to the end and returns the run: the same as `invdist train`.

    `config` is a YAML file, a mapping such as `{"data": {"path": "data/small"}, "method": "ig"}`, or a `Config`;
    `overrides` are `key=value` settings. Training happens in another process, which uses the Ray cluster that
    RAY_ADDRESS names, or a private one; Ctrl-C saves and stops it. Its output is printed unless `show` is False.
    Raises `UserError` if it fails.
    """
    from invdist import config as configs

    if isinstance(config, str | Path):
        settings = configs.load(config, overrides)
    elif isinstance(config, Mapping):
        settings = configs.from_mapping(config, overrides)
    else:
        settings = configs.from_mapping(_as_mapping(config), overrides)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        file.write_text(configs.dump(settings), encoding="utf-8")
        return _trained(["--config", str(file)], show)


def open_run(path: str | AnyPath, *overrides: str, checkpoint: str | int = "best") -> Run:
    """Opens a run that was trained before; `checkpoint` is `best`, `last` or a step.

    Pass `data.path=FOLDER` as an override if its data set has moved.
    """
    return Run(path, *overrides, checkpoint=checkpoint)


class Run:
    """A trained run: its metrics and history, and the use of its model, which is loaded when first needed."""

    def __init__(self, path: str | AnyPath, *overrides: str, checkpoint: str | int = "best") -> None:
        self.path = path_at(path)
        self._overrides, self._checkpoint = list(overrides), checkpoint
        self.metrics  # noqa: B018 - fails at once for a folder that is not a run

    def __repr__(self) -> str:
        auc = (self.metrics.get("test") or {}).get("auc")
        return f"Run({str(self.path)!r}{'' if auc is None else f', test AUC {auc:.4f}'})"

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Metrics of the best epoch by split (`valid`, `test`); empty until the run has finished."""
        final = self._history.final or {}
        return {split: final[split] for split in ("valid", "test") if final.get(split)}

    @property
    def history(self) -> pa.Table:
        """One row per epoch: `epoch`, `loss`, `rows_per_s`, `valid.auc`, `directions.inverse`, `seconds_by.pull`..."""
        import pyarrow as pa

        from invdist.training.history import table

        rows = [{k: v for k, v in row.items() if not isinstance(v, list)} for row in table(self._history.epochs)]
        names = dict.fromkeys(name for row in rows for name in row if name != "event")
        return pa.table({name: [row.get(name) for row in rows] for name in names})

    def plot_directions(self) -> go.Figure:
        """A plotly figure: the training-test loss of every inverse-gradient step, marked direct, pass or inverse."""
        from invdist.report.figures import direction_timeline

        figure = direction_timeline(self._history)
        if figure is None:
            raise UserError(f"{self.path}: no step of this run chose a direction (method {self._history.method})")
        return figure

    def annotate(
        self,
        pairs: Any = None,
        *,
        threshold: float = 0.5,
        calibrate: bool = False,
        unknown: Unknown = "null",
    ) -> pa.Table:
        """Soft labels: `user`, `item`, `score`, `w1`, `w0`, `label`, `confidence`, `known`, as from `invdist annotate`.

        `pairs` is a table (pyarrow, a data frame, a mapping) with the raw ids in columns `user` and `item`; None means
        the unclear exposures of the run's data set. There is one row for each pair, in order. `calibrate` chooses the
        threshold on half of the validation rows. `unknown` is for pairs whose user or item the data set does not have:
        `null` (no score), `prior` (the log-odds of the training labels) or `drop` (no row).
        """
        import pyarrow as pa

        from invdist.serving.annotation import Annotator
        from invdist.serving.calibration import calibrate as calibrated
        from invdist.serving.inputs import UnclearPairs
        from invdist.serving.scoring import Scorer

        opened = self._opened
        if calibrate:
            threshold = calibrated(opened.model, opened.dataset).threshold
        annotator = Annotator(Scorer.of(opened, unknown), threshold)
        if pairs is not None:
            return annotator.table(self._pairs(pairs))
        source = UnclearPairs(opened.dataset)
        read = (found for part in source.parts for found in source.read(part, opened.users, opened.items))
        return pa.concat_tables([annotator.schema().empty_table(), *map(annotator.table, read)])

    def recommend(
        self,
        k: int = 10,
        users: Sequence[Any] | None = None,
        *,
        seen: Sequence[str] = ("train", "training_test"),
        unknown: UnknownUser = "null",
    ) -> pa.Table:
        """The `k` best items of users (raw ids; None: all): `user`, `rank`, `item`, `score`, best first.

        Each user comes once, in the order given. Items that a user has in the splits `seen` are left out. A user that
        the data set does not have gets one row without an item, or with `unknown="drop"` none.
        """
        import pyarrow as pa

        from invdist.serving.recommendation import AskedUsers, recommendations

        opened = self._opened
        asked = None if users is None else AskedUsers(_raw_ids("user", users), opened.users)
        schema, tables = recommendations(opened, k, asked, seen, unknown)
        return pa.concat_tables([schema.empty_table(), *tables])

    def grow(self, *overrides: str, show: bool = True) -> Run:
        """Trains a new run that goes on from this one on newer data, as `invdist train --from`, and returns it.

        `overrides` are `key=value` settings, `data.path=FOLDER` among them: a data set made with
        `prepare_dataset(..., onto=...)`.
        """
        return _trained(["--from", str(self.path), *overrides], show)

    def score(self, pairs: Any, *, unknown: Unknown = "null") -> pa.Table:
        """Logits and probabilities of pairs: `user`, `item`, `score`, `probability`, `known`.

        `pairs` and `unknown` are those of `annotate`: there is one row for each pair, in order.
        """
        from invdist.serving.scoring import Scorer, ScoreTables

        return ScoreTables(Scorer.of(self._opened, unknown)).table(self._pairs(pairs))

    def export(self, output: str | AnyPath | None = None) -> AnyPath:
        """Writes tensors, card and scoring program, as `invdist export`; gives the folder (default: RUN/export)."""
        from invdist.serving.export import export

        where = path_at(output) if output is not None else self.path / "export"
        export(self._opened, str(where))
        return where

    @property
    def _history(self) -> History:
        from invdist.training.history import History

        return History.read(self.path)

    @cached_property
    def _opened(self) -> TrainedRun:
        from invdist.serving.run import open_run

        return open_run(self.path, self._overrides, self._checkpoint)

    def _pairs(self, given: Any) -> MatchedPairs:
        from invdist.serving.inputs import match

        try:
            user, item = (_raw_ids(name, given[name]) for name in ("user", "item"))
        except (KeyError, TypeError, IndexError) as error:
            raise UserError(f"pairs need columns 'user' and 'item' with raw ids: {error}") from error
        if len(user) != len(item):
            raise UserError(f"pairs need as many users as items, not {len(user)} and {len(item)}")
        return match(user, item, self._opened.users, self._opened.items)


def _trained(arguments: list[str], show: bool) -> Run:
    """The run of `python -m invdist.train` with `arguments`; `UserError` if it is not trained to the end."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        code, output = _run_python(["-m", "invdist.train", *arguments, "--result", str(result)], show)
        outcome = json.loads(result.read_text()) if result.exists() else {}
    if "run" in outcome and code == 0:
        return Run(outcome["run"])
    if "run" in outcome:
        raise UserError(f"training was stopped; continue with: python -m invdist.train --resume {outcome['run']}")
    raise UserError(outcome.get("error") or f"training failed (exit code {code}); the end of its output:\n{output}")


def _raw_ids(name: str, values: Any) -> pa.Array:
    """Raw ids from a list, an array, or a column of a table or data frame."""
    import pyarrow as pa

    from invdist.data.prepare.readers import canonical

    try:
        array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else pa.array(values)
    except pa.ArrowException as error:
        raise UserError(f"{name} ids must be all numbers or all text: {error}") from error
    return canonical(pa.RecordBatch.from_arrays([array], [name]), Path("pairs"))[name]


def _as_mapping(config: Config) -> Mapping[str, Any]:
    from invdist import config as configs
    from invdist.config.plain_yaml import parse

    return parse(configs.dump(config).encode(), "config")


def _run_python(arguments: list[str], show: bool) -> tuple[int, str]:
    """Runs this Python with `arguments`, printing its output as it comes; gives exit code and the last lines."""
    # The child imports the package from where this process did, installed or not.
    package = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-u", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,  # not inherited: a notebook shows what is printed here
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    last: deque[str] = deque(maxlen=50)
    try:
        for line in process.stdout:
            last.append(line)
            if show:
                print(line, end="", flush=True)
        return process.wait(), "".join(last)
    except BaseException:
        process.terminate()  # it saves first
        process.wait()
        raise
