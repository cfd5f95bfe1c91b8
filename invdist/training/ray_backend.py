"""Training with Ray Train: a `TorchTrainer` whose workers each run a `Trainer` and are restarted when they die.

A restarted group continues from the newest checkpoint of the run folder, so every node must see that folder, as for
any Ray Train run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from invdist import config as configs
from invdist.config import Config
from invdist.runtime.errors import UserError
from invdist.runtime.files import write_atomically
from invdist.runtime.paths import AnyPath, path_at
from invdist.training.events import Sink
from invdist.training.run_folder import FAILED_FILE

_LOG = logging.getLogger(__name__)


def fit(config: Config, run: AnyPath, worker: Callable[[dict[str, str]], None] | None = None) -> None:
    """Trains on the Ray that this process is connected to; returns when the run has finished or was stopped.

    Raises `UserError` for an error the user can fix, and Ray's own error when workers died too often. `worker` is the
    function that each worker runs, by default `train_worker`.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    (run / FAILED_FILE).unlink(missing_ok=True)
    cuda = cluster_uses_cuda(config)
    ray_config = config.ray
    needed, present = ray_config.ranks * ray_config.cpus_per_worker, ray.cluster_resources().get("CPU", 0)
    least = (ray_config.min_workers or ray_config.ranks) * ray_config.cpus_per_worker
    if least > present:
        raise UserError(
            f"ray.workers={ray_config.workers} with ray.cpus_per_worker={ray_config.cpus_per_worker:g} need "
            f"{needed:g} CPUs, the Ray cluster has {present:g}: ask for fewer, or wait for nodes (`ray status`)"
        )

    class Trainer(TorchTrainer):
        """Does not handle Ctrl-C: Ray's own handler would kill the workers before they have saved."""

        def _register_sigint_handler(self, controller: Any) -> None: ...

    workers = (ray_config.min_workers, ray_config.ranks) if ray_config.min_workers else ray_config.ranks
    trainer = Trainer(
        worker or train_worker,
        train_loop_config={"config": configs.dump(config), "run": str(run)},
        torch_config=TorchConfig(backend="nccl" if cuda else "gloo", timeout_s=int(ray_config.timeout_s)),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=cuda, resources_per_worker=_resources(config, cuda)),
        run_config=RunConfig(
            name="ray_train",
            storage_path=str(run),
            failure_config=FailureConfig(max_failures=ray_config.max_failures),
        ),
    )
    try:
        trainer.fit()
    finally:
        _raise_if_failed(run)


def train_worker(settings: dict[str, str]) -> None:
    """The function of every worker: builds its `Trainer` and trains."""
    import ray
    import torch
    from ray.train import get_context
    from ray.train.torch import get_device

    from invdist.data.stream.batches import Readers, StreamSpec, ray_readers
    from invdist.embeddings.shared_memory import connect
    from invdist.runtime.process import configure_process
    from invdist.training.trainer import Trainer

    run = path_at(settings["run"])
    if (run / FAILED_FILE).exists():
        return  # an error that only the user can fix: it would occur again after this restart
    config = configs.from_text(settings["config"])
    configure_process(max(1, int(config.ray.cpus_per_worker)))
    comm = connect(timeout_s=config.ray.timeout_s)

    def make_readers(spec: StreamSpec) -> Sequence[Any]:
        from ray.train.collective import broadcast_from_rank_zero

        nodes: list[Any] = [None] * comm.size
        torch.distributed.all_gather_object(nodes, ray.get_runtime_context().get_node_id(), group=comm.group)
        first = get_context().get_world_rank() == 0
        readers = ray_readers(spec, config.data.readers, nodes) if first else Readers()
        return broadcast_from_rank_zero(readers)

    try:
        trainer = Trainer(
            config,
            run,
            device=get_device(),
            comm=comm,
            make_readers=make_readers if config.data.readers else None,
            sinks=_sinks(config, run) if comm.rank == 0 else (),
        )
        trainer.fit()
    except UserError as error:
        write_atomically(run / FAILED_FILE, json.dumps({"rank": comm.rank, "message": str(error)}))
        raise


