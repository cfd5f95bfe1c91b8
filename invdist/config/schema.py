"""The settings of a training run: one class per section of the YAML file.

Options of a learning strategy are in a section of its own name (`ig:`), typed by the `Config` that it registers.
Sections of other strategies may be there too, so one file serves several methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import PrivateAttr

from invdist.config.fields import BelowOne, Count, CountOrZero, NonNegative, OneOf, Positive, Section, Share
from invdist.config.registry import BACKBONES, STRATEGIES
from invdist.runtime.errors import UserError


class DataConfig(Section):
    """Which prepared data set, and how it is streamed."""

    path: str
    """Folder or URI of a data set made by `invdist prepare`."""
    batch_size: Count | Literal["auto"] = 1024
    """Labeled interactions per step, over all workers: the result is the same at any number of workers. `auto`: 1024
    below 100,000 training labels, 4096 below 2 million, 16384 above; fewer where an epoch would have under 25 steps."""
    eval_batch_size: Count = 16384
    """Interactions that each worker scores at once in evaluation; on a CPU, more do not fit the cache."""
    readers: CountOrZero = 1
    """Ray actors that read shards and sample unlabeled interactions; 0: each worker reads by itself."""
    prefetch: Count = 2
    """Blocks that each worker fetches ahead, at least; of several readers, as many as keep all of them at work."""
    window_rows: Count = 262144
    """Interactions that are shuffled together; the memory of a reader grows with it."""


class UnlabeledConfig(Section):
    """Where interactions without a label come from."""

    source: Literal["exposures", "sampled", "mix"] = "exposures"
    """`exposures`: shown, but without a clear label; `sampled`: random pairs never observed; `mix`: both."""
    mix: Share = 0.5
    """Share of exposures when the source is `mix`."""
    rate: CountOrZero = 1
    """Unlabeled interactions for each labeled one of a step."""
    popularity: NonNegative = 0.0
    """Items are sampled with probability ~ count^popularity; 0 is uniform."""


class RowsConfig(Section):
    """The sharded embedding tables."""

    dim: Count = 32
    """Embedding size k of GMF, a multiple of 4; NeuMF's tower takes 4k more columns of the same table."""
    sharding: Literal["auto", "row_wise", "table_wise", "column_wise", "data_parallel"] = "auto"
    """How tables are sharded over workers; `auto` leaves it to TorchRec's planner."""
    item_sharding: Literal["auto", "row_wise", "table_wise", "column_wise", "data_parallel"] | None = None
    """The same for the items alone; null: as the users. With `data_parallel` items beside row-wise users every worker
    has all items, and of them only gradients travel."""
    optimizer: Literal["adam", "sgd", "rowwise_adagrad"] = "adam"
    """Optimizer of embedding rows; it updates only the rows of a step."""
    hbm_gb: Positive = 32.0
    """GB of one GPU that tables with optimizer state may fill; never more than nine tenths of the card."""
    ddr_gb: Positive = 128.0
    """GB of one host that tables with optimizer state may fill, in equal shares for its workers: where workers compute
    on the CPU, and for `memory: uvm`."""
    memory: Literal["device", "uvm", "auto"] = "device"
    """Where tables and their optimizer state are on GPUs. `uvm`: unified memory, the host's, read over the bus;
    `auto`: that only if they do not fit the GPUs. Not run on a GPU yet (docs/gpu.md). No effect on a CPU."""
    placement: Literal["in_order", "hashed"] = "in_order"
    """Which worker has which row of a row-wise table: consecutive ids together, or spread, so that popular items, whose
    ids are often close, do not share a worker. The result is the same."""
    payload: Literal["fp32", "bf16"] = "fp32"
    """Precision of embeddings and their gradients on their way between workers; tables, sums and steps stay fp32. bf16
    halves the traffic, and the result then depends on the number of workers."""
    init_std: Positive = 0.01
    """Standard deviation of new embeddings."""
    bias: bool = False
    """One more column per user and item, added to the logit."""

    @property
    def shardings(self) -> dict[str, str]:
        """How each table is sharded."""
        return {"user": self.sharding, "item": self.item_sharding or self.sharding}

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems as (field, what is wrong)."""
        if self.dim % 4:
            yield "dim", f"expected a multiple of 4, which FBGEMM's rows need, not {self.dim}"
        kinds = set(self.shardings.values())
        if self.memory == "uvm" and "data_parallel" in kinds:
            yield "memory", "data_parallel tables are on the device; expected device or another rows.sharding"
        if len(kinds) > 1 and "column_wise" in kinds:
            yield "item_sharding", "if one table is column_wise, both must be: pieces of rows are equally wide"


class ExposuresConfig(Section):
    """Exposure vectors: who and what are alike, learned from who was shown what, without labels (docs/exposures.md)."""

    vectors: bool = False
    """Learn exposure vectors once per data set, and give every model a head that reads them."""
    dim: Count = 64
    """Columns of the vectors that a run uses, a multiple of 4: the leading ones of those that were learned."""
    learned: Count = 64
    """Columns that are learned. Runs with another `dim` share them."""
    shrink: bool = True
    """Take what chance explains out of the vectors: of their columns, and of those of ids with few exposures."""
    version: Literal[2, 3] = 3
    """How `shrink` weighs columns. New runs have 3; runs that were trained before this setting have 2 and keep it."""
    products: Count = 14
    """Passes over the exposures: products with the exposure matrix. More change little."""
    path: str | None = None
    """Folder or URI that keeps vectors for all runs; null: `exposure-vectors` in the folder of runs."""
    hidden: Count = 128
    """Hidden units of the head."""
    dropout: BelowOne = 0.3
    """Share of the head's inputs and hidden units dropped while training."""
    prior: NonNegative = 3.0
    """Precision of the Gaussian prior that holds the head's columns of a user or item near zero."""
    gamma: Positive = 0.03
    """Learning rate of the head's own columns of users and items."""
    weight_decay: NonNegative | None = None
    """Decay of the head's dense weights; null: 30,000 / labels, at most 1."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems as (field, what is wrong)."""
        for name in ("dim", "learned"):
            if getattr(self, name) % 4:
                yield name, f"expected a multiple of 4, which FBGEMM's rows need, not {getattr(self, name)}"
        if self.dim > self.learned:
            yield "dim", f"{self.dim} columns cannot be used of the {self.learned} that are learned"


