"""Data sets and raw logs from somebody else: any content is read or refused by name, nothing is run or followed."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from invdist.cli import prepare
from invdist.data.dataset import Dataset
from invdist.data.schema import fingerprint
from invdist.runtime.errors import UserError

_FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def victim(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set to damage."""
    folder = tmp_path_factory.mktemp("hostile") / "data"
    shutil.copytree(tiny_data, folder)
    return folder


@pytest.fixture
def manifest(victim: Path) -> Any:
    """Its manifest; put back afterwards."""
    path = victim / "dataset.json"
    text = path.read_text()
    yield json.loads(text)
    path.write_text(text)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((value, key), *_places(inner))]


def _write(victim: Path, manifest: dict[str, Any]) -> None:
    # A forger computes the fingerprint too.
    try:
        manifest["fingerprint"] = fingerprint(manifest)
    except Exception:
        manifest["fingerprint"] = "0"
    (victim / "dataset.json").write_text(json.dumps(manifest))


@_FUZZ
@given(data=st.data(), value=_ANY)
def test_any_value_of_the_manifest_may_be_anything(
    victim: Path, manifest: Any, data: st.DataObject, value: Any
) -> None:
    forged = copy.deepcopy(manifest)
    container, key = data.draw(st.sampled_from(_places(forged)))
    container[key] = value
    _write(victim, forged)
    with contextlib.suppress(UserError):  # anything else is a failure
        Dataset.open(str(victim), verify="full")


@_FUZZ
@given(st.binary(max_size=200))
def test_any_bytes_as_manifest(victim: Path, manifest: Any, content: bytes) -> None:
    (victim / "dataset.json").write_bytes(content)
    with pytest.raises(UserError, match=r"dataset\.json"):
        Dataset.open(str(victim))


@pytest.mark.parametrize("name", ["../secret.parquet", "/etc/passwd", "train/../../x.parquet", "train/a/b.parquet", ""])
def test_no_path_leaves_the_folder(victim: Path, manifest: Any, name: str) -> None:
    (victim.parent / "secret.parquet").write_bytes(b"PAR1")
    manifest["shards"]["train"][0]["file"] = name
    _write(victim, manifest)
    with pytest.raises(UserError, match="is not the name of a parquet file in train"):
        Dataset.open(str(victim))


def test_links_are_not_followed(victim: Path, tmp_path: Path, manifest: Any) -> None:
    shard = victim / manifest["shards"]["train"][0]["file"]
    moved = tmp_path / "elsewhere.parquet"
    shard.rename(moved)
    shard.symlink_to(moved)
    try:
        with pytest.raises(UserError, match="is a link"):
            Dataset.open(str(victim))
    finally:
        shard.unlink()
        moved.rename(shard)


@pytest.mark.parametrize("key", ["users", "items"])
def test_absurd_sizes_are_refused(victim: Path, manifest: Any, key: str) -> None:
    manifest[key] = 10**15
    _write(victim, manifest)
    with pytest.raises(UserError, match=f"files.{key} has"):
        Dataset.open(str(victim))
    manifest["files"][key]["rows"] = 10**15
    _write(victim, manifest)
    with pytest.raises(UserError, match="the manifest says 1000000000000000"):
        Dataset.open(str(victim), verify="full")


@_FUZZ
@given(data=st.data())
def test_any_damage_to_a_shard_is_found(victim: Path, manifest: Any, data: st.DataObject) -> None:
    shard = victim / manifest["shards"]["valid"][0]["file"]
    good = shard.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    damaged = good[:at] if data.draw(st.booleans()) else good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :]
    shard.write_bytes(damaged)
    try:
        with pytest.raises(UserError, match=shard.name):
            Dataset.open(str(victim), verify="full")
    finally:
        shard.write_bytes(good)


@_FUZZ
@given(
    kind=st.sampled_from(
        [("ratings", "user,item,rating\n"), ("kuairand", ""), ("microvideo", "user,item,play_time,duration\n")]
    ),
    content=st.binary(max_size=120) | st.text(alphabet="0123456789,.-\n\"'abc", max_size=120).map(str.encode),
)
def test_any_bytes_as_a_raw_log(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Any, content: bytes) -> None:
    log, output = tmp_path / "log_1.csv", tmp_path / "out"
    log.write_bytes(kind[1].encode() + content)
    code = prepare.main([kind[0], "--input", str(log), "--output", str(output)])
    said = capsys.readouterr().err
    assert code in (0, 2)
    assert output.exists() == (code == 0)
    assert code == 0 or "error: " in said
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    shutil.rmtree(output, ignore_errors=True)
