"""A checkpoint from anywhere may be refused; it may not crash, reach outside its folder, or ask for absurd memory."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from invdist.runtime.errors import UserError
from invdist.training.checkpoint import CheckpointStore, DamagedCheckpoint, Position, read_checkpoint
from invdist.training.checkpoint.reader import decode
from tests.training.checkpointing import build, this_process, train

FUZZ = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=150,
    derandomize=True,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**15),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint as it should be, inside a process that is its own only rank."""
    with this_process():
        strategy = build("srns")
        train(strategy, range(2))
        folder = tmp_path_factory.mktemp("good")
        store = CheckpointStore(folder, None)
        store.save(strategy.model, strategy, Position(global_step=1), {"a": 1}, 0.5)
        store.wait()
        yield folder / "step-000000001"


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(good, tmp_path / "step-000000001"))


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def put(folder: Path, manifest: object) -> None:
    (folder / "manifest.json").write_text(json.dumps(manifest))


def read_all(folder: Path) -> None:
    """All that a reader may do with a checkpoint."""
    info = read_checkpoint(folder)
    for name in info.manifest.tensors:
        info.read(name)


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Where every value of a JSON document is."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def replaced(document: Any, path: tuple, value: Any) -> Any:
    if not path:
        return value
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return document


def test_the_good_one_reads(good: Path) -> None:
    read_all(good)


@given(data=st.data())
@FUZZ
def test_any_value_of_the_manifest_may_be_anything(good: Path, data: st.DataObject) -> None:
    manifest = manifest_of(good)
    spoiled = replaced(manifest, data.draw(st.sampled_from(list(places(manifest)))), data.draw(JSON))
    folder = good.parent / "step-000000002"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in good.glob("*.safetensors"):
        os.link(file, folder / file.name)
    put(folder, spoiled)
    with contextlib.suppress(UserError):
        read_all(folder)
    strategy = build_once()
    store = CheckpointStore(folder.parent, None)
    with contextlib.suppress(UserError):
        info = store.latest()
        assert info is not None
        store.load(info, strategy.model, strategy)
    shutil.rmtree(folder)


_built: list[Any] = []


def build_once() -> Any:
    if not _built:
        _built.append(build("srns", seed=1))
    return _built[0]


@given(text=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@example(b"[" * 100_000)
@example(b"1" * 10_000)
@example(b'{"format": "invdist checkpoint", "version": ' + b"1" * 9_000 + b"}")
@FUZZ
def test_any_bytes_as_manifest(good: Path, text: bytes) -> None:
    folder = good.parent / "bytes"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(UserError):
        read_all(folder)


@given(data=st.data())
@FUZZ
def test_any_header_of_a_tensor_file(data: st.DataObject) -> None:
    content = safetensors.torch.save({"a": torch.ones(3, 4), "b": torch.tensor(1)})
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    spoiled = json.dumps(replaced(header, data.draw(st.sampled_from(list(places(header)))), data.draw(JSON))).encode()
    claimed = data.draw(st.sampled_from([len(spoiled), 0, 2**63, len(spoiled) + 1]))
    try:
        tensors = decode(claimed.to_bytes(8, "little") + spoiled + content[8 + size :])
    except ValueError:
        return
    assert sum(tensor.numel() for tensor in tensors.values()) <= 2 * 13 * 8


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/hostname", "..", ".", "", "a/b", "a\\b", "a\0b", ".hidden", "x" * 300]
)
def test_no_path_leaves_the_folder(folder: Path, name: str) -> None:
    secret = folder.parent / "secret.safetensors"
    shutil.copy(folder / "rank-0.safetensors", secret)
    manifest = manifest_of(folder)
    manifest["files"][name] = manifest["files"].pop("rank-0.safetensors")
    text = json.dumps(manifest).replace('"rank-0.safetensors"', json.dumps(name))
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpoint, match="a file of a checkpoint lies in its folder, under a plain name"):
        read_all(folder)


@pytest.mark.parametrize("name", ["rank-0.safetensors", "manifest.json"])
def test_symbolic_links_are_not_followed(folder: Path, name: str) -> None:
    outside = folder.parent / name
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(UserError, match=rf"{name} is missing \(or not a plain file\)|has no manifest\.json"):
        read_all(folder)


def test_linked_folder_is_neither_loaded_nor_removed(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "checkpoints"
    runs.mkdir()
    (runs / "step-000000001").symlink_to(folder)
    store = CheckpointStore(runs, None, keep_last=1, keep_best=0)
    assert store.list() == []
    strategy = build_once()
    store.save(strategy.model, strategy, Position(global_step=2), {})
    store.wait()
    read_all(folder)


@pytest.mark.parametrize("huge", [10**12, 10**15, 10**30])
def test_absurd_sizes_are_refused_before_memory_is_asked_for(folder: Path, huge: int) -> None:
    manifest = manifest_of(folder)
    for table in manifest["tables"]:
        if table["name"] == "user":
            table["rows"] = huge
    for name, entry in manifest["tensors"].items():
        if name.startswith("rows/user/"):
            entry["shape"][0] = huge
            for part in entry["parts"]:
                part["rows"] = huge
    put(folder, manifest)
    with pytest.raises(DamagedCheckpoint, match=rf"{huge} x \d+ values do not fit|less than or equal to {2**48} "):
        read_all(folder)
    # The manifest may claim a large file too; the file itself is not large.
    manifest["files"]["rank-0.safetensors"]["bytes"] = 2**47
    put(folder, manifest)
    with pytest.raises(DamagedCheckpoint):
        read_all(folder)


def test_a_hole_of_a_file_is_not_read(folder: Path) -> None:
    manifest = manifest_of(folder)
    os.truncate(folder / "rank-0.safetensors", 2**41)
    manifest["files"]["rank-0.safetensors"]["bytes"] = 2**41
    put(folder, manifest)
    with pytest.raises(DamagedCheckpoint, match="larger than any file of a checkpoint"):
        read_all(folder)


@given(place=st.integers(0, 10**9), bit=st.integers(0, 7))
@FUZZ
def test_any_changed_bit_is_found(good: Path, place: int, bit: int) -> None:
    folder = good.parent / "bits"
    if not folder.exists():
        shutil.copytree(good, folder)
    content = bytearray((good / "rank-0.safetensors").read_bytes())
    content[place % len(content)] ^= 1 << bit
    (folder / "rank-0.safetensors").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"bits/rank-0\.safetensors is damaged"):
        read_all(folder)


def test_a_file_that_fits_its_checksum_but_not_the_manifest(folder: Path) -> None:
    manifest, path = manifest_of(folder), folder / "rank-0.safetensors"
    others = torch.zeros(path.stat().st_size, dtype=torch.uint8)
    content = safetensors.torch.save({"rows/user/weight": torch.zeros(1), "others": others})
    path.write_bytes(content)
    manifest["files"][path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    put(folder, manifest)
    with pytest.raises(DamagedCheckpoint, match=r"does not hold rows/.* as the manifest says"):
        read_all(folder)


@pytest.mark.parametrize("way", ["gap", "overlap", "twice"])
def test_parts_that_do_not_cover_the_tensor(folder: Path, way: str) -> None:
    manifest = manifest_of(folder)
    parts = manifest["tensors"]["rows/user/weight"]["parts"]
    (part,) = parts
    if way == "twice":
        parts.append(dict(part))
    else:
        parts[:] = [{**part, "rows": 10}, {**part, "row": 11 if way == "gap" else 9, "rows": part["rows"] - 10}]
    put(folder, manifest)
    with pytest.raises(DamagedCheckpoint, match="do not cover shape"):
        read_all(folder)
