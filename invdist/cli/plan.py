"""`invdist plan`: memory, bytes and time of a run on a GPU cluster, estimated on any machine."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import fields

from invdist.embeddings.placement import GIB, MEMORIES, SHARDINGS
from invdist.planning.estimate import estimate, sweep
from invdist.planning.job import OPTIMIZER_FLOATS, Hardware, Job
from invdist.planning.text import estimate_text, sweep_text
from invdist.runtime.errors import UserError, exit_on_user_error

_SWEPT = ("gpus", "users", "items", "dim", "batch", "rate", "candidates")
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_MOST_POINTS = 100

_HARDWARE = {
    "intra": ("intra", GIB, "GiB/s between GPUs of a node"),
    "inter": ("inter", GIB, "GiB/s of a GPU to other nodes"),
    "memory": ("memory", GIB, "GiB/s of a GPU's memory"),
    "host_link": ("host_link", GIB, "GiB/s between a GPU and its node's memory, for --tables uvm"),
    "tflops": ("flops", 1e12, "TFLOP/s that the tower reaches"),
    "operator_us": ("operator_s", 1e-6, "microseconds to launch an operator"),
    "collective_us": ("collective_s", 1e-6, "microseconds to start a collective"),
    "peer_us": ("peer_s", 1e-6, "microseconds per peer of an all-to-all"),
}
"""Options about the assumed hardware: the field of `Hardware`, the unit, and what it is."""


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan, or a line for each value of a sweep."""
    args = _parser().parse_args(argv)
    if args.figure and not args.sweep:
        raise UserError("--figure draws a sweep: give one, such as --sweep gpus=8..1024")
    job = _job(args)
    if not args.sweep:
        found = estimate(job)
        print(json.dumps(found.values()) if args.json else estimate_text(found))
        return 0
    if args.figure:
        from invdist.planning.figure import sweep_figure
        from invdist.report.pictures import check_picture, save_figure

        check_picture(args.figure)
    name, values = _sweep_values(args.sweep)
    results = sweep(job, name, values, args.batch_per_gpu if name == "gpus" else None)
    if args.figure:
        save_figure(sweep_figure(name, results), args.figure)
    if args.json:
        lines = [(value, {"error": str(r)} if isinstance(r, UserError) else r.values()) for value, r in results]
        print(json.dumps([{name: value} | line for value, line in lines]))
    else:
        print(sweep_text(name, results))
    return 0


def _parser() -> argparse.ArgumentParser:
    known = Hardware()
    parser = argparse.ArgumentParser(
        prog="invdist plan", description=__doc__, epilog="Numbers may be written as 37692, 37,692, 1e9, 100M or 1B."
    )
    add = parser.add_argument
    add("--users", type=_count, required=True, metavar="N")
    add("--items", type=_count, required=True, metavar="M")
    add("--dim", type=_count, default=32, metavar="D", help="k of the paper (default: 32)")
    add("--gpus", type=_count, required=True, metavar="G")
    add("--hbm", type=_bytes, default=known.hbm, metavar="80GB", help="memory of a GPU, in GiB (default: 80GB)")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--batch",
        type=_count,
        default=65_536,
        metavar="B",
        help="labeled interactions per step over all GPUs (default: 65,536)",
    )
    batch.add_argument("--batch-per-gpu", type=_count, metavar="B", help="the same per GPU, kept in a sweep of gpus")
    add("--model", default="gmf", help="gmf or neumf (default: gmf)")
    add("--exposure-dim", type=_count, default=0, metavar="D", help="columns of exposure vectors (default: 0, none)")
    add("--rate", type=_count, default=1, help="unlabeled pairs per training-test interaction (default: 1)")
    add("--candidates", type=_count, default=3, help="multipliers that are tried (default: 3)")
    add("--optimizer", choices=sorted(OPTIMIZER_FLOATS), default="adam", help="of the table rows (default: adam)")
    add(
        "--sharding",
        choices=SHARDINGS,
        default="auto",
        help="auto lets the planner choose row-wise or table-wise for each table",
    )
    add("--item-sharding", choices=SHARDINGS, help="of the items, if not as the users: data_parallel replicates them")
    add(
        "--tables",
        choices=MEMORIES,
        default="device",
        help="where tables are: uvm is unified memory, auto only if they do not fit the GPUs (default: device)",
    )
    add("--rows", type=_count, metavar="R", help="labeled training interactions: adds the time of an epoch")
    add("--test-share", type=float, default=0.1, help="share of them that is training-test (default: 0.1)")
    add("--sweep", metavar="NAME=A..B", help=f"doubles ({'|'.join(_SWEPT)}) from A to B; or A..B*10, or A,B,C")
    add("--figure", metavar="FILE", help="draw the sweep into this .html, .svg or .png file")
    add("--json", action="store_true", help="print JSON and nothing else")
    add = parser.add_argument_group("assumed hardware (bandwidths: defaults of TorchRec's planner)").add_argument
    add(
        "--ddr",
        type=_bytes,
        default=known.ddr,
        metavar="512GB",
        help="memory of a node for --tables uvm (default: 512GB)",
    )
    add("--reserve", type=float, default=known.reserve, help="share of memory kept free (default: %(default)s)")
    add("--gpus-per-node", type=_count, default=known.gpus_per_node, help="(default: %(default)s)")
    for name, (field, unit, what) in _HARDWARE.items():
        value = round(getattr(known, field) / unit, 6)
        add(f"--{name.replace('_', '-')}", type=float, default=value, help=f"{what} (default: %(default)g)")
    return parser


