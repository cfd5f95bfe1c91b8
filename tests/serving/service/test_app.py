"""What the service answers, against the commands on the same pairs; and what it says to requests it cannot answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import invdist
from invdist.serving.service.batching import Batcher
from tests.serving.service.conftest import TOKEN, Client, LocalServing

PAIRS: dict[str, Any] = {"user": [1, 77777, 2, 2, 3], "item": [5, 6, 6, 99999, 8]}


@pytest.mark.parametrize("unknown", ["null", "prior", "drop"])
def test_scores_equal_those_of_the_api_to_the_bit(client: Client, trained_run: Path, unknown: Any) -> None:
    expected = invdist.open_run(trained_run).score(PAIRS, unknown=unknown).to_pydict()
    answer = client.post("/score", **PAIRS, unknown=unknown)
    assert answer.status == 200
    assert {name: answer.json[name] for name in expected} == expected
    assert answer.json["checkpoint"]["run"] == trained_run.name
    assert len(answer.json["checkpoint"]["digest"]) == 16


def test_one_user_stands_for_all_items_and_texts_for_numbers(client: Client) -> None:
    whole = client.post("/score", user=[2, 2, 2], item=[5, 6, 7]).json
    assert client.post("/score", user=2, item=[5, 6, 7]).json == whole
    assert client.post("/score", user="2", item=["5", "6", "7"]).json == whole
    assert client.post("/score", user=2, item=[]).json["score"] == []
    assert client.send("POST", "/score", '{"user": 1, "user": 2, "item": [5, 6, 7]}').json == whole, (
        "the last one counts"
    )


def test_annotations_and_recommendations_equal_those_of_the_api(client: Client, trained_run: Path) -> None:
    run = invdist.open_run(trained_run)
    expected = run.annotate(PAIRS, threshold=0.7).to_pydict()
    answer = client.post("/annotate", **PAIRS, threshold=0.7).json
    assert {name: answer[name] for name in expected} == expected
    for users in ([7, 3], [3, 99999, 7]):
        expected = run.recommend(k=4, users=users).to_pydict()
        answer = client.post("/recommend", user=users, k=4).json
        assert {name: answer[name] for name in expected} == expected
    assert client.post("/recommend", user=99999, unknown="drop").json["item"] == []
    kept = client.post("/recommend", user=3, k=300, seen="keep").json
    assert sorted(kept["item"]) == sorted(
        invdist.open_run(trained_run).recommend(k=300, users=[3], seen=()).to_pydict()["item"]
    )


def test_the_description_names_the_columns_of_the_answers(client: Client) -> None:
    schema = client.send("GET", "/openapi.json").json
    asked: dict[str, dict[str, Any]] = {"/score": PAIRS, "/annotate": PAIRS, "/recommend": {"user": 3}}
    for path, fields in asked.items():
        content = schema["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert list(client.post(path, **fields).json) == content["required"] == list(content["properties"])


def test_requests_at_the_same_time_get_their_own_answers(client: Client) -> None:
    rng = np.random.default_rng(0)
    asked = [{"user": int(rng.integers(200)), "item": rng.integers(0, 300, 50).tolist()} for _ in range(60)]
    alone = [client.post("/score", **request).json for request in asked]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(lambda request: client.post("/score", **request).json, asked))
    assert together == alone


def test_what_needs_no_token(client: Client) -> None:
    none = {"Authorization": ""}
    assert client.send("GET", "/healthz", headers=none).json == {"status": "ok"}
    page = client.send("GET", "/docs", headers=none)
    assert page.status == 200
    assert b"/recommend" in page.body
    assert b"http" not in page.body.replace(b"charset", b""), "it loads nothing from elsewhere"
    schema = client.send("GET", "/openapi.json", headers=none).json
    assert set(schema["paths"]) == {"/score", "/annotate", "/recommend", "/healthz", "/metrics"}
    body = schema["paths"]["/score"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"user", "item", "unknown"}
    assert client.send("GET", "/metrics", headers=none).status == 401
    named = {
        name for path in schema["paths"].values() for m in path.values() for s in m.get("security", ()) for name in s
    }
    assert named == set(schema["components"]["securitySchemes"]), (
        "programs that read it refuse a scheme it does not have"
    )
    assert "security" in schema["paths"]["/metrics"]["get"]
    assert client.send("GET", "/metrics").body == b"ray_invdist_something 1\n"


_ONE = '{"user": 1, "item": [5]}'
_HOSTILE: list[tuple[str, str, bytes | str, int, str]] = [
    ("no json", "/score", "{", 400, "not JSON"),
    ("nothing", "/score", "", 400, "not JSON"),
    ("two values", "/score", _ONE + _ONE, 400, "not JSON"),
    ("not utf-8", "/score", b'{"user": "\xff", "item": [5]}', 400, "not JSON"),
    ("a lone surrogate", "/score", '{"user": "\\ud800", "item": ["5"]}', 400, "not JSON"),
    ("deep list", "/score", "[" * 30_000 + "]" * 30_000, 400, "not JSON"),
    ("deep in a field", "/score", '{"user": 1, "item": ' + "[" * 20_000 + "]" * 20_000 + "}", 400, "not JSON"),
    ("deep objects", "/score", '{"a":' * 8_000 + "1" + "}" * 8_000, 400, "not JSON"),
    ("a list", "/score", "[1]", 422, "expected a JSON object with user, item, unknown, not a list"),
    ("null", "/score", "null", 422, "not None"),
    ("a number", "/score", "7", 422, "not 7"),
    ("nan", "/score", '{"user": NaN, "item": [5]}', 422, "user: expected one raw id"),
    ("infinity", "/score", '{"user": 1, "item": [Infinity]}', 422, "item[0]: expected whole numbers"),
    ("a float", "/score", '{"user": 1, "item": [5.0]}', 422, "item[0]: expected whole numbers"),
    ("a huge number", "/score", '{"user": 1, "item": [1' + "0" * 30 + "]}", 422, "item[0]: expected whole numbers"),
    ("a number of 5,000 digits", "/score", '{"user": 1' + "0" * 5000 + ', "item": [5]}', 400, "out of range"),
    ("1e999", "/score", '{"user": 1e999, "item": [5]}', 422, "user: expected"),
    ("a bool", "/score", '{"user": true, "item": [5]}', 422, "user: expected one raw id"),
    ("null as an id", "/score", '{"user": 1, "item": [5, null]}', 422, "item[1]: expected whole numbers"),
    ("a list as an id", "/score", '{"user": 1, "item": [[5]]}', 422, "item[0]: expected whole numbers"),
    ("an object as an id", "/score", '{"user": {"a": 1}, "item": [5]}', 422, "user: expected one raw id"),
    ("a mix", "/score", '{"user": 1, "item": [5, "6"]}', 422, "in one list"),
    ("a long text", "/score", '{"user": "' + "x" * 300 + '", "item": [5]}', 422, "at most 256 characters"),
    ("no item", "/score", '{"user": 1}', 422, "item is missing"),
    ("an item alone", "/score", '{"user": 1, "item": 5}', 422, "item: expected whole numbers"),
    ("an unknown field", "/score", '{"user": 1, "item": [5], "itme": 1}', 422, "there is no field 'itme'"),
    ("__class__", "/score", '{"user": 1, "item": [5], "__class__": "x"}', 422, "there is no field '__class__'"),
    ("another rule", "/score", '{"user": 1, "item": [5], "unknown": "zero"}', 422, "unknown: expected null, drop"),
    ("unequal", "/score", '{"user": [1, 2], "item": [5]}', 422, "user has 2 ids, item has 1"),
    ("too many rows", "/score", json.dumps({"user": 1, "item": [5] * 1001}), 413, "1,001 rows are more than the 1,000"),
    ("too large", "/score", b" " * 70_000, 413, "more than 65,536 bytes"),
    ("threshold", "/annotate", '{"user": 1, "item": [5], "threshold": 2}', 422, "threshold: expected a number from 0"),
    ("threshold nan", "/annotate", '{"user": 1, "item": [5], "threshold": NaN}', 422, "threshold: expected a number"),
    ("k 0", "/recommend", '{"user": 1, "k": 0}', 422, "k: expected a whole number of at least 1"),
    ("k -1", "/recommend", '{"user": 1, "k": -1}', 422, "k: expected a whole number of at least 1"),
    ("k huge", "/recommend", '{"user": 1, "k": 1' + "0" * 40 + "}", 422, "k: expected"),
    ("k of text", "/recommend", '{"user": 1, "k": "10"}', 422, "k: expected"),
    ("k above the rows", "/recommend", '{"user": [1, 2, 3], "k": 500}', 413, "1,500 rows are more than"),
    ("k above the catalogue", "/recommend", '{"user": 1, "k": 301}', 422, "301 is more than the 300 items"),
    ("prior for users", "/recommend", '{"user": 1, "unknown": "prior"}', 422, "unknown: expected null, drop, not"),
    ("another path", "/scores", _ONE, 404, "there is no '/scores'"),
    ("a slash at the end", "/score/", _ONE, 404, "there is no '/score/'"),
    ("up", "/../../etc/passwd", _ONE, 404, "there is no"),
    ("up, written otherwise", "/score/%2e%2e/%2e%2e/etc/passwd", _ONE, 404, "there is no"),
    ("a nul", "/score%00", _ONE, 404, "there is no"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"), [case[1:] for case in _HOSTILE], ids=[c[0] for c in _HOSTILE]
)
def test_a_bad_request_is_told_what_is_wrong(
    client: Client, path: str, body: bytes | str, status: int, said: str
) -> None:
    answer = client.send("POST", path, body)
    assert (answer.status, set(answer.json)) == (status, {"error"}), answer.body
    assert said in answer.json["error"]
    assert len(answer.body) < 400
    assert b"Traceback" not in answer.body
    assert client.send("POST", "/score", _ONE).status == 200, "and the service goes on"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic YTpi"}, 401),
        ({"Authorization": "Bearer \xff\xfe"}, 401),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_headers(client: Client, headers: dict[str, str], status: int) -> None:
    answer = client.send("POST", "/score", _ONE, headers)
    assert answer.status == status
    assert ("error" in answer.json) == (status != 200)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_another_method(client: Client, method: str) -> None:
    answer = client.send(method, "/score")
    assert answer.status == 405
    assert method == "HEAD" or "does not take" in answer.json["error"]


def test_a_request_that_takes_too_long_is_given_up(
    client: Client, serving: LocalServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = serving.current()[1]

    async def late(*pairs: np.ndarray) -> np.ndarray:
        await asyncio.sleep(30)
        return await Batcher.score(batcher, *pairs)

    monkeypatch.setattr(batcher, "score", late)
    monkeypatch.setattr(serving, "limits", dataclasses.replace(serving.limits, seconds=0.5))
    answer = client.post("/score", user=1, item=[5])
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert "no answer within" in answer.json["error"]
    assert serving.seen[-1] == ("/score", 503, 0)


def test_a_body_that_does_not_come_is_the_fault_of_the_client(client: Client, serving: LocalServing) -> None:
    before = serving.limits
    serving.limits = dataclasses.replace(before, seconds=0.2)
    try:
        answer = client.send("POST", "/score", _ONE[:5], {"Content-Length": str(len(_ONE))})
    finally:
        serving.limits = before
    assert (answer.status, serving.seen[-1]) == (408, ("/score", 408, 0))
    assert "the body did not come within 0.2 s" in answer.json["error"]


def test_a_client_that_goes_away_is_no_error_of_the_service(client: Client, serving: LocalServing) -> None:
    counted = len(serving.seen)
    head = f"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
    deadline = time.monotonic() + 10
    while len(serving.seen) == counted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert serving.seen[counted:] == [("/score", 499, 0)]


def test_an_error_of_the_service_shows_nothing_of_itself(
    client: Client, serving: LocalServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(serving.answers[1], "_score", fail)
    answer = client.post("/score", user=1, item=[5])
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert serving.seen[-1] == ("/score", 500, 0)
    monkeypatch.undo()
    assert client.post("/score", user=1, item=[5]).status == 200


def test_metrics_that_ray_does_not_give_are_an_error_in_time(
    client: Client, serving: LocalServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> str:
        raise ConnectionRefusedError("secret")

    async def hang() -> str:
        await asyncio.sleep(30)
        return ""

    monkeypatch.setattr(serving, "limits", dataclasses.replace(serving.limits, seconds=0.2))
    for metrics in (fail, hang):
        monkeypatch.setattr(serving, "metrics", metrics)
        answer = client.send("GET", "/metrics")
        assert (answer.status, answer.json) == (503, {"error": "Ray did not give the metrics of this node; try again"})
