"""What a request may hold, and what is said about one that holds something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import pyarrow as pa
from annotated_types import Ge, Le, MaxLen
from pydantic import ValidationError

from invdist.config.fields import Section

_LONGEST_ID = 256
_Number = Annotated[int, Ge(-(2**63)), Le(2**63 - 1)]
_Text = Annotated[str, MaxLen(_LONGEST_ID)]
Ids = list[_Number] | list[_Text]
_IDS = f"whole numbers of 64 bits, or texts of at most {_LONGEST_ID} characters, in one list"


class RequestError(Exception):
    """A request that cannot be answered: the status of the response, and what is wrong."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for."""

    body_bytes: int = 1 << 20
    """Bytes of a body."""
    rows: int = 10_000
    """Pairs to score or annotate, and rows of recommendations (users times k)."""
    seconds: float = 10.0
    """Time from the first byte to the answer."""


class ScoreRequest(Section):
    """Pairs of raw ids. One user may stand for all items."""

    user: _Number | _Text | Ids
    """Raw id of one user, or a list with one for each item."""
    item: Ids
    """Raw ids of items."""
    unknown: Literal["null", "prior", "drop"] = "null"
    """Pairs that the run does not know: a row without a score, a row with the prior as its score, or no row."""

    def pairs(self, limits: Limits) -> tuple[pa.Array, pa.Array]:
        """(users, items) of equal length; `RequestError` if the lengths differ or are too large."""
        _check_rows("item", len(self.item), limits)
        users = self.user if isinstance(self.user, list) else [self.user] * len(self.item)
        if len(users) != len(self.item):
            raise RequestError(422, f"user has {len(users)} ids, item has {len(self.item)}: expected one user per item")
        return id_array(users), id_array(self.item)


class AnnotateRequest(ScoreRequest):
    """Pairs to annotate."""

    threshold: Annotated[float, Ge(0), Le(1)] = 0.5
    """The label is 1 where w1 is at least this."""


class RecommendRequest(Section):
    """Users to recommend items to."""

    user: _Number | _Text | Ids
    """Raw id of one user, or a list of them."""
    k: Annotated[int, Ge(1), Le(1_000_000)] = 10
    """Items per user."""
    seen: Literal["leave_out", "keep"] = "leave_out"
    """What to do with items that the user has among the labels of training."""
    unknown: Literal["null", "drop"] = "null"
    """Users that the run does not know: one row without an item, or no row."""

    def users(self, limits: Limits) -> pa.Array:
        """The users; `RequestError` if they ask for too many rows."""
        users = self.user if isinstance(self.user, list) else [self.user]
        _check_rows("user times k", len(users) * self.k, limits)
        return id_array(users)


Request = TypeVar("Request", bound=Section)

_EXPECTED = {
    "user": f"one raw id, or {_IDS}",
    "item": _IDS,
    "k": "a whole number of at least 1",
    "threshold": "a number from 0 to 1",
    "seen": "leave_out or keep",
}


def parse(kind: type[Request], body: bytes) -> Request:
    """The request in a body; `RequestError` that names the field, what it has and what would be right."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problem = min(error.errors(include_url=False, include_context=False), key=lambda found: -len(found["loc"]))
    except (RecursionError, ValueError) as error:
        raise RequestError(400, f"the body is not JSON: {str(error)[:200]}") from None
    names = list(kind.model_fields)
    if not problem["loc"]:
        if problem["type"] == "json_invalid":
            raise RequestError(400, f"the body is not JSON: {problem['msg'].removeprefix('Invalid JSON: ')}")
        raise RequestError(422, f"expected a JSON object with {', '.join(names)}, not {_short(problem['input'])}")
    field = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        raise RequestError(422, f"there is no field {field[:80]!r}; expected {', '.join(names)}")
    if problem["type"] == "missing":
        raise RequestError(422, f"{field} is missing; expected {_EXPECTED.get(field, 'a value')}")
    place = next((f"[{part}]" for part in problem["loc"][1:] if isinstance(part, int)), "")
    expected = _EXPECTED.get(field) or "null, drop" + ("" if kind is RecommendRequest else " or prior")
    raise RequestError(422, f"{field}{place}: expected {expected}, not {_short(problem['input'])}")


def id_array(ids: list[Any]) -> pa.Array:
    """Ids as numbers (int64) or texts; no ids at all are texts, which any data set can read."""
    return pa.array(ids, pa.int64() if ids and isinstance(ids[0], int) else pa.string())


def _check_rows(name: str, rows: int, limits: Limits) -> None:
    if rows > limits.rows:
        raise RequestError(413, f"{name}: {rows:,} rows are more than the {limits.rows:,} of one request; send several")


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, dict | list) else f"a {'list' if isinstance(value, list) else 'object'}"
    return text if len(text) <= 60 else f"{text[:57]}..."