def _job(args: argparse.Namespace) -> Job:
    for name in ("intra", "inter", "memory", "host_link", "tflops"):
        if not getattr(args, name) > 0:
            raise UserError(f"--{name.replace('_', '-')} must be above 0, not {getattr(args, name):g}")
    if not 0 <= args.reserve < 1:
        raise UserError(f"--reserve is a share from 0 up to 1, not {args.reserve:g}")
    if args.gpus_per_node < 1:
        raise UserError(f"--gpus-per-node must be at least 1, not {args.gpus_per_node}")
    given = vars(args)
    assumed = {field: round(given[name] * unit, 12) for name, (field, unit, _) in _HARDWARE.items()}
    assumed |= {name: given[name] for name in ("hbm", "ddr", "reserve", "gpus_per_node")}
    asked = {field.name: given[field.name] for field in fields(Job) if field.name in given}
    if args.batch_per_gpu is not None:
        asked["batch"] = args.batch_per_gpu * args.gpus
    return Job(**asked, hardware=Hardware(**assumed))


def _sweep_values(text: str) -> tuple[str, list[int]]:
    name, found, values = text.partition("=")
    if not found or name not in _SWEPT:
        raise UserError(f"--sweep {text}: expected NAME=A..B with NAME one of {', '.join(_SWEPT)}")
    try:
        if ".." not in values:
            return name, [_count(value) for value in values.split(",")]
        first, _, rest = values.partition("..")
        last, _, factor = rest.partition("*")
        low, high, times = _count(first), _count(last), float(factor or 2)
    except (ValueError, argparse.ArgumentTypeError):
        raise UserError(f"--sweep {text}: expected {name}=A..B, {name}=A..B*10 or {name}=A,B,C") from None
    if low < 1 or high < low or times <= 1:
        raise UserError(f"--sweep {text}: expected A from 1 up, B no less than A, and a factor above 1")
    points = [low]
    while points[-1] * times <= high and len(points) <= _MOST_POINTS:
        points.append(max(points[-1] + 1, round(points[-1] * times)))
    if len(points) > _MOST_POINTS:
        raise UserError(f"--sweep {text}: more than {_MOST_POINTS} values; use a larger factor, such as A..B*2")
    return name, points


def _count(text: str) -> int:
    match = re.fullmatch(r"([0-9][0-9_,]*\.?[0-9]*(?:e[0-9]+)?)([kmb]?)", text.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 37692, 1e9 or 100M")
    value = float(match[1].replace(",", "").replace("_", "")) * _SUFFIXES[match[2]]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def _bytes(text: str) -> float:
    match = re.fullmatch(r"([0-9]+\.?[0-9]*)\s*(?:g|gb|gib)?", text.strip().lower())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a memory size such as 80GB")
    return float(match[1]) * GIB
