"""Annotates parts on all workers of a Ray cluster, as one streaming Ray Data pipeline.

The model and the raw ids are put into Ray's object store once, and the workers of a node share that memory. Only the
numbers of parts go through the pipeline; rows go from the input to the output inside a worker.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from invdist.models.frozen import FrozenModel
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder
from invdist.runtime.process import configure_process
from invdist.serving.annotation import Annotator, PartAnnotator
from invdist.serving.inputs import InputPart, PairSource
from invdist.serving.scoring import Scorer


def annotate_on_ray(
    parts: Sequence[InputPart], source: PairSource, annotator: Annotator, folder: Folder, workers: int | None
) -> Iterator[int]:
    """Annotates parts on the Ray this process is connected to; gives the rows of each when it is done.

    At most `workers` processes work at a time, by default one for each CPU of the cluster. The input and the folder
    must be reachable from every node.
    """
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    present = int(ray.cluster_resources().get("CPU", 1))
    most = max(1, min(len(parts), workers or present, present))
    scorer = annotator.scorer
    model = scorer.model
    assert isinstance(model, FrozenModel), "workers that hold slices annotate by themselves"
    shared = ray.put(
        {
            "rows": (model.user.numpy(), model.item.numpy()),
            "backbone": model.backbone,
            "rest": (scorer.users, scorer.items, scorer.prior, scorer.unknown),
        }
    )
    done = ray.data.from_items([{"part": n} for n in range(len(parts))], override_num_blocks=len(parts)).map_batches(
        _Worker,
        fn_constructor_args=([shared], list(parts), source, annotator.threshold, str(folder.path), folder.filesystem),
        batch_size=1,
        num_cpus=1,
        concurrency=(1, most),
    )
    for row in done.iter_rows():
        if row["error"]:
            raise UserError(row["error"])
        yield row["rows"]


class _Worker:
    """A process with the model, which annotates the parts it is given."""

    def __init__(
        self,
        shared: list[Any],
        parts: list[InputPart],
        source: PairSource,
        threshold: float,
        path: str,
        filesystem: Any,
    ) -> None:
        import ray

        configure_process(threads=1)
        content: Any = ray.get(shared[0])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing here writes
            user, item = (torch.from_numpy(rows) for rows in content["rows"])
        scorer = Scorer(FrozenModel(user, item, content["backbone"]), *content["rest"])
        self._parts = parts
        self._work = PartAnnotator(source, Annotator(scorer, threshold), Folder(filesystem, path))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        rows, errors = [], []
        for number in batch["part"]:
            try:
                rows.append(self._work.annotate(self._parts[int(number)])["rows"])
                errors.append("")
            except UserError as error:
                # Returned, not raised: Ray would add its own traceback, and retry.
                rows.append(0)
                errors.append(str(error))
        return {"rows": rows, "error": errors}
