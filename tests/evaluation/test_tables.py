from __future__ import annotations

from invdist.evaluation.tables import directions_text, duration, final_table, metrics_table
from tests.report.generated import ig_events, metrics


def test_the_final_table_holds_the_final_figures() -> None:
    events = ig_events()
    lines = final_table(events).splitlines()
    assert lines[0].split()[:3] == ["method", "model", "split"]
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


def test_metrics_of_a_split_name_what_people_know_and_no_internals() -> None:
    lines = metrics_table(metrics(0.8, 12_000), ndcg_k=5).splitlines()
    shown = dict(line.split() for line in lines if len(line.split()) == 2)
    assert (shown["AUC"], shown["NDCG@5"], shown["rows"]) == ("0.8000", "0.9500", "12,000")
    assert not any("bound" in line.lower() or "histogram" in line for line in lines)
    estimated = metrics_table({**metrics(0.8, 12_000), "auc_error_bound": 7.6e-6}).splitlines()
    assert estimated[-1] == "AUC is estimated from a histogram of the scores, within 8e-06."
    assert not any("BOUND" in line for line in estimated)


def test_an_estimated_auc_is_a_note_and_no_internal_name() -> None:
    exact, estimated = metrics(0.8, 12_000), {**metrics(0.7, 12_000), "auc_error_bound": 7.6e-6}
    shown = final_table([{"event": "final", "valid": exact, "test": {**exact, "auc_error_bound": 0.0}}])
    assert "estimated" not in shown
    for splits in ({"valid": exact, "test": estimated}, {"valid": estimated, "test": exact}, {"valid": estimated}):
        shown = final_table([{"event": "final", **splits}])
        assert shown.splitlines()[-1] == "AUC is estimated from a histogram of the scores, within 8e-06."
        assert "bound" not in shown.lower()


def test_durations_are_rounded_to_what_people_say() -> None:
    shown = [duration(seconds) for seconds in (3.21, 59.96, 245, 7800)]
    assert shown == ["3.2 s", "1 min 00 s", "4 min 05 s", "2 h 10 min"]


def test_the_means_are_shown_below_the_model() -> None:
    final = {"event": "final", "method": "ig", "model": "gmf", "test": {"auc": 0.6}, "means": {"test": {"auc": 0.75}}}
    lines = final_table([final]).splitlines()
    assert lines[-1].split()[:4] == ["(means)", "-", "test", "0.7500"]
    assert "0.6000" in lines[-2]
