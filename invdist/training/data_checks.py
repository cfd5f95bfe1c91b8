"""Checks that settings, data set and memory fit together, made before anything is started."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from invdist.config import Config
from invdist.config.fields import Problem, fail
from invdist.data.dataset import Dataset
from invdist.data.stream.blocks import missing_data
from invdist.embeddings.placement import GIB
from invdist.learning.exposure_vectors import PADDING, iteration_columns
from invdist.models.build import build_backbone
from invdist.runtime.errors import UserError
from invdist.runtime.memory import host_memory
from invdist.training.build import phases_of, stream_of
from invdist.training.sizes import batch_size, gamma, suited

_INSTEAD = {
    "exposures": "use sampled, or prepare with label_fraction below 1",
    "mix": "use sampled, or prepare with label_fraction below 1",
    "sampled": "use exposures",
}


def check_against_data(config: Config, dataset: Dataset) -> None:
    """Raises `UserError` with every way in which the settings do not fit the data set, or each other."""
    fail([Problem(config.data.path, problem.key, problem.message) for problem in misfits(config, dataset)])


def misfits(config: Config, dataset: Dataset) -> list[Problem]:
    """The problems that `check_against_data` raises."""
    return [Problem("", key, message) for key, message in dict.fromkeys(_misfits(config, dataset))]


def _misfits(config: Config, dataset: Dataset) -> Iterator[tuple[str, str]]:
    config, rows = suited(config, dataset), dataset.rows
    if batch_size(config) > rows["train"]:
        yield "data.batch_size", f"{batch_size(config)} is more than the {rows['train']} training rows"
    if not rows["valid"]:
        yield "training.metric", f"{config.training.metric} needs validation rows, and the data set has none"
    too_large = _exceeds_caps(config, _all_bytes(config, dataset))
    if too_large:
        yield "rows.dim", too_large
    rate, decay = gamma(config), config.exposures.weight_decay
    if config.exposures.vectors and decay is not None and rate * decay >= 1:
        yield (
            "exposures.weight_decay",
            f"{decay:g} is too much: a step multiplies the head's weights by 1 - optimizer.gamma * weight_decay, which "
            f"must be above 0; expected less than {1 / rate:g}",
        )
    try:
        phases = phases_of(config, dataset)
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


def model_bytes(config: Config, dataset: Dataset) -> float:
    """Bytes of one copy of the model with its optimizer state, at least: tables and dense weights.

    Or those of learning its exposure vectors, which is over before the model is made, if they are more.
    """
    rows, exposures = dataset.users + dataset.items, config.exposures
    try:
        with torch.device("meta"):  # shapes without memory
            backbone = build_backbone(config.model, config.rows, config.tower, exposures)
        values = rows * backbone.columns + sum(p.numel() for p in backbone.parameters())
    except RuntimeError:  # a size beyond 64 bits
        return float("inf")
    copies = 3 if config.rows.optimizer == "adam" else 1
    if config.growth.run is not None and exposures.vectors:
        copies += 1  # the rows as they started
    size = 4.0 * (values * copies + rows * backbone.frozen_columns)
    learning = iteration_columns(exposures.learned) + exposures.learned + PADDING if exposures.vectors else 0
    return max(size, 4.0 * rows * learning)


def _all_bytes(config: Config, dataset: Dataset) -> float:
    """`model_bytes` over all workers: each has a copy of replicated tables."""
    sizes, kinds = {"user": dataset.users, "item": dataset.items}, config.rows.shardings
    replicated = sum(size for name, size in sizes.items() if kinds[name] == "data_parallel") / sum(sizes.values())
    return model_bytes(config, dataset) * (1 + replicated * (config.ray.ranks - 1))


def _exceeds_caps(config: Config, size: float) -> str | None:
    rows, workers = config.rows, config.ray.ranks
    # At most: workers may be on hosts of their own, and `auto` may find GPUs or none.
    cap = {"cpu": rows.ddr_gb, "cuda": rows.hbm_gb}.get(config.ray.device, max(rows.hbm_gb, rows.ddr_gb))
    if size <= workers * cap * GIB:
        return None
    return (
        f"{rows.dim} makes a model of {size / GIB:,.1f} GB with its optimizer state, more than {workers} worker(s) "
        f"with at most {cap:g} GB each can hold; use a smaller one, more ray.workers, or raise rows.hbm_gb and "
        "rows.ddr_gb"
    )


def check_fits_host(config: Config, dataset: Dataset, memory: float | None = None) -> None:
    """Raises `UserError` if a run whose workers are all on this machine needs more than its memory (in bytes)."""
    memory = host_memory() if memory is None else memory
    size = _all_bytes(config, dataset)
    if size > memory:
        raise UserError(
            f"rows.dim: {config.rows.dim} makes a model of {size / GIB:,.1f} GB with its optimizer state, and this "
            f"machine has {memory / GIB:,.1f} GB; use a smaller one"
        )