class TowerConfig(Section):
    """The dense part of the model."""

    dropout: BelowOne = 0.0
    """Share of hidden units dropped in NeuMF's tower while training."""


class OptimizerConfig(Section):
    """The gamma optimizer, of embedding rows and dense weights."""

    gamma: Positive | Literal["auto"] = 1e-3
    """Learning rate of the log-loss steps. `auto`: 0.001 * sqrt(batch_size / 1024)."""
    weight_decay: NonNegative = 0.0
    """Weight decay of the embedding rows of a step and of dense weights."""
    beta1: BelowOne = 0.9
    """Adam: decay of the first moment."""
    beta2: BelowOne = 0.999
    """Adam: decay of the second moment."""
    eps: Positive = 1e-8
    """Adam and Adagrad: added to the denominator."""


class TrainingConfig(Section):
    """How long to train, in which precision, and by which metric."""

    epochs: Count = 20
    """At most this many passes over the labeled interactions."""
    metric: Literal["auc", "gauc", "gauc_weighted", "ndcg", "mrr"] = "auc"
    """Validation metric that picks the best epoch and stops early."""
    patience: Count | Literal["auto"] = 3
    """Stop after this many epochs without a better metric. `auto`: 3, or as many as have 300 steps."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the dense part; embeddings and their optimizer stay fp32."""
    compile: bool = False
    """Compile the dense part with torch.compile where it is left to autograd: in bf16, with dropout, on GPUs, and
    backbones of your own. Not run on a GPU yet (docs/gpu.md)."""
    log_every: Count = 50
    """Steps between step events. Steps that choose a direction are all written, and flushed to disk this often."""
    ndcg_k: Count = 10
    """NDCG counts the first this many items."""
    test: bool = True
    """Score the test split once, at the end; use false while choosing settings."""


class CheckpointConfig(Section):
    """When and where to save, and how many checkpoints to keep."""

    path: str | None = None
    """Folder or URI (s3://...) that holds checkpoints, in a folder named like the run; null: in the run folder."""
    every_steps: CountOrZero = 0
    """Steps between checkpoints; 0: none within an epoch by steps."""
    every_seconds: NonNegative = 0.0
    """Seconds between checkpoints, looked at every 16 steps; 0: none by time. One is always saved after an epoch."""
    deltas: bool = False
    """Save within an epoch only the table rows that changed since the last full checkpoint, which is kept with them."""
    keep_last: Count = 2
    """Newest checkpoints to keep."""
    keep_best: Count = 1
    """Best checkpoints to keep beside them."""
    asynchronous: bool = True
    """Write in the background; training waits only for a copy in memory."""


