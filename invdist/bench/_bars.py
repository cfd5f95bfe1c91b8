"""What the figures should reach, and whether they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from invdist.bench import epoch, exchange, peers, ranks


@dataclass(frozen=True)
class Bar:
    """One goal: what is measured, where, and the value that it should reach."""

    what: str
    source: str
    """The name in the plan of `_all.py`."""
    value: Callable[[Mapping[str, Any]], float]
    goal: float
    most: bool = False
    """Whether the goal is an upper limit."""

    def met(self, value: float) -> bool:
        """Whether a value reaches the goal."""
        return value <= self.goal if self.most else value >= self.goal


def _bars() -> Iterator[Bar]:
    names = {"gmf": "GMF, 1,024", "gmf_8192": "GMF, 8,192", "neumf": "NeuMF, 1,024"}
    peer_names = {"recbole": "RecBole", "torch_loop": "the PyTorch loop", "torchrec": "TorchRec's pipeline"}
    for case, goals in peers.GOALS.items():
        for peer, goal in goals.items():
            what = f"rows/s over those of {peer_names[peer]} ({names[case]})"
            yield Bar(what, "peers", lambda f, case=case, peer=peer: f["times_peers"][case][peer], goal)
    for case in ("gmf", "neumf"):
        what = f"epoch of `ig` over one of `none` ({names[case]})"
        yield Bar(what, "peers", lambda f, case=case: f["ig_epoch_vs_none"][case], peers.IG_EPOCH_GOAL, most=True)
    for batch in (1024, 8192):
        what = f"files to weights over in-memory (GMF, {batch:,})"
        yield Bar(what, "epoch", lambda f, batch=batch: f[f"ratio_{batch}"], epoch.RATIO_GOAL)
        what = f"share of an epoch that waits for input (GMF, {batch:,})"
        yield Bar(what, "epoch", lambda f, batch=batch: f[f"waiting_for_input_{batch}"], epoch.WAITING_GOAL, most=True)
    for batch in (1024, 8192):
        for suffix, kind in (("", "plain"), ("_ig", "IG")):
            key = f"weak_scaling_{batch}"
            what = f"weak scaling of two ranks, {kind} ({batch:,} a rank)"
            yield Bar(what, "ranks", lambda f, key=key + suffix: f[key], ranks.GOALS[key])
    for batch in (1024, 8192):
        key = f"strong_scaling_{batch}"
        what = f"two workers over one, global batch {batch:,}, files to weights"
        yield Bar(what, "strong", lambda f, key=key: f[key], ranks.GOALS[key])
    for size, goal in exchange.GOALS.items():
        what = f"host time of an exchange at {size:,} ranks, ms"
        yield Bar(what, "exchange", lambda f, size=size: f[f"ms_{size}_ranks"], goal, most=True)
    for name, goal in (("step_1024", 0.4), ("step_8192", 0.3)):
        what = f"GMF plain step over TorchRec's fused step ({int(name[5:]):,})"
        yield Bar(what, name, lambda f: f["plain_vs_fused"], goal, most=True)
    for name, goal in (("step_1024", 0.8e6), ("step_8192", 1.4e6)):
        what = f"GMF rows/s of plain steps on one core ({int(name[5:]):,})"
        yield Bar(what, name, lambda f: f["batch"] / f["plain_ms"] * 1e3, goal)
    for name in ("step_1024", "step_8192", "step_65536"):
        yield Bar(f"GMF IG step over two plain steps ({int(name[5:]):,})", name, lambda f: f["ratio"], 1.1, most=True)
    yield Bar("GMF 7 candidates over 3 (1,024)", "step_1024", lambda f: f["candidates7_vs_3"], 1.1, most=True)
    yield Bar("NeuMF plain step over fused (1,024)", "neumf_1024", lambda f: f["plain_vs_fused"], 0.6, most=True)
    yield Bar("NeuMF IG step over two plain steps (1,024)", "neumf_1024", lambda f: f["ratio"], 1.2, most=True)
    yield Bar("NeuMF 7 candidates over 3 (1,024)", "neumf_1024", lambda f: f["candidates7_vs_3"], 1.15, most=True)
    yield Bar("IG step at 20 M table rows over 0.2 M", "scale", lambda f: f["time_ratio"], 1.25, most=True)
    yield Bar("memory of `ig` over that of `none`", "scale", lambda f: f["memory_ratio"], 1.02, most=True)


BARS = tuple(_bars())
