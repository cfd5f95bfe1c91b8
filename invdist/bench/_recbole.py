"""RecBole as a contestant, in an environment of its own: `environment` makes it, the script is run by its Python.

RecBole 1.2.1 asks for a Ray that invdist cannot use, and works with NumPy 1 only. The script must not import invdist.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REQUIREMENTS = (
    "torch==2.13.0",  # as invdist's own
    "recbole==1.2.1",
    "numpy==1.26.4",  # Ray 2.6, which RecBole imports, uses names that NumPy 2 has removed
    "pandas==2.3.3",
    "scipy==1.15.3",
    "setuptools<81",  # Ray 2.6 imports pkg_resources
)
DEFAULT_FOLDER = Path.home() / ".cache" / "invdist" / "recbole"
_STAMP = "invdist-recbole.json"


def environment(folder: Path, show: Callable[[str], None]) -> str:
    """The Python of the environment with RecBole in `folder`; it is made if it is not there (minutes, 1.6 GB)."""
    python, stamp = folder / "bin" / "python", folder / _STAMP
    wanted = json.dumps(REQUIREMENTS)
    if stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    show(f"installing RecBole into {folder}")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    # torch first: with another request it would be a build with gigabytes of CUDA.
    for wishes in (REQUIREMENTS[:1], REQUIREMENTS):
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wishes]
        subprocess.run(command, check=True, stdout=sys.stderr)
    stamp.write_text(wanted)  # last: an interrupted install is repeated
    return str(python)


def main() -> None:
    """Trains by RecBole's own trainer and loader, in turns (see `_contest.py`)."""
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    trainer, loader = _prepared(settings)
    rows = len(loader.dataset)
    batches = _forever(loader)
    print('"ready"', file=answers, flush=True)
    for _ in sys.stdin:
        turn = _Turn(batches, rows, settings["seconds"])
        started = time.perf_counter()
        trainer._train_epoch(turn, 0)
        print(json.dumps([turn.rows, time.perf_counter() - started]), file=answers, flush=True)


class _Turn:
    """Batches until an epoch is done or the time is up, as RecBole's trainer iterates over them."""

    shuffle = False

    def __init__(self, batches: Iterator[Any], most_rows: int, most_seconds: float) -> None:
        self._batches, self._most_rows = batches, most_rows
        self._end, self.rows = time.perf_counter() + most_seconds, 0

    def __iter__(self) -> Iterator[Any]:
        while self.rows < self._most_rows and time.perf_counter() < self._end:
            batch = next(self._batches)
            self.rows += len(batch)
            yield batch


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _prepared(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Trainer and loader of RecBole for the interactions in `settings["files"]`, which have no negatives sampled."""
    from recbole.config import Config  # pyright: ignore[reportMissingImports]
    from recbole.data import create_dataset, data_preparation  # pyright: ignore[reportMissingImports]
    from recbole.model.abstract_recommender import GeneralRecommender  # pyright: ignore[reportMissingImports]
    from recbole.model.general_recommender import NeuMF  # pyright: ignore[reportMissingImports]
    from recbole.trainer import Trainer  # pyright: ignore[reportMissingImports]
    from recbole.utils import InputType, init_seed  # pyright: ignore[reportMissingImports]
    from torch import nn

    class GMF(GeneralRecommender):
        """RecBole has none of its own. Its NeuMF without a tower would still look the tower's rows up."""

        input_type = InputType.POINTWISE

        def __init__(self, config: Any, dataset: Any) -> None:
            super().__init__(config, dataset)
            self.LABEL = config["LABEL_FIELD"]
            self.user = nn.Embedding(self.n_users, config["mf_embedding_size"])
            self.item = nn.Embedding(self.n_items, config["mf_embedding_size"])
            self.output = nn.Linear(config["mf_embedding_size"], 1)
            self.loss = nn.BCEWithLogitsLoss()

        def calculate_loss(self, interaction: Any) -> Any:
            user, item = self.user(interaction[self.USER_ID]), self.item(interaction[self.ITEM_ID])
            return self.loss(self.output(user * item).squeeze(-1), interaction[self.LABEL])

    files, dim = Path(settings["files"]).absolute(), settings["dim"]
    os.chdir(files.parent)  # RecBole writes logs into the folder that it runs in
    model = {"gmf": GMF, "neumf": NeuMF}[settings["model"]]
    chosen = {
        "data_path": str(files.parent),
        "benchmark_filename": ["train", "valid", "test"],
        "load_col": {"inter": ["user_id", "item_id", "label"]},
        "LABEL_FIELD": "label",
        "train_neg_sample_args": None,
        "train_batch_size": settings["batch"],
        "learning_rate": 1e-3,
        "use_gpu": False,
        "show_progress": False,
        "checkpoint_dir": tempfile.gettempdir(),
        "eval_args": {"mode": "labeled"},
        "metrics": ["AUC"],
        "valid_metric": "AUC",
        # The sizes of the paper; they are also those of `invdist.models.backbones`.
        "mf_embedding_size": dim,
        "mlp_embedding_size": 4 * dim,
        "mlp_hidden_size": [4 * dim, 2 * dim, dim],
        "dropout_prob": 0.0,
        "mf_train": True,
        "mlp_train": True,
        "use_pretrain": False,
        "mf_pretrain_path": None,
        "mlp_pretrain_path": None,
    }
    sys.argv = sys.argv[:1]  # RecBole reads settings from the command line too
    config = Config(model=model, dataset=files.name, config_dict=chosen)
    init_seed(config["seed"], config["reproducibility"])
    train, _, _ = data_preparation(config, create_dataset(config))
    return Trainer(config, model(config, train.dataset)), train


if __name__ == "__main__":
    main()