def _sinks(config: Config, run: AnyPath) -> list[Sink]:
    """Where the events of a run are watched, beside its folder."""
    from invdist.training.mlflow import Mlflow
    from invdist.training.ray_metrics import RayMetrics

    sinks: list[Sink] = [RayMetrics(run.name)] if config.watch.ray_metrics else []
    return [*sinks, Mlflow(config, run)] if config.watch.mlflow else sinks


def _raise_if_failed(run: AnyPath) -> None:
    if (run / FAILED_FILE).exists():
        raise UserError(json.loads((run / FAILED_FILE).read_text())["message"])


def cluster_uses_cuda(config: Config) -> bool:
    """Chooses the device of all workers: CUDA if the cluster has a GPU for each worker that is required."""
    import ray

    if config.ray.device == "cpu":
        return False
    gpus, needed = ray.cluster_resources().get("GPU", 0), config.ray.min_workers or config.ray.ranks
    few = f"{needed} workers need a GPU each, the Ray cluster has {gpus:g} (nodes may still be starting: `ray status`)"
    if config.ray.device == "cuda" and gpus < needed:
        raise UserError(f"ray.device=cuda: {few}; ask for fewer workers, or use ray.device=cpu")
    if 0 < gpus < needed:
        _LOG.warning("training on the CPU: %s", few)
    return gpus >= needed


def _resources(config: Config, cuda: bool) -> dict[str, float]:
    return {"CPU": config.ray.cpus_per_worker, **({"GPU": 1.0} if cuda else {})}


@contextlib.contextmanager
def connected(cpus: int | None = None, variables: dict[str, str] | None = None) -> Iterator[None]:
    """Inside, this process is connected to its Ray cluster, or to a private one with `cpus` CPUs (default: all).

    A process that is connected already stays connected. `variables` are for a private one: a `new_environment` with
    more in it.
    """
    if "ray" in sys.modules:
        import ray

        if ray.is_initialized():
            yield
            return
        if not inside_cluster():
            raise UserError(
                "ray was imported before invdist could start a private cluster: call ray.init() first to use your own, "
                "or run this in a new process"
            )
    with contextlib.ExitStack() as stack:
        if not inside_cluster():
            from invdist.runtime.private_ray import private_ray

            stack.enter_context(private_ray(cpus=cpus, variables=variables))
        import ray

        stack.enter_context(ray_prints_to_stderr())
        with _quiet_core():
            ray.init(log_to_driver=False, logging_level=logging.WARNING)
        stack.callback(ray.shutdown)
        yield


@contextlib.contextmanager
def ray_prints_to_stderr() -> Iterator[None]:
    """Inside, Ray says on stderr that a worker has died. By itself it prints that among the results on stdout."""
    from ray._private import worker

    printing = worker.print_to_stdstream
    worker.print_to_stdstream = lambda data, *more, **named: printing({**data, "is_err": True}, *more, **named)
    try:
        yield
    finally:
        worker.print_to_stdstream = printing


@contextlib.contextmanager
def _quiet_core() -> Iterator[None]:
    """Keeps Ray's C++ core from writing errors to the terminal of this driver; it reads the level when it starts.

    Ray Data restarts its actors and keeps their arguments alive, and yet the core reports "has constructor arguments
    in the object store and max_restarts > 0" as an error for each. Real failures reach Python as exceptions, and the
    processes of the cluster log as before. RAY_BACKEND_LOG_LEVEL in the environment takes precedence.
    """
    name = "RAY_BACKEND_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "fatal"
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            del os.environ[name]
            captured.seek(0)
            # The core announces the level that it read: the one line to leave out.
            os.write(2, b"".join(line for line in captured if name.encode() not in line))


def inside_cluster() -> bool:
    """Whether this process was started by a Ray cluster or pointed at one (`ray job submit`, RAY_ADDRESS)."""
    return bool(os.environ.get("RAY_ADDRESS") or os.environ.get("RAY_JOB_ID"))
