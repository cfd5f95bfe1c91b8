"""The private names of TorchRec and torch that we use still exist, and mean what we take them for."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest

KNOWN = "1.8.0"


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("torchrec.distributed.embedding", "ShardedEmbeddingCollection", "_sharding_type_to_sharding"),
        ("torchrec.distributed.embedding", "ShardedEmbeddingCollection", "_lookups"),
        ("torchrec.distributed.embedding_lookup", "GroupedEmbeddingsLookup", "_emb_modules"),
        ("torchrec.distributed.planner.stats", "EmbeddingStats", "_stats_table"),
        ("torch.distributed.remote_device", None, "_remote_device"),
    ],
)
def test_private_names_are_as_in_the_version_they_were_read_in(module: str, owner: str | None, name: str) -> None:
    loaded = __import__(module, fromlist=["_"])
    there = name in inspect.getsource(getattr(loaded, owner)) if owner else hasattr(loaded, name)
    installed = version("torchrec").split("+")[0]
    assert there, (
        f"torchrec {installed} (known good: {KNOWN}) or torch {version('torch')} no longer has "
        f"{module}.{owner or ''} {name}: change invdist/embeddings/torchrec_internals.py"
    )


def test_no_other_module_uses_private_names_of_torchrec() -> None:
    from pathlib import Path

    import invdist

    names = ("_sharding_type_to_sharding", "_lookups", "_emb_modules", "_stats_table", "_remote_device")
    root = Path(invdist.__file__).parent
    users = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if any(f".{name}" in line or f"import {name}" in line for name in names)
    }
    assert users == {"embeddings/torchrec_internals.py"}