class GrowthConfig(Section):
    """A run that goes on from the model of another one, on a newer data set (docs/daily.md)."""

    run: str | None = None
    """The run folder that it goes on from; `--from` sets this and the next."""
    checkpoint: str | None = None
    """The checkpoint of that run: its step and a digest of its content."""
    epochs: Count = 3
    """Epochs of a run that goes on from another, instead of training.epochs. On a newer data set, learning rates fall
    to zero over them, and the last is used."""
    products: Count = 3
    """Passes over the exposures to bring the vectors of the older run up to date, instead of exposures.products."""


class RayConfig(Section):
    """The Ray workers."""

    workers: Count | Literal["auto"] = 2
    """Training processes, one GPU each on CUDA. `auto`, for one machine: one for each GPU; without GPUs one on
    two cores and else as many as make a step shortest; cpus_per_worker of one worker is the number of cores where
    threads pay (docs/using.md)."""
    min_workers: CountOrZero = 0
    """Continue with this many or more when nodes are lost (the result is the same); 0: never with fewer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA with NCCL where the cluster has a GPU for each worker, else the CPU with gloo."""
    cpus_per_worker: Positive = 1.0
    """CPUs that Ray reserves for each worker, and threads of its operations. The result is the same at any number,
    except where a model multiplies matrices by operators of torch: to rounding."""
    timeout_s: Positive = 300.0
    """A collective that waits longer than this fails instead of hanging."""
    max_failures: Annotated[int, Ge(-1)] = 3
    """Restarts of the worker group before the run gives up; -1: no limit."""

    @property
    def ranks(self) -> int:
        """`workers` as a number, which `auto` has in `invdist train` only."""
        if self.workers == "auto":
            raise UserError("ray.workers=auto is a setting of `invdist train`; expected a number here")
        return self.workers


class WatchConfig(Section):
    """Where a run is watched while it trains, beside its own folder and TensorBoard (docs/using.md)."""

    ray_metrics: bool = True
    """Export loss, rows/s, directions and validation metrics through Ray, for its dashboard, Prometheus and Grafana."""
    mlflow: str | None = None
    """Tracking URI of MLflow to log the run to (`http://host:5000`, `sqlite:////path/mlflow.db`); needs the extra
    `invdist[mlflow]`. null: not logged."""
    mlflow_experiment: str = "invdist"
    """Name of the MLflow experiment; made if it is missing."""


class Config(Section):
    """A training run."""

    method: Annotated[str, OneOf(STRATEGIES.names)] = "ig"
    """Learning strategy, by its registered name."""
    model: Annotated[str, OneOf(BACKBONES.names)] = "gmf"
    """Backbone, by its registered name."""
    seed: CountOrZero = 0
    """Seed of weights, order and sampling."""
    runs: str = "runs"
    """Folder that holds run folders."""
    name: str | None = None
    """Name of the run folder; by default method, model and time."""
    data: DataConfig
    unlabeled: UnlabeledConfig = UnlabeledConfig()
    rows: RowsConfig = RowsConfig()
    exposures: ExposuresConfig = ExposuresConfig()
    tower: TowerConfig = TowerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    growth: GrowthConfig = GrowthConfig()
    ray: RayConfig = RayConfig()
    watch: WatchConfig = WatchConfig()
    _strategy: Any = PrivateAttr(None)

    @property
    def strategy(self) -> Any:
        """The options of the chosen method: an instance of the `Config` that it registers."""
        return self._strategy

    @strategy.setter
    def strategy(self, options: Any) -> None:
        self._strategy = options

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems that concern several fields, as (dotted key, what is wrong)."""
        workers = 1 if self.ray.workers == "auto" else self.ray.workers
        if self.data.batch_size != "auto" and self.data.batch_size < workers:
            needed = f"at least one row per worker ({workers})"
            yield "data.batch_size", f"{self.data.batch_size} rows per step; expected {needed}"
        if self.ray.min_workers > workers:
            yield "ray.min_workers", f"{self.ray.min_workers} is more than ray.workers ({self.ray.workers})"
        for key, kind in zip(("rows.sharding", "rows.item_sharding"), self.rows.shardings.values(), strict=True):
            if self.exposures.vectors and kind not in ("auto", "row_wise"):
                yield key, f"{kind} tables cannot have exposures.vectors; expected row_wise"
                break
        if self.exposures.vectors and self.rows.optimizer != "adam":
            yield "rows.optimizer", f"{self.rows.optimizer} cannot train the head of exposures.vectors; expected adam"
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name or "\\" in self.name):
            yield "name", f"expected the name of a folder inside {self.runs}/, without slashes"
