"""Writes soft labels of unclear exposures, or of any user-item pairs, with a run.

invdist annotate --run RUN --output DIR                      the unclear exposures of the run's data set
invdist annotate --run RUN --input LOG.csv --output DIR      pairs of raw ids, CSV or parquet

After an interruption the same command continues: finished parts are kept in DIR.partial.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from invdist.cli import arguments
from invdist.runtime.errors import UserError, exit_on_user_error

if TYPE_CHECKING:
    from invdist.serving.annotation import Work
    from invdist.serving.sharded.workers import Workers


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Annotates, and prints row counts and, where truth is known, how good the annotations are."""
    parser = argparse.ArgumentParser(prog="invdist annotate", description=__doc__)
    arguments.add_run(parser)
    parser.add_argument(
        "--input",
        nargs="+",
        default=[],
        metavar="PATH",
        help="files of pairs, folders of such files, or the prepared data set of the run (the default)",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the new folder of annotations")
    arguments.add_pairs(parser)
    parser.add_argument("--threshold", type=float, help="w1 from which the hard label is 1 (default: 0.5)")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="choose the threshold with the best F1 on half of the validation rows, and measure it on the other half",
    )
    parser.add_argument("--precision", type=float, help="with --calibrate: the lowest threshold of this precision")
    arguments.add_tables(parser, whole_on_ray=True)
    parser.add_argument("--part-rows", type=int, default=1 << 20, help="rows per part of the output, about")
    args = parser.parse_intermixed_args(argv)
    _check(args)
    inputs, overrides = arguments.split_inputs(args.input, args.overrides)

    from invdist.runtime.progress import ProgressLine
    from invdist.serving.annotation import AnnotationJob
    from invdist.serving.calibration import calibrate
    from invdist.serving.inputs import open_source
    from invdist.serving.output import check_free

    check_free(args.output)
    with arguments.opened(args, overrides, whole_on_ray=True) as (run, workers):
        source = open_source(run, inputs or [run.config.data.path], args.user_column, args.item_column, args.part_rows)
        calibration = calibrate(run.model, run.dataset, args.precision) if args.calibrate else None
        threshold = calibration.threshold if calibration else 0.5 if args.threshold is None else args.threshold
        figures = calibration.as_dict() if calibration else None
        if figures:
            print(_calibration_text(figures))
        job = AnnotationJob(run, source, args.output, threshold, args.unknown, figures)
        with ProgressLine() as line:

            def progress(done: int, parts: int, rows: int) -> None:
                line.show(f"{done} of {parts} parts, {rows:,} rows", done, parts)

            manifest = job.execute(_work(args.workers, workers), progress)
    counts = manifest["counts"]
    print(arguments.counts_text(counts, args.unknown))
    print(f"{counts['annotated']:,} annotated, {counts['positive']:,} of them positive (w1 >= {threshold:.4g})")
    if manifest.get("auc") is not None:
        print(f"annotation AUC against the known truth: {manifest['auc']:.4f}")
    print(args.output)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.calibrate and args.threshold is not None:
        raise UserError("--threshold and --calibrate both choose the threshold; give one of them")
    if args.precision is not None and not args.calibrate:
        raise UserError("--precision says how --calibrate chooses; give both")
    for name in ("threshold", "precision"):
        value = getattr(args, name)
        if value is not None and not 0 <= value <= 1:
            raise UserError(f"--{name} {value:g}: expected 0 to 1")
    if args.part_rows < 1:
        raise UserError(f"--part-rows {args.part_rows}: expected at least 1")


def _work(count: int | None, workers: Workers | None) -> Work:
    """Work on the workers that hold the run; here; or on the Ray cluster of this process, or a private one."""
    if workers is not None:
        from invdist.serving.sharded.jobs import annotate_on_workers

        return annotate_on_workers(workers)
    if count == 0:
        from invdist.serving.annotation import in_this_process

        return in_this_process

    def work(parts, source, annotator, folder) -> Iterator[int]:
        from invdist.serving.annotation_on_ray import annotate_on_ray
        from invdist.training.ray_backend import connected

        with connected(count):
            yield from annotate_on_ray(parts, source, annotator, folder, count)

    return work


def _calibration_text(figures: dict) -> str:
    lines = [f"threshold {figures['threshold']:.4f}"]
    for name, title in (("chosen_on", "chosen on"), ("measured_on", "measured on")):
        quality = figures[name]
        values = ", ".join(
            f"{metric} {'-' if quality[metric] is None else format(quality[metric], '.4f')}"
            for metric in ("precision", "recall", "f1", "accuracy")
        )
        lines.append(f"  {title:<11} {quality['rows']:>9,} validation rows: {values}")
    return "\n".join(lines)
