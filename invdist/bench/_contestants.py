"""The contestants of `invdist bench peers` and `epoch` that run in this environment: `python -m ... NAME SETTINGS`.

All read the training interactions of one prepared data set. The peers read the files once and keep them in memory;
this trainer streams them in every epoch, as it does for data that does not fit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from invdist.bench._contest import Turns, least_seconds, one_turn
from invdist.bench._peers import DenseModel, ThreeCopiesStep, with_fused_rows
from invdist.bench._steps import Driver
from invdist.config.registry import BACKBONES
from invdist.data.dataset import Dataset
from invdist.data.schema import TRAINING_LABELED
from invdist.data.stream.batches import Batch, Stream
from invdist.runtime.process import configure_process, single_rank

GAMMA = 1e-3
_PHASE_2_EVERY = 10  # training-test is a tenth of the labeled interactions


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every contestant is told."""

    data: str
    model: str
    batch: int
    dim: int
    seconds: float
    """A turn ends after this long, or after an epoch."""

    def overrides(self, method: str) -> dict[str, Any]:
        """The settings of a run of this trainer."""
        return {
            "method": method,
            "model": self.model,
            "data": {"path": self.data, "batch_size": self.batch, "readers": 0},
            "unlabeled": {"source": "sampled"},
            "rows": {"dim": self.dim},
            "optimizer": {"gamma": GAMMA},
            "training": {"epochs": 1_000_000, "patience": 1_000_000, "test": False},
            # In the background it would run during the next turn.
            "checkpoint": {"asynchronous": False, "keep_last": 1},
            "ray": {"workers": 1},
        }


def main() -> None:
    """Takes turns until standard input ends."""
    name, settings = sys.argv[1], Settings(**json.loads(sys.argv[2]))
    configure_process(threads=1)
    with single_rank():
        if name in _TRAINERS:
            _train(settings, _TRAINERS[name])
            return
        torch.manual_seed(0)
        rows, steps = _STEPS[name](settings)
        turns = Turns()
        for _ in turns:
            turns.answer(one_turn(steps, rows, settings.seconds))


# This trainer


def _train(settings: Settings, method: str) -> None:
    """A turn is epochs of a real run: shards are read, events written; seconds are those that the run reports."""
    from invdist import config as configs
    from invdist.training import run_folder
    from invdist.training.history import METRICS_FILE, read_events
    from invdist.training.totals import EpochTotals
    from invdist.training.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        config = configs.from_mapping(settings.overrides(method), [f"runs={folder}"])
        run = run_folder.create(config, Dataset.open(settings.data))
        trainer, turns = Trainer(config, run, device=torch.device("cpu")), Turns()
        asked = iter(turns)
        next(asked)

        total = EpochTotals()

        def on_epoch(metrics: dict[str, float]) -> None:
            nonlocal total
            epoch = [event for event in read_events(run / METRICS_FILE) if event["event"] == "epoch"][-1]
            total.rows, total.seconds = total.rows + epoch["rows"], total.seconds + epoch["seconds"]
            total.add_seconds(epoch["seconds_by"])
            if total.seconds < least_seconds(settings.seconds):
                return
            turns.answer([total.rows, total.seconds, total.seconds_by])
            total = EpochTotals()
            if next(asked, turns) is turns:
                sys.exit()

        trainer.fit(on_epoch)


def _in_memory(settings: Settings) -> tuple[int, Iterator[int]]:
    """The same steps of the same batches, which are in memory already."""
    from invdist import config as configs
    from invdist.embeddings.shared_memory import connect
    from invdist.training.build import build_model, stream_of

    config = configs.from_mapping(settings.overrides("none"), [])
    dataset = Dataset.open(settings.data)
    driver = Driver(build_model(config, dataset, torch.device("cpu"), connect()), "none", 0, [])
    stream = Stream(stream_of(config, driver.phase), 0, 1)
    batches = list(stream.epoch(0))
    return stream.rows, (len(batch.user) for batch in driver.steps(cycle(batches)))


# What others write


def _loaded(settings: Settings) -> tuple[int, TensorDataset]:
    dataset = Dataset.open(settings.data)
    columns = [
        [dataset.read(split)[name].to_numpy() for split in TRAINING_LABELED] for name in ("user", "item", "label")
    ]
    user, item, label = (torch.cat([torch.from_numpy(part.copy()) for part in column]) for column in columns)
    return len(user), TensorDataset(user.long(), item.long(), label.float())


def _loader(rows: TensorDataset, batch: int) -> DataLoader:
    """Whole batches by index, as PyTorch's documentation has it ("Disable automatic batching")."""
    return DataLoader(rows, batch_size=None, sampler=BatchSampler(RandomSampler(rows), batch, drop_last=False))


