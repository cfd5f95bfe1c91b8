"""Turns a raw log into a prepared data set.

invdist prepare KIND --input PATH... [--onto DIR] --output DIR [--workers N] [key=value ...]
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

from invdist.cli.arguments import split_inputs
from invdist.config.fields import describe
from invdist.config.plain_yaml import read_yaml
from invdist.data.prepare.options import KINDS, Kind, Options, build_options
from invdist.data.prepare.pipeline import finish_rate_text, prepare_log, unit_mistake
from invdist.runtime.errors import UserError, exit_on_user_error
from invdist.runtime.progress import RowProgress


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Prepares a data set and prints its summary."""
    args = _parser().parse_intermixed_args(argv)
    inputs, overrides = split_inputs(args.input, args.overrides)
    mapping = read_yaml(args.config) if args.config else {}
    options = build_options(args.kind, mapping, overrides, source=args.config or "")
    with RowProgress() as progress:
        if args.workers is None:
            manifest = prepare_log(options, inputs, args.output, progress, args.onto)
        else:
            manifest = _on_ray(options, inputs, args, progress)
    print(summary_text(manifest, args.output))
    return 0


def _on_ray(options: Kind, inputs: Sequence[str], args: argparse.Namespace, progress: RowProgress) -> dict[str, Any]:
    """Prepares on the Ray cluster of this process, or on a private one."""
    if args.workers < 0:
        raise UserError(f"--workers {args.workers}: expected 0 or more")
    from invdist.data.prepare.parallel.on_ray import prepare_on_ray
    from invdist.training.ray_backend import connected

    with connected(args.workers) if args.workers else contextlib.nullcontext():
        return prepare_on_ray(options, inputs, args.output, args.workers, progress, onto=args.onto)


def summary_text(manifest: dict[str, Any], path: str) -> str:
    """What was prepared: the columns of the paper's data table, the splits, and what was found in the log."""
    lines = [f"{path} (fingerprint {manifest['fingerprint']})"]
    for name, value in manifest["summary"].items():
        lines.append(f"  {name:<24}{value:>14,}" if isinstance(value, int) else f"  {name:<24}{value:>14.6f}")
    lines.append("rows")
    lines += [f"  {name:<24}{value:>14,}" for name, value in manifest["rows"].items()]
    lines.append("found in the log (rules: docs/data.md)")
    lines += [f"  {name:<24}{value:>14,}" for name, value in manifest["counts"].items() if value]
    if "day" in manifest:
        lines.append(f"day {manifest['day']} of its chain, onto {manifest['ancestors'][-1]}")
        lines += [f"  {name:<24}{value:>14,}" for name, value in manifest["growth"].items() if value]
        lines += drift_lines(manifest["drift"])
    if rates := manifest["finish_rates"]:
        lines.append(f"finish rates: {finish_rate_text(rates)}")
        if mistake := unit_mistake(rates):
            lines.append(f"warning: {mistake}")
    return "\n".join(lines)


def drift_lines(drift: dict[str, dict[str, Any]]) -> list[str]:
    """How the labels of the day came out beside those of the first day, whose rules they follow."""
    lines = []
    for when, found in drift.items():
        parts = [f"positive share {found['positive_share']:.3f}"]
        if found["quartiles"]:
            parts.append("play-time quartiles {:.4g} and {:.4g}".format(*found["quartiles"]))
        if found["finish_rates"]:
            parts.append(f"finish rates {finish_rate_text(found['finish_rates'])}")
        lines.append(f"  labels, {when + ':':<17}{'; '.join(parts)}")
    return lines


def _parser() -> argparse.ArgumentParser:
    common = describe(Options, "  ")
    sections = [f"every kind\n{common}"]
    for name, kind in KINDS.items():
        shared = set(common.splitlines())
        own = "\n".join(line for line in describe(kind, "  ").splitlines() if line not in shared)
        sections.append(f"{name}: {kind.__doc__}\n{own}")
    options = "\n\n".join(sections)
    parser = argparse.ArgumentParser(
        prog="invdist prepare",
        description="Turns a raw log into a prepared data set.",
        epilog=f"options, set as key=value:\n\n{options}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    paths = "files or folders, as paths or URIs (s3://...)"
    parser.add_argument("--input", nargs="+", action="extend", default=[], metavar="PATH", help=paths)
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="the new data set's folder, a path or URI (s3://...)"
    )
    parser.add_argument("--onto", metavar="DIR", help="the data set of the day before, whose ids keep their indices")
    parser.add_argument(
        "--workers",
        type=int,
        help="processes on Ray that share the work, with the same result; 0: the same steps in this process. After an "
        "interruption the same command goes on (default: this process, in two passes that start over)",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of the kind's options")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options that override those of the file")
    return parser
