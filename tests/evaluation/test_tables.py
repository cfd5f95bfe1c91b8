from __future__ import annotations

from invdist.evaluation.tables import directions_text, final_table
from tests.report.generated import ig_events


def test_the_final_table_holds_the_final_figures() -> None:
    events = ig_events()
    lines = final_table(events).splitlines()
    assert lines[0].split()[:3] == ["method", "model", "rows"]
    assert "NDCG@10" in lines[0]
    test = next(line for line in lines if " test " in line)
    for text in ("ig", "gmf", "0.7930", "0.7430", "0.9430", "0.6930", "123,457", "direct", "pass", "inverse"):
        assert text in test
    assert max(map(len, lines)) <= 130


def test_a_run_without_end_or_metrics_is_said() -> None:
    assert "not finished" in final_table(ig_events()[:-1])
    lines = final_table([{"event": "final", "method": "means", "test": {"auc": float("nan")}}]).splitlines()
    assert lines[-1].split() == ["means", "-", "test", *["-"] * 7]


def test_names_cannot_reach_the_terminal_as_codes_or_markup() -> None:
    shown = final_table([{"event": "final", "method": "\x1b[31m[red]x[/red]", "test": {"auc": 0.5}}])
    assert "\x1b" not in shown
    assert "[red]x[/red]" in shown


def test_directions_as_shares() -> None:
    assert directions_text({"direct": 1, "pass": 2, "inverse": 1}) == "direct 25%  pass 50%  inverse 25%"
    assert directions_text({}) == directions_text(None) == "-"
