"""The stage before training: exposure vectors of a data set, learned once and used by every run on it.

They are kept as checkpoints in a folder named by what decides them: the data set's fingerprint and the settings of the
stage. The first run that needs them learns them, saving after every product, so that a killed run loses one product at
most. Runs that start meanwhile wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from invdist.config.schema import Config, ExposuresConfig
from invdist.data.dataset import Dataset
from invdist.data.schema import TRAINING_LABELED
from invdist.data.stream.exposures import ExposurePairs, LabeledPairs
from invdist.embeddings.comm import Comm
from invdist.embeddings.store import EmbeddingStore
from invdist.learning.exposure_vectors import PADDING, Shrinking, SubspaceIteration, count_pairs, iteration_columns
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder, absolute, exclusive
from invdist.training.checkpoint import CheckpointInfo, CheckpointStore
from invdist.training.checkpoint.folder import CheckpointFolder
from invdist.training.checkpoint.manifest import DamagedCheckpoint
from invdist.training.checkpoint.state import restore_tables
from invdist.training.frozen_tables import frozen_tables
from invdist.training.grown_vectors import OlderVectors
from invdist.training.growth import Parent

_SHRINKING: dict[int, Shrinking] = {1: None, 2: "step", 3: "smooth"}
"""By version. There is a new one whenever the same settings would give other vectors."""
_SEED = 0
_WAIT_S = 1.0
_TRIES = 2
"""How often vectors are read: those that turn out to be damaged are learned again."""

Report = Callable[..., None]
"""Called with `product`, `products`, `exposures` and `seconds` after each product."""


def vectors_folder(config: Config, dataset: Dataset) -> str:
    """Where the vectors of a data set are kept for these settings; a local path or a URI."""
    exposures = config.exposures
    root = exposures.path or f"{config.runs.rstrip('/')}/exposure-vectors"
    how = f"{exposures.products}"
    if config.growth.checkpoint is not None:  # aligned to those of the older run, in the columns that it reads
        how = f"{config.growth.products}-{exposures.dim}-{config.growth.checkpoint}"
    return absolute(f"{root}/{dataset.fingerprint}-{exposures.learned}-{how}-v{_version(exposures)}")


def check_folder(config: Config, dataset: Dataset) -> None:
    """Raises `UserError` if the vectors of a run cannot be kept where its settings say."""
    folder = vectors_folder(config, dataset)
    if config.exposures.vectors and "://" not in folder:
        parent, key = Path(folder).parent, "exposures.path" if config.exposures.path else "runs"
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{key}: cannot make {parent}: {error.strerror}") from None
        if not os.access(parent, os.W_OK | os.X_OK) and finished_vectors(folder, dataset) is None:
            raise UserError(f"{key}: cannot write to {parent}, where exposure vectors are kept")


def _version(exposures: ExposuresConfig) -> int:
    return exposures.version if exposures.shrink else 1


def finished_vectors(folder: str, dataset: Dataset) -> CheckpointInfo | None:
    """The finished vectors in a folder, or None."""
    last = CheckpointFolder(folder).latest(valid_only=True)
    if last is None or not last.extra.get("finished"):
        return None
    if last.extra["dataset"] != dataset.fingerprint:
        raise UserError(f"{last.path}: exposure vectors of another data set; remove the folder to learn them again")
    return last


def load_or_learn(
    config: Config,
    dataset: Dataset,
    *,
    device: torch.device,
    comm: Comm,
    report: Report = lambda **progress: None,
) -> EmbeddingStore:
    """The vectors a run uses, as frozen tables `[rows, dim + 4]` cut row-wise over the ranks; every rank calls it.

    Those of a run that goes on from another start from the other's, and are aligned to them (`grown_vectors`).
    """
    exposures, folder = config.exposures, vectors_folder(config, dataset)

    store_of = functools.partial(frozen_tables, config, dataset, device=device, comm=comm)
    checkpoints = CheckpointStore(folder, comm, keep_last=1, keep_best=0, asynchronous=False)
    vectors = None
    for _ in range(_TRIES):
        with _turn(folder, dataset, comm) as finished:
            if not finished:
                _learn(config, dataset, store_of, checkpoints, comm, report)
        vectors = store_of(exposures.dim + PADDING) if vectors is None else vectors
        found = finished_vectors(folder, dataset)
        if found is None:
            raise UserError(f"{folder} is not seen by rank {comm.rank}: keep exposure vectors where all nodes see them")
        if _intact(comm, functools.partial(_fill, vectors, found, exposures)):
            vectors.freeze()
            return vectors
        _remove(folder, found, dataset, comm)
    raise UserError(f"{folder}: what is written there is damaged when it is read; check the disk")


def _fill(vectors: EmbeddingStore, found: CheckpointInfo, exposures: ExposuresConfig) -> None:
    for shard in vectors.layout.on(vectors.comm.rank):
        rows = vectors.local_rows[shard.base : shard.base + shard.rows]
        if len(rows):
            place = vectors.layout.multipliers.get(shard.table, 1)
            rows.copy_(read_vectors(found, shard.table, exposures, shard.row, shard.row + shard.rows, place))


def _intact(comm: Comm, read: Callable[[], None]) -> bool:
    """Whether no rank finds damage in what it reads."""
    damaged = torch.zeros(1)
    try:
        read()
    except DamagedCheckpoint:
        damaged += 1
    return float(comm.all_reduce(damaged.to(comm.device)).wait()) == 0


def _remove(folder: str, damaged: CheckpointInfo, dataset: Dataset, comm: Comm) -> None:
    """Removes damaged vectors, unless another run does something about them."""
    with contextlib.ExitStack() as stack:
        if comm.rank == 0 and _locked(folder, stack):
            found = finished_vectors(folder, dataset)
            if found is not None and found.manifest == damaged.manifest:
                Folder.at(damaged.path).remove()
    comm.barrier()


def read_vectors(
    found: CheckpointInfo, table: str, exposures: ExposuresConfig, first: int, end: int, multiplier: int = 1
) -> Tensor:
    """Rows `[first, end)` of a table as a model reads them: `dim` columns of length one, then the counts.

    Rows are counted by place, if tables have a `multiplier` (`Layout.multipliers`).
    """
    rows, name, d = torch.empty((end - first, exposures.dim + PADDING)), f"rows/{table}/weight", exposures.dim
    found.read_into(name, rows[:, :d], first, multiplier=multiplier)
    found.read_into(name, rows[:, d:], first, exposures.learned, multiplier)
    rows[:, :d] = torch.nn.functional.normalize(rows[:, :d], dim=1)
    return rows


def _older(config: Config, dataset: Dataset) -> OlderVectors | None:
    """The vectors of the run that this one goes on from, if it does."""
    if config.growth.run is None:
        return None
    parent = Parent(config)
    folder = vectors_folder(parent.config, parent.dataset)
    found = finished_vectors(folder, parent.dataset)
    if found is None:
        raise UserError(f"the exposure vectors of {config.growth.run} are not in {folder}: restore that folder")
    return OlderVectors(found, parent, dataset, config.exposures)


def _learn(
    config: Config,
    dataset: Dataset,
    store_of: Callable[[int], EmbeddingStore],
    checkpoints: CheckpointStore,
    comm: Comm,
    report: Report,
) -> None:
    exposures, older = config.exposures, _older(config, dataset)
    products = exposures.products if older is None else 0 if older.unchanged else config.growth.products
    pairs = ExposurePairs(dataset, comm.rank, comm.size)
    labeled = LabeledPairs(dataset, comm.rank, comm.size)
    now = ExposurePairs(dataset, comm.rank, comm.size, TRAINING_LABELED).batches() if labeled.set_aside else ()
    iteration = SubspaceIteration(store_of(iteration_columns(exposures.learned)), exposures.learned)
    about = {"dataset": dataset.fingerprint, "learned": exposures.learned, "products": products}
    last = checkpoints.latest(valid_only=True)
    if last is not None and not _intact(comm, functools.partial(restore_tables, last, iteration.store)):
        if comm.rank == 0:
            Folder.at(last.path).remove()
        comm.barrier()
        last = None
    if last is None:
        counts = count_pairs(store_of(PADDING), pairs.batches(), labeled.batches(), now)
        iteration.start(counts, _SEED, older.fill if older else None)
        done = 0
    else:
        done = last.step
    for product in range(done, products):
        # Products alternate, and the last one goes to users.
        started, left = time.perf_counter(), products - product
        iteration.product("user" if left % 2 else "item", pairs.batches(), last=left == 1)
        report(
            product=product + 1,
            products=products,
            exposures=pairs.rows,
            seconds=time.perf_counter() - started,
        )
        if left > 1:
            checkpoints.save_tables(iteration.store, product + 1, {**about, "finished": False})
    vectors = store_of(exposures.learned + PADDING)
    for shard in vectors.layout.on(comm.rank):
        rows = vectors.local_rows[shard.base : shard.base + shard.rows]
        if older is not None and older.unchanged:
            older.fill(shard.table, rows, shard.row, vectors.layout.multipliers.get(shard.table, 1))
        else:
            rows.copy_(iteration.vectors(shard.table, shrink=_SHRINKING[_version(exposures)]))
    if older is not None and not older.unchanged:
        older.align(vectors)
    checkpoints.save_tables(vectors, products, {**about, "finished": True})


@contextlib.contextmanager
def _turn(folder: str, dataset: Dataset, comm: Comm) -> Iterator[bool]:
    """Waits until the vectors are there or it is this run's turn to learn them; gives whether they are there."""
    waiting, learning, finished = 0.0, 1.0, 2.0
    with contextlib.ExitStack() as stack:
        while True:
            state = torch.full((1,), waiting)
            if comm.rank == 0:
                if finished_vectors(folder, dataset) is not None:
                    state.fill_(finished)
                elif _locked(folder, stack):
                    # The run before may have finished between the two looks.
                    state.fill_(learning if finished_vectors(folder, dataset) is None else finished)
            state = float(comm.all_reduce(state.to(comm.device)).wait())
            if state != waiting:
                break
            time.sleep(_WAIT_S)
        yield state == finished


def _locked(folder: str, stack: contextlib.ExitStack) -> bool:
    """Takes the lock of a local folder for as long as `stack` is open; False if another run holds it."""
    if "://" in folder:
        return True  # object stores have no locks
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        stack.enter_context(exclusive(Path(folder)))
    except UserError:
        return False
    return True
