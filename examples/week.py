"""A week of a feed: a model is trained on Monday, grows every day, is measured, and answers over HTTP.

    python examples/week.py [FOLDER] [--days 7] [--rows 60000]

The feed is synthetic: tastes drift, and new users and items come every day. With a log of your own, only `day` changes:
`invdist.prepare_dataset("microvideo", output, "plays.csv", ...)`. Everything is written to FOLDER.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import invdist

FIRST = datetime.date(2026, 1, 1)
SETTINGS = {
    "method": "none",
    "model": "gmf",
    "data": {"batch_size": "auto"},
    "exposures": {"vectors": True},
    "optimizer": {"gamma": "auto"},
    "training": {"epochs": 100, "patience": 3},
    "ray": {"workers": 1},
}


def main() -> None:
    """The week, step by step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="week")
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--rows", type=int, default=60_000, help="labels of the week")
    args = parser.parse_args()
    folder = Path(args.folder).absolute()
    feed = {"preset": "small", "users": 800, "items": 1200, "label_fraction": 1.0, "drift": 0.1, "test_fraction": 0.0}
    feed |= {"labeled_rows": args.rows, "days": args.days}
    days = [str(FIRST + datetime.timedelta(n)) for n in range(args.days)]

    # Monday: prepare and train. From Tuesday on: prepare onto the day before, and go on from its model.
    path = folder / "data" / days[0]
    invdist.prepare_dataset("synthetic", path, until=days[0], **feed)
    run = invdist.train_model({**SETTINGS, "runs": str(folder / "runs")}, f"data.path={path}", f"name={days[0]}")
    for day in days[1:]:
        before, path = path, folder / "data" / day
        # The model learns from new labels and a sample of the older ones; all rows stay as exposures, for the vectors.
        dataset = invdist.prepare_dataset(
            "synthetic", path, onto=before, since=day, until=day, keep=0, older="unclear", **feed
        )
        print(f"{day}: {dataset.manifest['growth']}")
        run = run.grow(f"data.path={path}", f"name={day}")

    # Was that right? Each day scored by models that have not seen it: trained anew, grown, never updated.
    print(rolled(folder, feed, days))

    # The newest model over HTTP, and soft labels for what the labels say nothing of.
    print(asked(run.path, folder / "token"))
    labels = run.annotate(calibrate=True)
    print(f"{labels.num_rows:,} exposures annotated; the first: {labels.slice(0, 1).to_pylist()[0]}")


def rolled(folder: Path, feed: dict[str, Any], days: list[str]) -> str:
    """The table of `invdist roll` over the days after the first."""
    keys = {"name": "week", "output": str(folder / "rolls"), "first": days[1], "last": days[-1], "train": SETTINGS}
    file = folder / "roll.yaml"
    file.write_text(json.dumps({**keys, "data": {"kind": "synthetic", "options": feed}}))  # YAML, too
    subprocess.run([sys.executable, "-m", "invdist", "roll", "--config", str(file)], check=True)
    return (folder / "rolls" / "week" / "results.md").read_text()


def asked(run: Any, token: Path) -> dict[str, Any]:
    """What `invdist serve` answers: the five best items of a user, and what they are worth to another one."""
    command = [sys.executable, "-m", "invdist", "serve", "--run", str(run), "--port", "0", "--token-file", str(token)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(found.group(1) for line in process.stdout if (found := re.search(r" on (http://\S+) ", line)))
        best = post(f"{url}/recommend", token, {"user": 1, "k": 5})
        score = post(f"{url}/score", token, {"user": 2, "item": best["item"]})
        return {"best of user 1": best["item"], "for user 2": score["probability"], "by": score["checkpoint"]}
    finally:
        process.send_signal(signal.SIGINT)  # it ends what it started
        process.wait()


def post(url: str, token: Path, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    headers = {"Authorization": f"Bearer {token.read_text()}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
