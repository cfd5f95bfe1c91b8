"""The events of a run: the format of `metrics.jsonl`, and reading it, also while the run is live.

One JSON object per line. `epoch` counts from 0, in events, in the terminal, in reports and in exports alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from invdist.config.plain_yaml import dotted, read_yaml
from invdist.runtime.errors import UserError
from invdist.runtime.paths import AnyPath, path_at

if TYPE_CHECKING:
    from invdist.training.checkpoint import Position

Event = dict[str, Any]

METRICS_FILE = "metrics.jsonl"

_NUMBER = (int, float)
_NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "start": {},
    "step": {"epoch": int, "global_step": int, "loss": (*_NUMBER, type(None))},  # null: not finite
    "epoch": {"epoch": int},
    "final": {},
    "warning": {"message": str},
}
"""Required fields of events and their types. Other kinds of events are kept unchecked."""

_MAPPINGS = ("valid", "test", "means", "directions", "seconds_by", "annotations", "dataset", "environment")


def direction_name(multiplier: float) -> str:
    """`direct`, `pass` or `inverse` for the `direction` of a step event, by its sign."""
    return "pass" if multiplier == 0 else "direct" if multiplier < 0 else "inverse"


def epoch_of(position: Position) -> int:
    """The epoch that a checkpoint belongs to, counted from 0 as in events: the last one that took a step."""
    between = (position.phase, position.pass_index, position.step) == (0, 0, 0)
    return max(0, position.epoch - between)


@dataclass(frozen=True)
class History:
    """A run folder as read: events, settings, data set.

    A resumed run repeats the steps after its last checkpoint; the last record of a step or epoch counts.
    """

    path: AnyPath
    events: list[Event]
    """All events as written, repeats included."""
    config: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @classmethod
    def read(cls, run: str | AnyPath) -> History:
        """Reads the folder of a run, finished or under way; `UserError` on anything that is not a run."""
        path = path_at(run)
        if not path.is_dir():
            raise UserError(f"{path}: no such run folder")
        if not (path / METRICS_FILE).is_file():
            raise UserError(f"{path}: not a run folder, it has no {METRICS_FILE}")
        events = read_events(path / METRICS_FILE)
        return cls(
            path=path,
            events=events,
            config=read_yaml(path / "config.yaml") if (path / "config.yaml").is_file() else {},
            dataset=_read_json(path / "dataset.json"),
            name=path.resolve().name,
        )

    def of(self, kind: str) -> list[Event]:
        """All events of one kind, as written."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def start(self) -> Event:
        """The latest `start` event, empty if there is none yet."""
        return (self.of("start") or [{}])[-1]

    @property
    def final(self) -> Event | None:
        """The `final` event; None while the run is under way or if it was interrupted."""
        kinds = [event["event"] for event in self.events]
        if "final" not in kinds or "start" in kinds[_last(kinds, "final") :]:
            return None
        return self.events[_last(kinds, "final")]

    @cached_property
    def steps(self) -> list[Event]:
        """`step` events in order of `global_step`, each step once."""
        kept = {event["global_step"]: event for event in self.of("step")}
        return [kept[step] for step in sorted(kept)]

    @cached_property
    def direction_steps(self) -> list[Event]:
        """The steps that chose a direction: phase 2 of inverse gradient."""
        return [event for event in self.steps if event.get("direction") is not None]

    @cached_property
    def epochs(self) -> list[Event]:
        """`epoch` events in order, each epoch once."""
        kept = {event["epoch"]: event for event in self.of("epoch")}
        return [kept[epoch] for epoch in sorted(kept)]

    @property
    def warnings(self) -> list[str]:
        """Warnings in order, each text once."""
        return list(dict.fromkeys(event["message"] for event in self.of("warning")))

    @property
    def method(self) -> str:
        """The strategy, from the events or the config."""
        return self._named("method")

    @property
    def model(self) -> str:
        """The backbone, from the events or the config."""
        return self._named("model")

    def _named(self, what: str) -> str:
        sources = (self.final or {}, self.start, self.config)
        return str(next((source[what] for source in sources if source.get(what)), "unknown"))

    @property
    def ndcg_k(self) -> int:
        """The cut of NDCG this run was scored with."""
        training = self.config.get("training")
        value = training.get("ndcg_k", 10) if isinstance(training, Mapping) else 10
        return value if isinstance(value, int) else 10


class Tail:
    """Follows a live `metrics.jsonl` from its present end; each line is read once, however long the file grows."""

    def __init__(self, path: AnyPath) -> None:
        self._path = path
        self._offset = end_of_last_line(path)

    def new(self) -> list[Event]:
        """The events written since the last call; a line still being written waits for the next."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        return [json.loads(line) for line in content[:whole].splitlines()]


def end_of_last_line(path: AnyPath) -> int:
    """The offset after the last whole line; what follows is the start of a line, left by a killed writer."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def read_events(path: AnyPath) -> list[Event]:
    """The events of a `metrics.jsonl`.

    A last line without a newline that does not parse is still being written and is left out. Anything else that is
    wrong is a `UserError` with file and line.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    lines = text.split("\n")
    events = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from None
        problem = _problem(event)
        if problem:
            raise UserError(f"{path}, line {number}: {problem}")
        events.append(event)
    return events


def table(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Events flattened for a data frame: nested mappings become dotted columns (`valid.auc`), lists stay."""
    return [dotted(event) for event in events]


def _problem(event: object) -> str | None:
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return 'an event must be a JSON object with a text field "event"'
    kind = event["event"]
    for name, types in _NEEDED.get(kind, {}).items():
        if name not in event:
            return f'the "{kind}" event has no "{name}"'
        if not isinstance(event[name], types) or isinstance(event[name], bool):
            return f'"{name}" of the "{kind}" event has the wrong type: {json.dumps(event[name])[:80]}'
    if kind in _NEEDED:
        for name in _MAPPINGS:
            if event.get(name) is not None and not isinstance(event[name], dict):
                return f'"{name}" of the "{kind}" event must be a JSON object'
    if kind == "step" and event.get("direction") is not None and not isinstance(event["direction"], _NUMBER):
        return '"direction" of the "step" event must be a number'
    return None


def _read_json(path: AnyPath) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be parsed ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a mapping of names to values")
    return value


def _last(kinds: list[str], kind: str) -> int:
    return len(kinds) - 1 - kinds[::-1].index(kind)
