"""The model, the strategy and the streams that a config describes, on one data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from invdist.config import Config
from invdist.config.registry import STRATEGIES
from invdist.data.dataset import Dataset
from invdist.data.stream.batches import Stream, StreamSpec, UnlabeledSpec
from invdist.embeddings.comm import Comm
from invdist.embeddings.store import EmbeddingStore
from invdist.learning.strategy import Phase, Setting, Strategy
from invdist.models.build import ModelSpec, build_recommender
from invdist.models.recommender import Recommender
from invdist.training.sizes import batch_size, gamma


def build_model(
    config: Config, dataset: Dataset, device: torch.device, comm: Comm, vectors: EmbeddingStore | None = None
) -> Recommender:
    """The model of a config, sized for a data set; `vectors` are its exposure vectors, if it uses them."""
    sections = (config.rows, config.tower, config.optimizer)
    spec = ModelSpec(
        users=dataset.users,
        items=dataset.items,
        model=config.model,
        seed=config.seed,
        precision=config.training.precision,
        batch_size=batch_size(config),
        **{name: value for section in sections for name, value in section},
        exposures=config.exposures,
        grown=config.growth.run is not None,
    )
    model = build_recommender(spec, device, comm, vectors)
    if config.training.compile:
        model.compile(batch_size(config) // comm.size)
    return model


def build_strategy(config: Config, dataset: Dataset, model: Recommender) -> Strategy:
    """The strategy of a config, over a model."""
    return STRATEGIES.get(config.method)(setting_of(config, dataset), model)


def phases_of(config: Config, dataset: Dataset) -> tuple[Phase, ...]:
    """The phases of an epoch; `UserError` if the settings of the strategy contradict each other."""
    return STRATEGIES.get(config.method).phases(setting_of(config, dataset))


def setting_of(config: Config, dataset: Dataset) -> Setting:
    """What the strategy of a config is built with on a data set."""
    return Setting(
        options=config.strategy,
        unlabeled_rate=config.unlabeled.rate,
        gamma=gamma(config),
        users=dataset.users,
        items=dataset.items,
        seed=config.seed,
    )


def stream_of(config: Config, phase: Phase) -> StreamSpec:
    """The stream that a phase reads."""
    data, unlabeled = config.data, config.unlabeled
    return StreamSpec(
        path=data.path,
        splits=phase.splits,
        batch_size=batch_size(config),
        unlabeled_per_row=phase.unlabeled_per_row,
        unlabeled=UnlabeledSpec(
            source=phase.source or unlabeled.source, mix=unlabeled.mix, popularity=unlabeled.popularity
        ),
        seed=config.seed,
        window_rows=data.window_rows,
    )


def rows_per_epoch(phases: Sequence[Phase], streams: Sequence[Stream]) -> int:
    """Labeled interactions that an epoch reads."""
    pairs = zip(streams, phases, strict=True)
    return sum(s.rows * phase.passes * len(phase.steps(s.steps)) // s.steps for s, phase in pairs)


def open_streams(
    config: Config, phases: Sequence[Phase], comm: Comm, make_readers: Callable[[StreamSpec], Sequence[Any]] | None
) -> list[Stream]:
    """The stream of each phase on this rank; phases that read the same share one."""
    specs = [stream_of(config, phase) for phase in phases]
    made: dict[StreamSpec, Stream] = {}
    for spec in dict.fromkeys(specs):
        readers = make_readers(spec) if make_readers else None
        pinned = comm.device is not None and comm.device.type == "cuda"
        made[spec] = Stream(spec, comm.rank, comm.size, readers, config.data.prefetch, pinned)
    return [made[spec] for spec in specs]
