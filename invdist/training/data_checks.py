"""What a run needs of its data set. The settings alone tell, so it is checked before anything is started."""

from __future__ import annotations

from collections.abc import Iterator

from invdist.config import Config
from invdist.config.fields import Problem, fail
from invdist.config.registry import STRATEGIES
from invdist.data.dataset import Dataset
from invdist.data.stream.batches import StreamSpec, UnlabeledSpec
from invdist.data.stream.blocks import missing_data
from invdist.learning.strategy import Phase, Setting
from invdist.runtime.errors import UserError

_INSTEAD = {
    "exposures": "use sampled, or prepare with label_fraction below 1",
    "mix": "use sampled, or prepare with label_fraction below 1",
    "sampled": "use exposures",
}


def setting_of(config: Config, dataset: Dataset) -> Setting:
    """What the strategy of a config is built with on a data set."""
    return Setting(
        options=config.strategy,
        unlabeled_rate=config.unlabeled.rate,
        gamma=config.optimizer.gamma,
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
        batch_size=data.batch_size,
        unlabeled_per_row=phase.unlabeled_per_row,
        unlabeled=UnlabeledSpec(
            source=phase.source or unlabeled.source, mix=unlabeled.mix, popularity=unlabeled.popularity
        ),
        seed=config.seed,
        window_rows=data.window_rows,
    )


def check_against_data(config: Config, dataset: Dataset) -> None:
    """Raises `UserError` with every way in which the settings do not fit the opened data set, or each other."""
    fail([Problem(config.data.path, problem.key, problem.message) for problem in misfits(config, dataset)])


def misfits(config: Config, dataset: Dataset) -> list[Problem]:
    """What `check_against_data` would complain of."""
    return [Problem("", key, message) for key, message in dict.fromkeys(_misfits(config, dataset))]


def _misfits(config: Config, dataset: Dataset) -> Iterator[tuple[str, str]]:
    rows, batch_size = dataset.rows, config.data.batch_size
    if batch_size > rows["train"]:
        yield "data.batch_size", f"{batch_size} is more than the {rows['train']} training rows"
    if not rows["valid"]:
        yield "training.metric", f"{config.training.metric} needs validation rows, and the data set has none"
    try:
        phases = STRATEGIES.get(config.method).phases(setting_of(config, dataset))
    except UserError as error:
        yield "", str(error)
        return
    for phase in phases:
        spec = stream_of(config, phase)
        missing, source = missing_data(dataset, spec), spec.unlabeled.source
        labeled = any(rows[split] for split in phase.splits)
        if missing and labeled and phase.source is None:
            yield "unlabeled.source", f"{source}: the data set has {missing}; {_INSTEAD[source]}"
        elif missing:
            yield "method", f"{config.method} cannot do its phase {phase.name}: the data set has {missing}"
