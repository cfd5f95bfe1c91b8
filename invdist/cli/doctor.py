"""Shows what is installed and what works on this machine, and how to fix the rest.

Each check runs in its own process, so that a crash or a hang is reported like any other failure.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from invdist.runtime.install import installed, stack_problem

PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "ray", "pyarrow", "numpy")


@dataclass(frozen=True)
class Check:
    """Something that must work here: `run` describes what it found, or raises."""

    title: str
    run: Callable[[], str]
    advice: str
    seconds: float = 180.0


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the findings; returns 0 if everything works, else 1."""
    parser = argparse.ArgumentParser(prog="invdist doctor", description=__doc__)
    parser.add_argument("--check", choices=CHECKS, help="run this check alone, in this process")
    args = parser.parse_args(argv)
    if args.check:
        print(CHECKS[args.check].run())
        return 0
    print(f"{'python':<16} {sys.version.split()[0]} ({sys.executable})")
    for package in ("invdist", *PACKAGES):
        print(f"{package:<16} {installed(package) or '-'}")
    print()
    problem = stack_problem()
    _print_finding("stack", problem is None, problem or "the versions work together")
    if problem is not None:
        return 1
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        findings = pool.map(lambda item: _examine(*item), CHECKS.items())
        results = [_print_finding(*finding) for finding in findings]
    return 0 if all(results) else 1


def _examine(name: str, check: Check) -> tuple[str, bool, str]:
    """Runs one check in a new process: its title, whether it works, and a text for the user."""
    command = [sys.executable, "-m", "invdist", "doctor", "--check", name]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=check.seconds)
        good, seen = done.returncode == 0, (done.stdout if done.returncode == 0 else done.stderr).strip()
    except subprocess.TimeoutExpired:
        good, seen = False, f"no answer within {check.seconds:.0f} s"
    last = seen.splitlines()[-1] if seen else "ended without output"
    if good:
        return check.title, True, f"{last} ({time.monotonic() - started:.1f} s)"
    return check.title, False, f"{last}\n{'':<22}-> {check.advice}"


def _print_finding(title: str, good: bool, text: str) -> bool:
    print(f"{'ok' if good else 'WRONG':<5} {title:<15} {text}", flush=True)
    return good


def _device() -> str:
    import torch

    from invdist.embeddings.kernels import native

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return f"cuda with nccl: {torch.cuda.device_count()} x {', '.join(sorted(names))}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"cpu with gloo: {cores} cores, {native().said}"


def _ray() -> str:
    from invdist.runtime.private_ray import private_ray

    with private_ray(1) as head:
        import ray

        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        answer = ray.get(ray.remote(lambda: 6 * 7).remote(), timeout=60)
        ray.shutdown()
        assert answer == 42, f"a task returned {answer}"
        return f"a private Ray started on {head.address} and ran a task"


def _lookup() -> str:
    import torch
    import torch.distributed as dist

    from invdist.embeddings.exchange import Pairs
    from invdist.models.build import ModelSpec, build_recommender

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            model = build_recommender(ModelSpec(users=100, items=50), device)
            user, item = torch.arange(100, device=device), torch.arange(100, device=device) % 50
            backwards = torch.arange(99, -1, -1, device=device)
            scores = model.score(Pairs(user, item))
            assert torch.equal(model.score(Pairs(user[backwards], item[backwards])), scores[backwards])
            assert scores.unique().numel() == 100, "rows are not distinct"
        finally:
            dist.destroy_process_group()
    return f"sharded tables were placed, initialized and looked up on {device.type}"


CHECKS = {
    "device": Check(
        "device",
        _device,
        "torch cannot be imported: install the exact version again, as launch/_setup.sh does",
    ),
    "ray": Check(
        "ray",
        _ray,
        "free space in /dev/shm and in the temporary folder, allow connections to 127.0.0.1, and unset the "
        "RAY_* variables of other clusters",
    ),
    "lookup": Check(
        "sharded lookup",
        _lookup,
        "fbgemm does not fit this machine: fbgemm-gpu-cpu without a GPU, fbgemm-gpu with one, never both",
    ),
}