def _forever(loader: DataLoader) -> Iterator[list[Tensor]]:
    while True:
        yield from loader


def _torch_loop(settings: Settings, by_row: bool = False) -> tuple[int, Iterator[int]]:
    """`nn.Embedding(sparse=True)`, SparseAdam for the rows and Adam for the rest."""
    count, rows = _loaded(settings)
    loader = DataLoader(rows, settings.batch, shuffle=True) if by_row else _loader(rows, settings.batch)
    dataset = Dataset.open(settings.data)
    model = DenseModel(dataset.users, dataset.items, settings.model, settings.dim, sparse=True)
    tables = [model.user.weight, model.item.weight]
    optimizers = [torch.optim.SparseAdam(tables, lr=GAMMA), torch.optim.Adam(model.backbone.parameters(), lr=GAMMA)]

    def steps() -> Iterator[int]:
        for user, item, label in _forever(loader):
            loss = binary_cross_entropy_with_logits(model(user, item), label)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            yield len(user)

    return count, steps()


def _torchrec(settings: Settings) -> tuple[int, Iterator[int]]:
    """TorchRec's `TrainPipelineSparseDist` over `DistributedModelParallel`, its fused optimizer in `backward`.

    FBGEMM has no Adam on the CPU: rows have exact SGD, the cheapest one, dense weights have Adam.
    """
    from torchrec import KeyedJaggedTensor
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.streamable import Pipelineable

    @dataclass
    class Rows(Pipelineable):
        ids: KeyedJaggedTensor
        label: Tensor

        def to(self, device: torch.device, non_blocking: bool = False) -> Rows:
            return Rows(self.ids.to(device, non_blocking), self.label.to(device, non_blocking=non_blocking))

        def record_stream(self, stream: Any) -> None: ...

        def pin_memory(self) -> Rows:
            return self

    class Model(nn.Module):
        def __init__(self, rows: nn.Module, backbone: nn.Module) -> None:
            super().__init__()
            self.rows, self.backbone = rows, backbone

        def forward(self, batch: Rows) -> tuple[Tensor, Tensor]:
            found = self.rows(batch.ids)
            logit = self.backbone(found["user"].values(), found["item"].values())
            return binary_cross_entropy_with_logits(logit, batch.label), logit.detach()

    count, rows = _loaded(settings)
    dataset = Dataset.open(settings.data)
    backbone, cpu = BACKBONES.get(settings.model)(dim=settings.dim), torch.device("cpu")
    model = with_fused_rows(dataset.users, dataset.items, backbone.columns, cpu, lambda rows: Model(rows, backbone))
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, GAMMA),
    )
    pipeline = TrainPipelineSparseDist(model, CombinedOptimizer([model.fused_optimizer, dense]), cpu)

    def batches() -> Iterator[Rows]:
        for user, item, label in _forever(_loader(rows, settings.batch)):
            ids = torch.cat([user, item])
            lengths = torch.ones_like(ids, dtype=torch.int32)
            yield Rows(KeyedJaggedTensor(["user", "item"], ids, lengths=lengths), label)

    source = batches()
    return count, (len(pipeline.progress(source)) for _ in iter(int, 1))


def _three_copies(settings: Settings) -> tuple[int, Iterator[int]]:
    """An epoch of the inverse gradient with three deep copies of the model: nine plain steps, one of phase 2."""
    count, rows = _loaded(settings)
    dataset = Dataset.open(settings.data)
    trainer = ThreeCopiesStep(dataset.users, dataset.items, settings.model, settings.dim, [], torch.device("cpu"))

    def steps() -> Iterator[int]:
        for number, (user, item, label) in enumerate(_forever(_loader(rows, settings.batch))):
            if number % _PHASE_2_EVERY == _PHASE_2_EVERY - 1:
                other_user, other_item = (torch.randint(high, (len(user),)) for high in (dataset.users, dataset.items))
                trainer.step(Batch(user, item, label, other_user, other_item, len(user), number))
            else:
                trainer.plain_step(user, item, label)
            yield len(user)

    return count, steps()


_TRAINERS = {"invdist": "none", "invdist_ig": "ig"}
_STEPS: dict[str, Callable[[Settings], tuple[int, Iterator[int]]]] = {
    "in_memory": _in_memory,
    "torch_loop": _torch_loop,
    "torch_loop_by_row": lambda settings: _torch_loop(settings, by_row=True),
    "torchrec": _torchrec,
    "three_copies": _three_copies,
}
NAMES = (*_TRAINERS, *_STEPS)


if __name__ == "__main__":
    main()
