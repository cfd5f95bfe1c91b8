"""One global order: every row once, the same at any world size, replayed and resumed anywhere."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invdist.data import hashing
from invdist.data.dataset import Dataset
from invdist.data.prepare.options import Synthetic
from invdist.data.prepare.pipeline import prepare_log
from invdist.data.schema import OBSERVED_SPLITS
from invdist.data.stream import blocks, order
from invdist.data.stream.batches import Batch, Stream, StreamSpec, UnlabeledSpec
from invdist.data.stream.observed import ObservedPairs
from invdist.data.stream.order import ShuffledRows
from invdist.data.stream.sampler import Sampler
from invdist.data.stream.sampler_parts import SamplerPart
from invdist.runtime.errors import UserError

FIELDS = ("user", "item", "label", "unlabeled_user", "unlabeled_item")


def spec_of(path: Path, **more) -> StreamSpec:
    unlabeled = UnlabeledSpec(**{name: more.pop(name) for name in ("source", "mix", "popularity") if name in more})
    splits = more.pop("splits", ("train", "training_test"))
    return StreamSpec(path=str(path), splits=splits, unlabeled=unlabeled, **{"batch_size": 256, **more})


def columns(batches: list[Batch], fields: tuple[str, ...] = FIELDS) -> dict[str, np.ndarray]:
    return {
        name: torch.cat([getattr(batch, name) for batch in batches]).numpy()
        for name in fields
        if getattr(batches[0], name) is not None
    }


def digest(batches: list[Batch]) -> str:
    return hashlib.sha256(b"".join(column.tobytes() for column in columns(batches).values())).hexdigest()


def rows_of(path: Path, splits: tuple[str, ...], names: tuple[str, ...]) -> list[tuple]:
    tables = [pq.read_table(path / split, columns=list(names)).to_pydict() for split in splits]
    return sorted(row for table in tables for row in zip(*(table[name] for name in names)))


@settings(max_examples=15, deadline=None)
@given(
    world_size=st.sampled_from([1, 2, 3, 4]),
    batch_size=st.sampled_from([7, 64, 1000, 5000]),
    window_rows=st.sampled_from([100, 1024, 262_144]),
    k=st.sampled_from([0, 2]),
    source=st.sampled_from(["exposures", "sampled", "mix"]),
    epoch=st.integers(0, 3),
)
def test_every_row_once_at_any_world_size(tiny, world_size, batch_size, window_rows, k, source, epoch):
    spec = spec_of(tiny, batch_size=batch_size, window_rows=window_rows, unlabeled_per_row=k, source=source)
    alone = list(Stream(spec, 0, 1).epoch(epoch))
    ranks = [list(Stream(spec, rank, world_size).epoch(epoch)) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {Stream(spec, 0, 1).steps}
    for step, batch in enumerate(alone):
        parts = [batches[step] for batches in ranks]
        assert digest(parts) == digest([batch])
        assert {part.global_rows for part in parts} == {len(batch.user)}
        assert {part.step for part in parts} == {step}
        assert max(len(part.user) for part in parts) - min(len(part.user) for part in parts) <= 1
    seen = columns(alone, ("user", "item", "label"))
    found = sorted(zip(*(seen[name].astype(int).tolist() for name in ("user", "item", "label"))))
    assert found == rows_of(tiny, ("train", "training_test"), ("user", "item", "label"))


@pytest.mark.parametrize("source", ["exposures", "sampled", "mix"])
@pytest.mark.parametrize("start_step", [1, 7, 13])
def test_resumed_at_any_step(tiny: Path, monkeypatch: pytest.MonkeyPatch, source: str, start_step: int):
    monkeypatch.setattr(blocks, "_BLOCK_ROWS", 3000)  # several blocks, and a start inside one
    spec = spec_of(tiny, window_rows=700, unlabeled_per_row=3, source=source)
    whole = list(Stream(spec, 0, 1).epoch(2))
    assert digest(list(Stream(spec, 0, 1).epoch(2, start_step=start_step))) == digest(whole[start_step:])
    separable = [list(Stream(spec, rank, 2).epoch(2, start_step=start_step)) for rank in (0, 1)]
    joined = [part for step in zip(*separable) for part in step]
    assert digest(joined) == digest(whole[start_step:])


def test_block_size_does_not_change_what_is_seen(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    spec = spec_of(tiny, window_rows=700, unlabeled_per_row=2, source="mix")
    expected = digest(list(Stream(spec, 0, 1).epoch(0)))
    monkeypatch.setattr(blocks, "_BLOCK_ROWS", 1)
    assert digest(list(Stream(spec, 0, 1).epoch(0))) == expected


def test_replayed_in_another_process(tiny: Path):
    program = (
        "from tests.data.stream.test_batches import *\n"
        f"spec = spec_of(Path({str(tiny)!r}), window_rows=1000, unlabeled_per_row=2, source='mix', popularity=0.75)\n"
        "print(digest(list(Stream(spec, 0, 1).epoch(1, start_step=3))))"
    )
    root = Path(__file__).resolve().parents[3]
    other = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    spec = spec_of(tiny, window_rows=1000, unlabeled_per_row=2, source="mix", popularity=0.75)
    assert other.stdout.strip() == digest(list(Stream(spec, 0, 1).epoch(1, start_step=3)))


def test_read_from_a_uri(tiny: Path):
    spec = spec_of(tiny, unlabeled_per_row=1, source="mix")
    remote = StreamSpec(**{**vars(spec), "path": tiny.as_uri()})
    assert digest(list(Stream(remote, 0, 1).epoch(0))) == digest(list(Stream(spec, 0, 1).epoch(0)))


def test_epochs_and_seeds_differ(tiny: Path):
    spec, other = spec_of(tiny), spec_of(tiny, seed=1)
    digests = {digest(list(Stream(s, 0, 1).epoch(epoch))) for s in (spec, other) for epoch in (0, 1, 2)}
    assert len(digests) == 6


def test_batches_mix_users_and_shards(tiny: Path):
    """A batch draws on shards in proportion, and holds as many users as a random draw would."""
    shard_of = {}
    for number, file in enumerate(sorted((tiny / "train").iterdir())):
        table = pq.read_table(file).to_pydict()
        shard_of |= dict.fromkeys(zip(table["user"], table["item"]), number)
    shards = max(shard_of.values()) + 1
    assert shards > 8
    batches = list(Stream(spec_of(tiny, splits=("train",), window_rows=1024), 0, 1).epoch(0))
    users = pq.read_table(tiny / "train")["user"].to_numpy()
    draws = np.random.default_rng(0)
    expected = np.mean([len(set(draws.choice(users, 256, replace=False))) for _ in range(50)])
    for batch in batches[:-1]:
        pairs = list(zip(batch.user.tolist(), batch.item.tolist()))
        # A window of 1,024 rows holds parts of at least 4 of the 300-row shards, and a batch mixes them evenly.
        counts = np.bincount([shard_of[pair] for pair in pairs], minlength=shards)
        assert np.count_nonzero(counts > 10) >= 3
        assert counts.max() < 140
        assert abs(len(set(batch.user.tolist())) - expected) < 20


def test_exposures_are_walked_through_before_any_comes_again(tiny: Path):
    spec = spec_of(tiny, unlabeled_per_row=3, source="exposures", window_rows=1000)
    stream = Stream(spec, 0, 1)
    walked = [columns(list(stream.epoch(epoch))) for epoch in (0, 1)]
    pairs = [pair for part in walked for pair in zip(part["unlabeled_user"].tolist(), part["unlabeled_item"].tolist())]
    unclear = rows_of(tiny, ("unclear",), ("user", "item"))
    passes = [sorted(pairs[at : at + len(unclear)]) for at in range(0, len(pairs), len(unclear))]
    assert len(passes) > 5
    assert all(one == unclear for one in passes[:-1])
    assert pairs[: len(unclear)] != pairs[len(unclear) : 2 * len(unclear)]


@pytest.mark.parametrize("popularity", [0.0, 0.75])
def test_sampled_rows_have_the_user_of_their_row_and_were_never_observed(tiny: Path, popularity: float):
    spec = spec_of(tiny, unlabeled_per_row=4, source="sampled", popularity=popularity)
    seen = columns(list(Stream(spec, 0, 1).epoch(0)))
    assert np.array_equal(seen["unlabeled_user"], np.repeat(seen["user"], 4))
    known = set(rows_of(tiny, OBSERVED_SPLITS, ("user", "item")))
    assert not known & set(zip(seen["unlabeled_user"].tolist(), seen["unlabeled_item"].tolist()))


@pytest.mark.parametrize("mix", [0.0, 0.25, 0.7, 1.0])
def test_a_mix_has_its_proportion_everywhere(tiny: Path, mix: float):
    spec = spec_of(tiny, unlabeled_per_row=3, source="mix", mix=mix, batch_size=100)
    unclear = set(rows_of(tiny, ("unclear",), ("user", "item")))
    for batch in Stream(spec, 0, 1).epoch(1):
        part = columns([batch])
        pairs = list(zip(part["unlabeled_user"].tolist(), part["unlabeled_item"].tolist()))
        exposed = sum(pair in unclear for pair in pairs)
        assert abs(exposed - mix * len(pairs)) <= 1
    if 0 < mix < 1:
        walk = spec_of(tiny, unlabeled_per_row=3, source="exposures", batch_size=100)
        first = columns(list(Stream(walk, 0, 1).epoch(0)))["unlabeled_item"]
        mixed = columns(list(Stream(spec, 0, 1).epoch(0)))
        pairs = zip(mixed["unlabeled_user"].tolist(), mixed["unlabeled_item"].tolist())
        exposed = [pair[1] for pair in pairs if pair in unclear]
        assert exposed == first[: len(exposed)].tolist()


def test_no_exposures_is_said_at_once(all_labeled: Path):
    for source in ("exposures", "mix"):
        with pytest.raises(UserError, match="has no unclear exposures"):
            Stream(spec_of(all_labeled, unlabeled_per_row=1, source=source), 0, 1)
    assert Stream(spec_of(all_labeled, unlabeled_per_row=1, source="mix", mix=0.0), 0, 1).steps > 0


def test_nothing_left_to_sample_is_said_at_once(tiny: Path):
    dataset = Dataset.open(str(tiny), verify="fast")
    dataset.rows["unclear"] = dataset.users * dataset.items - dataset.rows["train"] - dataset.rows["training_test"]
    for source in ("sampled", "mix"):
        missing = blocks.missing_data(dataset, spec_of(tiny, unlabeled_per_row=1, source=source))
        assert missing is not None
        assert "all 200 x 300 pairs observed" in missing
    assert blocks.missing_data(dataset, spec_of(tiny, unlabeled_per_row=1, source="exposures")) is None


def test_memory_is_a_few_windows_and_blocks(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocks, "_BLOCK_ROWS", 512)
    maker = blocks.BlockMaker(spec_of(tiny, batch_size=64, unlabeled_per_row=3, window_rows=200, source="exposures"))
    for block in range(maker.blocks):
        rows = maker.part(0, block, 0, 2)
        assert len(rows["user"]) + len(rows["unlabeled_user"]) <= 512
    kept = [maker._labeled, maker._exposures]
    assert all(isinstance(rows, ShuffledRows) and len(rows._windows) <= 2 for rows in kept)
    assert len(maker._kept) <= 6
    # One step that is larger than a block is a block of its own.
    assert blocks.BlockMaker(spec_of(tiny, batch_size=64, unlabeled_per_row=64)).steps_per_block == 1


@pytest.mark.parametrize("room", [0, 20_000, 1 << 20])
def test_kept_row_groups_change_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch, room: int):
    spec = spec_of(tiny, unlabeled_per_row=2, source="exposures", window_rows=700)
    expected = [digest(list(Stream(spec, 0, 1).epoch(epoch))) for epoch in range(3)]  # each reads anew
    monkeypatch.setattr(order, "_DECODED_BYTES", room)
    stream = Stream(spec, 0, 1)
    assert [digest(list(stream.epoch(epoch))) for epoch in range(3)] == expected
    kept = stream._maker._labeled._decoded
    assert sum(column.nbytes for rows in kept.values() for column in rows.values()) <= room
    assert len(kept) == {0: 0, 1 << 20: len(stream._maker._labeled._groups)}.get(room, len(kept))
    assert kept or not room


@settings(max_examples=30, deadline=None)
@given(sequence=st.integers(0, 2**64 - 1), size=st.one_of(st.integers(0, 5000), st.sampled_from([2**17, 262_144])))
def test_a_permutation_is_that_of_numpy(sequence: int, size: int):
    expected = np.random.RandomState([sequence & 0xFFFFFFFF, sequence >> 32]).permutation(size)
    found = hashing.permutation(sequence, size)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)
    source = np.random.default_rng(size)
    rows = {name: source.integers(0, 2**31, size).astype(np.int32) for name in ("user", "item")}
    labeled = {**rows, "label": source.integers(0, 4, size).astype(np.int8)}
    for columns_given in (rows, labeled):
        shuffled = hashing.shuffled(sequence, {name: column.copy() for name, column in columns_given.items()})
        assert {name: column.tolist() for name, column in shuffled.items()} == {
            name: column[expected].tolist() for name, column in columns_given.items()
        }


def test_row_groups_larger_than_a_window(tmp_path: Path):
    prepare_log(Synthetic(preset="tiny"), [], tmp_path / "data")
    spec = spec_of(tmp_path / "data", window_rows=500)
    seen = columns(list(Stream(spec, 0, 1).epoch(0)), ("user", "item"))
    found = sorted(zip(seen["user"].tolist(), seen["item"].tolist()))
    assert found == rows_of(tmp_path / "data", spec.splits, ("user", "item"))


def test_parts_of_the_sampler_draw_what_one_draws(tiny: Path):
    dataset = Dataset.open(str(tiny), verify="fast")
    user = np.random.default_rng(0).integers(0, dataset.users, 5000)
    position = np.arange(5000, dtype=np.uint64)
    expected = Sampler(ObservedPairs.of(dataset), 9, 0.75).sample(user, position)
    parts = [SamplerPart(str(tiny), part, 3, 9, 0.75) for part in range(3)]
    counts = sum(part.known()[1] for part in parts)
    for number, part in enumerate(parts):
        some = user % 3 == number
        assert np.array_equal(part.sample(user[some], position[some], counts), expected[1][some])  # type: ignore[arg-type]
