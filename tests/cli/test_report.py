from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from invdist.cli.report import main
from tests.report.generated import ig_events, metrics, write_run

SECTIONS = [
    "Results",
    "Curves",
    "Directions",
    "Annotations",
    "Speed",
    "Data",
    "Sharding plan",
    "Config",
    "Environment",
]


class Reader(HTMLParser):
    """Collects headings, addresses the page would load, and the text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        if self._open == "h2" and data.strip():
            self.headings.append(data)
        if self._open not in ("script", "style"):
            self.text.append(data)


def test_the_report_is_whole_and_asks_nothing_of_a_network(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ig_events())
    assert main(["--run", str(run)]) == 0
    page = Reader((run / "report.html").read_text())
    assert page.headings == SECTIONS
    assert page.addresses == ["data:,"]
    assert not [name for name in os.listdir(run) if name.startswith(".")]
    text = " ".join(page.text)
    for shown in ("0.7930", "row_wise", "table_wise", "abc123", "data.batch_size", "2.13.0+cpu", "1 min 15 s"):
        assert shown in text
    for shown in ("rank 1: rows 3,020 to 6,039", "Planner Statistics", "2026-11-16 02:07:28 UTC"):
        assert shown in text
    assert "no run of the method `means`" in text.lower()


def test_runs_are_shown_beside_each_other(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a" / "ig", ig_events())
    same_name = write_run(tmp_path / "b" / "ig", ig_events(seed=1), seed=7)
    floor = [
        {"event": "start"},
        {"event": "final", "method": "means", "model": "gmf", "test": metrics(0.75, 2000)},
    ]
    means = write_run(tmp_path / "means", floor, method="means")
    output = tmp_path / "out.html"
    assert main(["--run", str(run), "--compare", str(same_name), str(means), "--output", str(output)]) == 0
    text = output.read_text()
    page = Reader(text)
    assert "ig (2)" in page.text
    assert "no run of the method" not in " ".join(page.text).lower()
    assert re.search(r"0\.7500<small>-0\.0430</small>", text)
    assert 'class="differs"><td>seed</td>' in text
    assert not (run / "report.html").exists()


def test_a_live_run_is_reported_and_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ig_events()[:-1])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "epo')
    assert main(["--run", str(run)]) == 0
    assert "not finished: 3 epochs so far" in (run / "report.html").read_text()


def test_a_run_that_only_started_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"event": "start"}])
    assert main(["--run", str(run)]) == 0
    assert "No epoch has finished yet" in (run / "report.html").read_text()


def test_text_of_a_run_cannot_become_markup(tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    events = ig_events()
    events[0] |= {"device": bad, "environment": {bad: bad}, "plan": [{"table": bad, "shards": [bad]}]}
    events[1]["phase"] = bad
    events[-1] |= {"method": bad, "model": bad}
    next(event for event in events if event["event"] == "epoch")["seconds_by"][bad] = 1.0
    events.append({"event": "warning", "message": bad})
    run = write_run(tmp_path / "<img src=y>", events, method=bad, note={bad: bad})
    assert main(["--run", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert "alert(1)" in text
    assert "<script>alert" not in text
    assert "</script><script>alert" not in text
    assert "<img" not in text.replace(_plotly(), "")


def test_diverged_losses_are_drawn_as_gaps(tmp_path: Path) -> None:
    events = ig_events()
    events[2]["loss"] = float("nan")
    events[3]["loss"] = float("inf")
    run = write_run(tmp_path / "run", events)
    assert main(["--run", str(run)]) == 0
    data = (run / "report.html").read_text().split('id="figures">')[1].split("</script>")[0]
    assert "NaN" not in data
    assert "Infinity" not in data


def test_directions_are_drawn_as_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", ig_events(epochs=2, test_steps=30))
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    assert main(["--run", str(run), "--directions", str(first)]) == 0
    assert main(["--run", str(run), "--directions", str(second)]) == 0
    picture = first.read_text()
    assert picture == second.read_text()
    for text in (">direct<", ">pass<", ">inverse<", ">training-test loss<"):
        assert text in picture
    # Markers are references to one shape for each direction: 60 steps, three in the legend.
    tree = ElementTree.fromstring(picture)
    shapes = [use for use in tree.iter("{http://www.w3.org/2000/svg}use") if "fill-opacity" in use.get("style", "")]
    assert len(shapes) == 60 + 3
    assert not (run / "report.html").exists()
    plain = write_run(tmp_path / "plain", ig_events(test_steps=0))
    assert main(["--run", str(plain), "--directions", str(first)]) == 2
    assert "no step of this run chose a direction" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run", "{tmp}/none"], "no such run folder"),
        (["--run", "{run}", "--compare", "{tmp}"], "not a run folder"),
        (["--run", "{run}", "--output", "{tmp}/no/such/file.html"], "does not exist"),
        (["--run", "{run}", "--output", "{tmp}"], "is a folder"),
        (["--run", "{run}", "--directions", "{tmp}/timeline.pdf"], "ending in .html, .svg, .png"),
    ],
)
def test_bad_input_is_one_clear_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    run = write_run(tmp_path / "run", ig_events())
    assert main([text.format(tmp=tmp_path, run=run) for text in arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert said in shown
    assert len(shown.splitlines()) == 1


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def test_the_time_of_learning_exposure_vectors_is_shown(tmp_path: Path) -> None:
    product = {"event": "vectors", "products": 2, "exposures": 9, "seconds": 37.5, "time": 0.0}
    damaged = product | {"product": 3, "seconds": "long"}
    run = write_run(tmp_path / "run", [product | {"product": 1}, product | {"product": 2}, damaged, *ig_events()])
    assert main(["--run", str(run)]) == 0
    text = " ".join(Reader((run / "report.html").read_text()).text)
    assert re.search(r"1 min 15 s\s+learning exposure vectors", text)
    other = write_run(tmp_path / "other", ig_events())
    assert main(["--run", str(other)]) == 0
    assert "exposure vectors" not in (other / "report.html").read_text()
