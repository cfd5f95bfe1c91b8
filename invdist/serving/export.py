"""Exports a trained model for use without invdist: tensors, a card that describes them, and a scoring program."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch

from invdist import config as configs
from invdist.config.plain_yaml import parse
from invdist.data.prepare.ids import id_table
from invdist.models.frozen import FrozenModel
from invdist.runtime.install import installed
from invdist.serving.output import OutputFolder
from invdist.serving.run import TrainedRun
from invdist.training.history import METRICS_FILE, History

CARD = "card.json"
TENSORS = "model.safetensors"
PROGRAM = "scorer.pt2"

_USAGE = (
    "import torch; scorer = torch.export.load('scorer.pt2').module(); "
    "logits = scorer(user, item)  # int64 indices of one length; users.parquet and items.parquet map raw ids to them"
)


def export(run: TrainedRun, where: str) -> dict[str, Any]:
    """Writes the new folder `where` and returns its card.

    `model.safetensors`: the embeddings of users and items and the dense weights. `scorer.pt2`: a `torch.export`ed
    program from any number of (user, item) indices to logits, which needs only torch. `users.parquet`,
    `items.parquet`: raw ids by index. `card.json`: describes all this, written last.
    """
    tensors = {name: value.contiguous() for name, value in run.model.state_dict().items()}
    with OutputFolder(where, {"format": "invdist export", "version": 1}, manifest=CARD) as output:
        files = {
            TENSORS: _write(output, TENSORS, [safetensors.torch.save(tensors)]),
            PROGRAM: _write_program(output, run.model),
            "users.parquet": _write_table(output, "users.parquet", id_table(run.users.raw)),
            "items.parquet": _write_table(output, "items.parquet", id_table(run.items.raw)),
        }
        return output.finish({**_card(run), "files": files, "usage": _USAGE})


def scoring_program(model: FrozenModel) -> torch.export.ExportedProgram:
    """The model as a program of torch operators: int64 `[n]` users and items to float32 `[n]` logits."""
    # Two tensors: the same one twice would become a single input of the program.
    examples = (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    pairs = torch.export.Dim("pairs")
    return torch.export.export(model, examples, dynamic_shapes=({0: pairs}, {0: pairs}))


def _card(run: TrainedRun) -> dict[str, Any]:
    config, dataset = run.config, run.dataset
    final = (History.read(run.folder).final if (run.folder / METRICS_FILE).is_file() else None) or {}
    if Path(str(final.get("checkpoint"))).name != Path(run.checkpoint.path).name:
        final = {}  # those are the metrics of another checkpoint
    return {
        "run": run.folder.name,
        "method": config.method,
        "model": config.model,
        "metrics": {split: final.get(split) for split in ("valid", "test")},
        "checkpoint": run.about_checkpoint(),
        "dataset": {
            "fingerprint": dataset.fingerprint,
            "users": dataset.users,
            "items": dataset.items,
            "summary": dataset.summary,
        },
        "config": parse(configs.dump(config).encode(), "settings"),
        "made_with": {name: installed(name) for name in ("invdist", "torch")},
    }


def _write(output: OutputFolder, name: str, content: Iterable[bytes | memoryview]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with output.create(name) as file:
        for piece in content:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _write_program(output: OutputFolder, model: FrozenModel) -> dict[str, Any]:
    # torch writes only to a local file, but the output may be a URI.
    folder = Path(tempfile.mkdtemp(prefix="invdist-export-"))
    try:
        torch.export.save(scoring_program(model), folder / PROGRAM)
        with (folder / PROGRAM).open("rb") as file:
            return _write(output, PROGRAM, iter(lambda: file.read(8 << 20), b""))
    finally:
        shutil.rmtree(folder)


def _write_table(output: OutputFolder, name: str, table: pa.Table) -> dict[str, Any]:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return _write(output, name, [sink.getvalue().to_pybytes()])
