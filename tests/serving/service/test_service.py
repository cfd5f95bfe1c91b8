"""`invdist serve` as it is used: on a private Ray, with a killed replica and a new checkpoint under load."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import invdist
from invdist.bench._serve_client import Load, question
from invdist.bench.serve import newest_checkpoint, questions_of
from invdist.runtime import private_ray
from tests.conftest import REPOSITORY
from tests.runtime.test_private_ray import is_alive, listening
from tests.serving.service.conftest import Answered, Client, served

pytestmark = pytest.mark.slow


class Live(NamedTuple):
    """A running service on a copy of the trained run, whose newest checkpoint is in `hidden`."""

    run: Path
    hidden: Path
    newest: Path
    url: str
    token: str
    process: subprocess.Popen[str]
    pids: set[int]

    @property
    def client(self) -> Client:
        return Client(int(self.url.rpartition(":")[2]), self.token)

    def replicas(self) -> list[int]:
        return [pid for pid in _descendants(self.process.pid) if ":Replica" in _title(pid)]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _descendants(root: int) -> set[int]:
    found, before = {root}, 0
    while len(found) != before:
        before = len(found)
        for pid in private_ray._pids():
            try:
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if parent in found:
                found.add(pid)
    return found


@pytest.fixture(scope="module")
def live(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    run = folder / "gmf"
    shutil.copytree(trained_run, run)
    newest, token = newest_checkpoint(run), folder / "token"
    questions = questions_of(run, 100)
    newest.rename(folder / "hidden")
    command = [sys.executable, "-m", "invdist", "serve", "--run", str(run), "--checkpoint", "last", "--port", "0"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    with served([*command, "--token-file", token], env=environment) as (url, process):
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        Live.questions = questions  # type: ignore[attr-defined]
        yield Live(run, folder / "hidden", newest, url, token.read_text(), process, _descendants(process.pid))


def _ask(live: Live, clients: int, seconds: float) -> Load:
    asked = [question(live.url, live.token, *pair) for pair in zip(*Live.questions, strict=True)]  # type: ignore[attr-defined]
    return Load(live.url, asked, clients, seconds, processes=1).start()


def test_it_listens_on_loopback_only_and_answers_as_the_command_does(live: Live, tmp_path: Path) -> None:
    addresses = listening(live.pids)
    assert addresses, "nothing was found to listen: the check itself is broken"
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    pairs: dict[str, Any] = {"user": [1, 2, 3, 77777], "item": [5, 6, 8, 5]}
    (tmp_path / "pairs.csv").write_text("\n".join(["user,item", *(f"{u},{i}" for u, i in zip(*pairs.values()))]))
    command = [
        "score",
        "--run",
        live.run,
        "--checkpoint",
        "last",
        "--input",
        tmp_path / "pairs.csv",
        "--format",
        "jsonl",
    ]
    subprocess.run([sys.executable, "-m", "invdist", *map(str, command), "--output", str(tmp_path / "out")], check=True)
    rows = [json.loads(line) for line in (tmp_path / "out" / "scores.jsonl").read_text().splitlines()]
    answer = live.client.post("/score", **pairs).json
    for name in ("user", "item", "score", "probability", "known"):
        assert answer[name] == [row[name] for row in rows]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert answer["checkpoint"]["digest"] == manifest["checkpoint"]["digest"]
    assert live.client.post("/recommend", user=3, k=5).json["rank"] == [1, 2, 3, 4, 5]
    assert live.client.send("POST", "/score", "{", {"Authorization": "Bearer no"}).status == 401
    assert live.client.send("POST", "/score", "[" * 1000).status == 400
    assert live.client.send("POST", "/score", b" " * (2 << 20)).status == 413


def test_what_the_front_answers_by_itself(live: Live) -> None:
    many = {f"X-{number}": "1" for number in range(150)}
    assert live.client.send("POST", "/score", "{}", many).status == 422
    begun = b"POST /score HTTP/1.1\r\nHost: x\r\n"
    whole = begun + f"Authorization: Bearer {live.token}\r\n".encode()
    whole += b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    for sent, status in ((b"GARBAGE\r\n\r\n", b"400"), (begun, b"408"), (whole, b"408")):
        with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2])), timeout=30) as connection:
            connection.sendall(sent)
            assert connection.recv(4096).startswith(b"HTTP/1.1 " + status), sent


def test_a_killed_replica_and_a_new_checkpoint_cost_no_request(live: Live) -> None:
    before = live.client.post("/score", user=1, item=[5]).json["checkpoint"]
    load = _ask(live, 8, 14)
    time.sleep(5)
    replicas = live.replicas()
    assert len(replicas) == 2
    os.kill(replicas[0], signal.SIGKILL)
    time.sleep(3)
    live.hidden.rename(live.newest)
    outcomes = load.outcomes()
    assert len(outcomes) > 100
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert len({outcome.digest for outcome in outcomes}) == 2
    expected = invdist.open_run(live.run, checkpoint="last")
    assert max(outcomes).digest != before["digest"]
    deadline = time.monotonic() + 30
    while len(live.replicas()) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(live.replicas()) == 2, "the dead one is replaced"
    answers = [live.client.post("/score", user=1, item=[5]).json for _ in range(20)]
    assert {answer["checkpoint"]["step"] for answer in answers} == {int(live.newest.name[5:])}
    assert answers[0]["score"] == expected.score({"user": [1], "item": [5]})["score"].to_pylist()


def test_a_damaged_checkpoint_is_not_taken_over(live: Live) -> None:
    step = int(live.newest.name[5:])
    damaged = live.newest.with_name(f"step-{step + 1:09d}")
    shutil.copytree(live.newest, live.newest.with_name("copy"))
    next(live.newest.with_name("copy").glob("*.safetensors")).write_bytes(b"nothing")
    live.newest.with_name("copy").rename(damaged)
    time.sleep(3)
    assert live.client.post("/score", user=1, item=[5]).json["checkpoint"]["step"] == step
    shutil.rmtree(damaged)


def test_while_no_replica_is_left_clients_are_told_to_try_again(live: Live) -> None:
    until = time.monotonic() + 12

    def ask() -> list[Answered]:
        answers = []
        while time.monotonic() < until:
            answers.append(live.client.post("/score", user=1, item=[5]))
        return answers

    with ThreadPoolExecutor(16) as clients:
        asked = [clients.submit(ask) for _ in range(16)]
        for pause in (1, 4):
            time.sleep(pause)
            for replica in live.replicas():
                os.kill(replica, signal.SIGKILL)
        answers = [answer for client in asked for answer in client.result()]
    refused = [answer for answer in answers if answer.status != 200]
    assert len(refused) < len(answers)
    assert [answer for answer in refused if answer.status != 503 or answer.headers["retry-after"] != "1"] == []
    assert {answer.json["error"] for answer in refused} <= {"nobody is there to answer; try again"}
    deadline = time.monotonic() + 30
    while len(live.replicas()) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert live.client.post("/score", user=1, item=[5]).status == 200


def test_metrics_of_all_replicas_are_on_one_page(live: Live) -> None:
    for _ in range(40):
        live.client.post("/score", user=1, item=[5, 6])
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        page = live.client.send("GET", "/metrics").body.decode()
        counts = re.findall(r'^ray_invdist_serve_requests\w*\{(?=[^}]*route="/score")[^}]*\} (\S+)$', page, re.M)
        if len(counts) >= 2 and "ray_invdist_serve_seconds_bucket" in page:
            break
        time.sleep(1)
    assert len(counts) >= 2, page
    assert sum(map(float, counts)) > 100
    assert f" {float(int(live.newest.name[5:]))}" in page


def test_ctrl_c_ends_everything_that_was_started(live: Live) -> None:
    everything = _descendants(live.process.pid)
    assert len(everything) > 8
    live.process.send_signal(signal.SIGINT)
    rest, _ = live.process.communicate(timeout=90)
    assert live.process.returncode == 130, rest
    assert "Traceback" not in rest
    assert [pid for pid in everything if is_alive(pid)] == []


def test_the_launch_script_serves_the_newest_run_of_a_folder(trained_run: Path, tmp_path: Path) -> None:
    shutil.copytree(trained_run, tmp_path / "runs" / "gmf")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment["INVDIST_VENV"] = sys.prefix
    command = ["bash", REPOSITORY / "launch" / "serve.sh", "--port", "0", "--replicas", "1", "--token-file", "token"]
    with served(command, cwd=tmp_path, env=environment) as (url, process):
        client = Client(int(url.rpartition(":")[2]), (tmp_path / "token").read_text())
        expected = invdist.open_run(trained_run).score({"user": [1], "item": [5]})["score"].to_pylist()
        assert client.post("/score", user=1, item=[5]).json["score"] == expected
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=90)
        assert process.returncode == 130, rest
