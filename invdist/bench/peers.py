"""Labeled interactions/s from files to weights on one core: this trainer, and what others train the same model with.

All have the same interactions, model, batch size and learning rate, one thread each, and take turns on one core:

  invdist            a run of `method: none`, which streams its shards in every epoch
  invdist_ig         a run of `method: ig`, with one sampled interaction for each of training-test
  recbole            RecBole 1.2 with its own trainer, loader and NeuMF (a GMF written for it); --recbole
  torch_loop         DataLoader, nn.Embedding(sparse=True) and SparseAdam, whole batches by index
  torch_loop_by_row  the same with DataLoader(TensorDataset, shuffle=True), as most people write it
  torchrec           TorchRec's TrainPipelineSparseDist with a fused optimizer (SGD: FBGEMM has no Adam on CPUs)
  three_copies       the inverse gradient as in the authors' code, with three deep copies of the model

The peers have all interactions in memory before their clock starts. `gmf` and `neumf` are at the first batch size of
each, `gmf_8192` is at another one. Figures are medians of turns of one epoch, or of as many
as take a quarter of `--seconds`; those of peers end after `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from invdist.bench import _recbole
from invdist.bench._contest import contest, rows_per_s
from invdist.bench._data import movielens_or_like
from invdist.config.registry import BACKBONES
from invdist.data.dataset import Dataset
from invdist.data.schema import TRAINING_LABELED
from invdist.runtime.errors import UserError
from invdist.runtime.progress import ProgressLine

_PEERS = ("invdist_ig", "torch_loop", "torch_loop_by_row", "torchrec", "three_copies")
_ABSENT = "not asked for: --recbole installs RecBole into an environment of its own (minutes, 1.6 GB) and compares"
GOALS = {
    "gmf": {"recbole": 2.5, "torch_loop": 1.5},
    "gmf_8192": {"torchrec": 3.0},
    "neumf": {"recbole": 1.5, "torch_loop": 1.5},
}
"""How many times the rows/s of a peer this trainer should have."""
IG_EPOCH_GOAL = 1.35


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench peers`."""
    parser.add_argument("--data", metavar="DIR", help="a prepared data set (default: MovieLens-1M, or one of its size)")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["gmf:1024", "gmf:8192", "neumf:1024"],
        metavar="MODEL:BATCH",
        help="backbones and batch sizes (default: gmf:1024 gmf:8192 neumf:1024)",
    )
    parser.add_argument("--peers", nargs="*", choices=_PEERS, default=_PEERS, help="which of them (default: all)")
    parser.add_argument("--dim", type=int, default=32, help="k of the paper")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each that count")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="longest turn of a peer; the shortest is a quarter of it"
    )
    parser.add_argument(
        "--recbole",
        nargs="?",
        const=str(_recbole.DEFAULT_FOLDER),
        metavar="DIR",
        help=f"compare with RecBole too, installed into DIR if it is not there ({_recbole.DEFAULT_FOLDER})",
    )


def run(args: argparse.Namespace) -> dict[str, object]:
    """Rows/s by case and trainer, and how many times those of each peer this trainer has."""
    cases = [_case(text) for text in args.cases]
    if args.rounds < 1 or args.dim < 4 or args.dim % 4 or args.seconds <= 0:
        raise UserError("--rounds must be at least 1, --dim a multiple of 4, --seconds above 0")
    figures: dict[str, Any] = {}
    ratios: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary, ProgressLine() as progress:
        folder = Path(temporary)
        python = _recbole.environment(Path(args.recbole), progress.print) if args.recbole else None
        data, source = movielens_or_like(args.data, folder)
        dataset = Dataset.open(data)
        figures |= {"data": source, "interactions": sum(dataset.rows[split] for split in TRAINING_LABELED)}
        figures |= {"rounds": args.rounds, "load": list(os.getloadavg())}
        files = _as_atomic_files(dataset, folder / "recbole") if python else None
        for model, batch in cases:
            settings = {"model": model, "batch": batch, "dim": args.dim, "seconds": args.seconds}
            here = json.dumps({**settings, "data": data})
            names = ("invdist", *args.peers)
            commands = {name: [sys.executable, "-m", "invdist.bench._contestants", name, here] for name in names}
            if python:
                there = json.dumps({**settings, "files": str(files)})
                commands["recbole"] = [python, "-I", _recbole.__file__, there]
            name = model if model not in figures else f"{model}_{batch}"
            answers = contest(commands, args.rounds, folder, lambda text, name=name: progress.show(f"{name}: {text}"))
            speeds = {peer: rows_per_s(turns) for peer, turns in answers.items()}
            figures[name] = {**speeds, "recbole": speeds.get("recbole")}
            ratios[name] = {peer: speeds["invdist"] / speed for peer, speed in speeds.items() if peer != "invdist"}
    figures["times_peers"] = ratios
    figures["ig_epoch_vs_none"] = {name: of["invdist_ig"] for name, of in ratios.items() if "invdist_ig" in of}
    return figures if args.recbole else {**figures, "absent": {"recbole": _ABSENT}}


def _case(text: str) -> tuple[str, int]:
    model, _, batch = text.partition(":")
    if model not in BACKBONES.names() or not batch.isdecimal() or not int(batch):
        raise UserError(
            f"--cases {text}: expected MODEL:BATCH, such as gmf:1024; models: {', '.join(BACKBONES.names())}"
        )
    return model, int(batch)


def _as_atomic_files(dataset: Dataset, folder: Path) -> Path:
    """The same training interactions as RecBole reads them; it wants other splits too, and gets a few rows."""
    import pyarrow as pa
    import pyarrow.csv

    folder.mkdir()
    training = pa.concat_tables([dataset.read(split) for split in TRAINING_LABELED])
    names = {"user": "user_id:token", "item": "item_id:token", "label": "label:float"}
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    for split, rows in (("train", training), ("valid", training[:100]), ("test", training[:100])):
        with open(folder / f"{folder.name}.{split}.inter", "wb") as file:
            file.write("\t".join(names.values()).encode() + b"\n")  # the writer would quote these
            pyarrow.csv.write_csv(rows.select(list(names)), file, options)
    return folder
