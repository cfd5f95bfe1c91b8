"""Exports a trained model for use without invdist: tensors, a card that describes them, and a scoring program."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from invdist import config as configs
from invdist.config.plain_yaml import parse
from invdist.data.dataset import Dataset
from invdist.models.frozen import FrozenModel
from invdist.runtime.install import installed
from invdist.serving.output import OutputFolder
from invdist.serving.run import TrainedRun
from invdist.serving.tables import CheckpointTables
from invdist.training.checkpoint.manifest import DTYPE_NAMES
from invdist.training.history import METRICS_FILE, History

CARD = "card.json"
TENSORS = "model.safetensors"
PROGRAM = "scorer.pt2"
ROW_PROGRAM = "row_scorer.pt2"
_PIECE_BYTES = 64 << 20

_USAGE = (
    "import torch; scorer = torch.export.load('scorer.pt2').module(); "
    "logits = scorer(user, item)  # int64 indices of one length; users.parquet and items.parquet map raw ids to them"
)
_ROW_USAGE = (
    "import torch; scorer = torch.export.load('row_scorer.pt2').module(); "
    "logits = scorer(user_rows, item_rows)  # float32 [n, columns] each, rows of the tables in model.safetensors by "
    "index; users.parquet and items.parquet map raw ids to indices"
)


def export(run: TrainedRun, where: str, *, whole: bool = True) -> dict[str, Any]:
    """Writes the new folder `where` and returns its card.

    `model.safetensors`: the embeddings of users and items and the dense weights. `row_scorer.pt2`: a `torch.export`ed
    program from rows of users and of items to logits, which needs only torch. `scorer.pt2`: the same with both tables
    in it, from indices to logits; not without `whole`, because whoever makes or uses it must hold the tables.
    `users.parquet`, `items.parquet`: raw ids by index. `card.json`: describes all this, written last. Tables and ids
    are copied piece by piece.
    """
    run.checkpoint.verify()
    with OutputFolder(where, {"format": "invdist export", "version": 1}, manifest=CARD) as output:
        files = {
            TENSORS: _write(output, TENSORS, _tensors(run.tables)),
            ROW_PROGRAM: _write_program(output, ROW_PROGRAM, row_scoring_program(run.tables)),
            **({PROGRAM: _write_program(output, PROGRAM, scoring_program(run.model))} if whole else {}),
            "users.parquet": _write_ids(output, run.dataset, "users"),
            "items.parquet": _write_ids(output, run.dataset, "items"),
        }
        usage = _USAGE if whole else _ROW_USAGE
        return output.finish({**_card(run), "files": files, "usage": usage})


def scoring_program(model: FrozenModel) -> torch.export.ExportedProgram:
    """The model as a program of torch operators: int64 `[n]` users and items to float32 `[n]` logits."""
    # Two tensors: the same one twice would become a single input of the program.
    examples = (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    pairs = torch.export.Dim("pairs")
    return torch.export.export(model, examples, dynamic_shapes=({0: pairs}, {0: pairs}))


def row_scoring_program(tables: CheckpointTables) -> torch.export.ExportedProgram:
    """The backbone alone as a program: rows of users and of items, float32 `[n, columns]` each, to `[n]` logits."""
    examples = (torch.zeros(2, tables.columns), torch.zeros(2, tables.columns))
    pairs = torch.export.Dim("pairs")
    return torch.export.export(tables.backbone, examples, dynamic_shapes=({0: pairs}, {0: pairs}))


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


def _write_program(output: OutputFolder, name: str, program: torch.export.ExportedProgram) -> dict[str, Any]:
    # torch writes only to a local file, but the output may be a URI.
    folder = Path(tempfile.mkdtemp(prefix="invdist-export-"))
    try:
        torch.export.save(program, folder / name)
        with (folder / name).open("rb") as file:
            return _write(output, name, iter(lambda: file.read(8 << 20), b""))
    finally:
        shutil.rmtree(folder)


def _tensors(tables: CheckpointTables) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file with both tables and the dense weights, read as they are written."""
    dense = {f"backbone.{name}": value.contiguous() for name, value in tables.backbone.state_dict().items()}
    shapes = {name: (rows, tables.columns) for name, rows in tables.rows_of.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    for name, value in dense.items():
        start, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    yield len(text).to_bytes(8, "little") + text
    step = max(1, _PIECE_BYTES // (4 * tables.columns))
    for name, rows in tables.rows_of.items():
        for first in range(0, rows, step):
            yield _bytes(tables.rows(name, first, min(first + step, rows)))
    yield from map(_bytes, dense.values())


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _write_ids(output: OutputFolder, dataset: Dataset, entity: str) -> dict[str, Any]:
    """The data set's own file of raw ids by index."""
    name = dataset.manifest["files"][entity]["file"]
    with dataset.filesystem.open_input_stream(f"{dataset.root}/{name}") as file:
        return _write(output, f"{entity}.parquet", iter(lambda: file.read(8 << 20), b""))
