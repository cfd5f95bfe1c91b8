"""The report as a reader sees it, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from invdist.report.page import write_report
from tests.report.browser import Browser, find_chromium
from tests.report.generated import ig_events, metrics, write_run

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium here: install `chromium`, or name it in $INVDIST_CHROMIUM"
)

EPOCHS, TRAIN_STEPS, TEST_STEPS = 4, 10, 25
FIGURES = {
    "loss",
    "metrics",
    "timeline",
    "directions",
    "w1",
    "w0",
    "annotation-auc",
    "reliability",
    "time",
    "throughput",
}
READY = "document.documentElement.dataset.ready !== undefined"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    events = ig_events(EPOCHS, TRAIN_STEPS, TEST_STEPS)
    events.insert(1, {"event": "warning", "message": "3 users <b>only</b>"})
    run = write_run(folder / "a-run-with-a-rather-long-name-of-its-own-20261116-021500", events)
    plain = ig_events(EPOCHS, TRAIN_STEPS, 0, seed=1)
    plain[-1]["method"] = "none"
    other = write_run(folder / "none", plain, method="none")
    floor = [
        {"event": "start"},
        {"event": "final", "method": "means", "model": "gmf", "test": metrics(0.75, 2000)},
    ]
    report = write_report(run, [other, write_run(folder / "means", floor, method="means")])
    return Path(str(report)).as_uri()


def points(page: Any, figure: str) -> int:
    """How many marks the browser drew, counted in the picture itself."""
    return page.evaluate(f"document.querySelectorAll('#{figure} path.point, #{figure} .points .point path').length")


@pytest.mark.parametrize(("width", "phone", "dark"), [(1400, False, False), (400, True, True)])
def test_the_report_reads_well(
    browser: Browser, report: str, width: int, phone: bool, dark: bool, tmp_path: Path
) -> None:
    page = browser.open(report, width, 900, dark=dark, phone=phone)
    page.wait(READY)
    assert page.problems == []
    assert [address for address in page.requests if not address.startswith("data:")] == [report]

    drawn = page.evaluate("Array.from(document.querySelectorAll('.plot.js-plotly-plot')).map((plot) => plot.id)")
    assert set(drawn) == FIGURES
    assert points(page, "timeline") == EPOCHS * TEST_STEPS
    assert points(page, "directions") == EPOCHS * 3
    assert points(page, "w1") == points(page, "w0") == 2 * 20
    assert points(page, "annotation-auc") == EPOCHS
    assert points(page, "reliability") == 10
    assert points(page, "time") == EPOCHS * 6
    assert points(page, "throughput") == EPOCHS * 2
    assert points(page, "metrics") == EPOCHS * 2  # AUC of two runs; the other metrics wait in the legend

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    edges = "Array.from(document.querySelectorAll('.plot')).map((p) => p.getBoundingClientRect().right)"
    assert max(page.evaluate(edges)) <= width
    heights = page.evaluate("Array.from(document.querySelectorAll('.plot')).map((p) => p._fullLayout._size.h)")
    assert min(heights) > 120  # neither legend nor margins may eat the figure
    assert (luminance(page, "body", "background-color") < 0.2) == dark
    assert (luminance(page, "#timeline .xtick text", "fill") > 0.6) == dark

    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_the_theme_can_be_switched(browser: Browser, report: str) -> None:
    page = browser.open(report, 1400, 900)
    page.wait(READY)
    page.evaluate("document.getElementById('theme').click()")
    page.wait("getComputedStyle(document.querySelector('#timeline .xtick text')).fill !== 'rgb(27, 31, 36)'")
    assert luminance(page, "body", "background-color") < 0.2
    assert luminance(page, "#timeline .xtick text", "fill") > 0.6
    assert page.problems == []


def test_a_series_can_be_hidden_and_nothing_is_sent_anywhere(browser: Browser, report: str) -> None:
    page = browser.open(report, 1400, 900)
    page.wait(READY)
    inverse = page.evaluate(
        "document.querySelector('#timeline').data.filter((trace) => trace.name === 'inverse')[0].x.length"
    )
    page.evaluate("Plotly.restyle('timeline', {visible: 'legendonly'}, [2]).then(() => 0)")
    assert points(page, "timeline") == EPOCHS * TEST_STEPS - inverse
    buttons = page.evaluate("Array.from(document.querySelectorAll('.modebar-btn')).map((b) => b.dataset.title)")
    assert set(buttons) == {"Download plot as a PNG", "Zoom", "Pan", "Reset axes"}


def test_a_script_in_a_name_does_not_run(browser: Browser, tmp_path: Path) -> None:
    bad = "</script><script>document.title='caught'</script><img src=x onerror=\"document.title='caught'\">"
    events = ig_events()
    events[1]["phase"] = bad
    events[-1]["method"] = bad
    events.append({"event": "warning", "message": bad})
    report = Path(str(write_report(write_run(tmp_path / "run", events, note=bad))))
    page = browser.open(report.as_uri())
    page.wait(READY)
    assert page.evaluate("document.title") == "run · invdist"
    assert page.problems == []
    assert page.requests == [report.as_uri()]


def luminance(page: Any, element: str, style: str) -> float:
    """How light a colour of an element is, from 0 (black) to 1 (white)."""
    text = page.evaluate(f"getComputedStyle(document.querySelector({element!r}))[{style!r}]")
    red, green, blue = (float(part) for part in text.split("(")[1].rstrip(")").split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255
