"""Which tensors of a training run go into a checkpoint and back, and which rank writes which slice of each.

rows/TABLE/weight          the embeddings of a table; rows/TABLE/m, v, sum...: what their optimizer keeps
dense/NAME                 weights and buffers of the backbone
dense_optimizer/NAME/KEY   what the dense optimizer keeps of a weight
strategy/NAME              state of the strategy that is equal on every rank
sharded/NAME               state of the strategy by user, each rank with a range of users
rng/RANK[/cuda]            state of a rank's random generator (dropout)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from invdist.embeddings.store import EmbeddingStore
from invdist.embeddings.tables import Shard, Table
from invdist.learning.strategy import Strategy
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError
from invdist.training.checkpoint.manifest import DTYPE_NAMES, DTYPES, DamagedCheckpoint
from invdist.training.checkpoint.reader import CheckpointInfo

_CHANGED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The slice of a tensor that one rank writes: a view of memory in use, `[rows, ...]` from `row`, `column` on."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    values: Tensor
    row: int = 0
    column: int = 0
    index: Tensor | None = None
    """The rows that `values` has, of those that changed since the base; None: all from `row` on."""
    multiplier: int = 1
    """Rows are stored by place: see `Layout.multipliers`."""


def slices_to_save(model: Recommender, strategy: Strategy, changed: Tensor | None = None) -> Iterator[TensorSlice]:
    """What this rank writes. Over all ranks every tensor is covered exactly once.

    With `changed` (bool by local row) only those rows of the tables.
    """
    # `state` may communicate: it is called here, on every rank, not when the first slice is asked for.
    return _slices(model, strategy, dict(strategy.state()), changed)


def _slices(
    model: Recommender, strategy: Strategy, replicated: dict[str, Tensor], changed: Tensor | None
) -> Iterator[TensorSlice]:
    rank = model.comm.rank
    yield from table_slices(model.rows) if changed is None else _changed_slices(model.rows, changed)
    for name, (first, values) in strategy.sharded_state().items():
        yield TensorSlice(f"sharded/{name}", _by_user(strategy, values), values, first)
    yield from (_whole(name, state) for name, state in _random_states(rank, model.device).items())
    if rank == 0:
        yield from (_whole(f"dense/{name}", value) for name, value in model.backbone.state_dict().items())
        for name, state in _dense_optimizer_state(model).items():
            yield _whole(f"dense_optimizer/{name}", state)
        yield from (_whole(f"strategy/{name}", value) for name, value in replicated.items())


def table_slices(rows: EmbeddingStore) -> Iterator[TensorSlice]:
    """What this rank writes of sharded tables and their optimizer state."""
    for each in _shard_slices(rows):
        first, end = each.written
        values, row = each.values[first:end], each.shard.row + first
        yield TensorSlice(each.name, each.shape, values, row, each.column, multiplier=each.multiplier)


def _changed_slices(rows: EmbeddingStore, changed: Tensor) -> Iterator[TensorSlice]:
    """What this rank writes of the changed rows, a bounded number of them at a time: each slice is a copy."""
    for each in _shard_slices(rows):
        first, end = each.written
        start = each.shard.base + first
        found = changed[start : start + end - first].nonzero().view(-1) + first
        some = max(1, _CHANGED_BYTES // max(1, each.values[:1].nbytes))
        for places in found.split(some):  # at least one slice, if an empty one: every tensor has its entry
            index = places + each.shard.row
            values = each.values.index_select(0, places)
            yield TensorSlice(each.name, each.shape, values, 0, each.column, index, each.multiplier)


class RowSource(Protocol):
    """Where the rows of a model come from whose ids are not those of the checkpoint."""

    renumbered: dict[str, Tensor]
    """By table the present index of each id of the checkpoint, -1 if it is gone."""

    def fill(self, name: str, table: str, values: Tensor, row: int = 0, column: int = 0, multiplier: int = 1) -> None:
        """Fills `values`, the rows of a table from `row` on, with those of the tensor `name`, from `column` on.

        Rows are counted by place, if tables have a `multiplier` (`Layout.multipliers`).
        """
        ...


def restore_tables(checkpoint: CheckpointInfo, rows: EmbeddingStore, by_id: RowSource | None = None) -> None:
    """Fills sharded tables and their optimizer state, at any number of ranks and any sharding."""
    for each in _shard_slices(rows):
        place = (each.shard.row, each.column, each.multiplier)
        if by_id is None:
            _fill(checkpoint, each.name, each.values, *place)
        else:
            by_id.fill(each.name, each.shard.table, each.values, *place)
    rows.optimizer.steps = checkpoint.manifest.optimizer_steps


def restore(checkpoint: CheckpointInfo, model: Recommender, strategy: Strategy, by_id: RowSource | None = None) -> None:
    """Loads a checkpoint into a model and a strategy of the same kind, at any number of ranks and any sharding.

    At the same number of ranks everything is as it was saved, to the bit. With more ranks, the new ones keep their
    own random state. After an exception the model is only partly loaded: load another checkpoint before using it.
    With `by_id` the model may have other users and items, and that fills its rows.
    """
    _check_fits(checkpoint, model, strategy, same_ids=by_id is None)
    restore_tables(checkpoint, model.rows, by_id)
    for name, (first, values) in strategy.sharded_state().items():
        if by_id is None:
            _fill(checkpoint, f"sharded/{name}", values, first)
        else:
            by_id.fill(f"sharded/{name}", "user", values, first)
    model.backbone.load_state_dict(checkpoint.read_dense())
    _load_dense_optimizer(checkpoint, model)
    try:
        state = checkpoint.read_strategy_state()
        if by_id is None:
            strategy.load_state(state)
        else:
            strategy.grow_state(state, by_id.renumbered["user"], by_id.renumbered["item"])
    except (ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{checkpoint.path}: the state of {type(strategy).__name__} does not fit: {error}") from error
    _load_random_state(checkpoint, model)


def _fill(
    checkpoint: CheckpointInfo, name: str, values: Tensor, row: int, column: int = 0, multiplier: int = 1
) -> None:
    if len(values):
        checkpoint.read_into(name, values.view(len(values), -1), row, column, multiplier)


def _by_user(strategy: Strategy, values: Tensor) -> tuple[int, ...]:
    return (strategy.setting.users, *values.shape[1:])


# Embeddings


@dataclass(frozen=True, slots=True)
class _ShardSlice:
    """One shard of this rank: of the embeddings, or of something that the optimizer keeps for each."""

    name: str
    shape: tuple[int, ...]
    shard: Shard
    column: int
    values: Tensor
    written: tuple[int, int]
    """The range of its rows that this rank writes; if the table is replicated, other ranks write the others."""
    multiplier: int


def _shard_slices(rows: EmbeddingStore) -> Iterator[_ShardSlice]:
    tables = {table.name: table for table in rows.layout.tables}
    for shard in rows.layout.on(rows.comm.rank):
        for kind, local_rows in _kinds(rows).items():
            table, by_column = tables[shard.table], local_rows.dim() > 1
            yield _ShardSlice(
                name=f"rows/{table.name}/{kind}",
                shape=_shape(table, by_column),
                shard=shard,
                column=shard.column if by_column else 0,
                values=local_rows[shard.base : shard.base + shard.rows],
                written=_written(rows, shard, by_column),
                multiplier=rows.layout.multipliers.get(table.name, 1),
            )


def _kinds(rows: EmbeddingStore) -> dict[str, Tensor]:
    return {"weight": rows.local_rows, **rows.optimizer.state}


def _shape(table: Table, by_column: bool) -> tuple[int, ...]:
    return (table.rows, table.columns) if by_column else (table.rows,)


def _written(rows: EmbeddingStore, shard: Shard, by_column: bool) -> tuple[int, int]:
    if shard.table in rows.layout.replicated:
        rank, size = rows.comm.rank, rows.comm.size
        return shard.rows * rank // size, shard.rows * (rank + 1) // size
    # Optimizer state with one value per row is equal on all column shards of a row: the first shard writes it.
    return (0, shard.rows) if by_column or shard.column == 0 else (0, 0)


# Dense


def _dense_optimizer_state(model: Recommender) -> dict[str, Tensor]:
    states = model.dense_optimizer.state
    return {
        f"{name}/{key}": value
        for name, parameter in model.backbone.named_parameters()
        for key, value in states.get(parameter, {}).items()
        if value is not None
    }


def _load_dense_optimizer(checkpoint: CheckpointInfo, model: Recommender) -> None:
    names = [name for name, _ in model.backbone.named_parameters()]
    state: dict[int, dict[str, Tensor]] = {}
    for path in checkpoint.names("dense_optimizer/"):
        name, _, key = path.rpartition("/")
        if name not in names:
            raise DamagedCheckpoint(f"{checkpoint.path}: optimizer state of {name!r}, which the model does not have")
        state.setdefault(names.index(name), {})[key] = checkpoint.read(f"dense_optimizer/{path}")
    groups = model.dense_optimizer.state_dict()["param_groups"]
    try:
        model.dense_optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{checkpoint.path}: the dense optimizer state does not fit: {error}") from error


# Random state


def _random_states(rank: int, device: torch.device) -> dict[str, Tensor]:
    states = {f"rng/{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng/{rank}/cuda"] = torch.cuda.get_rng_state(device)
    return states


def _load_random_state(checkpoint: CheckpointInfo, model: Recommender) -> None:
    saved = checkpoint.manifest.tensors
    name = f"rng/{model.comm.rank}"
    setters: list[tuple[str, Callable[[Tensor], None]]] = [(name, torch.set_rng_state)]
    if model.device.type == "cuda":
        setters.append((f"{name}/cuda", lambda state: torch.cuda.set_rng_state(state, model.device)))
    for key, load in setters:
        if key in saved:
            try:
                load(checkpoint.read(key))
            except (RuntimeError, TypeError) as error:
                raise DamagedCheckpoint(f"{checkpoint.path}: {key} is not a random state: {error}") from error


# Checks


def _check_fits(checkpoint: CheckpointInfo, model: Recommender, strategy: Strategy, *, same_ids: bool) -> None:
    """`UserError` with all differences between the model that was saved and this one.

    Unless it has the `same_ids`, the number of rows is none.
    """
    saved, wrong = checkpoint.manifest, []
    if saved.strategy != type(strategy).__name__:
        wrong.append(f"its strategy is {saved.strategy}, this run's {type(strategy).__name__}")
    if saved.optimizer != type(model.rows.optimizer).__name__:
        wrong.append(f"its rows.optimizer is {saved.optimizer}, this run's {type(model.rows.optimizer).__name__}")
    expected = {
        f"rows/{table.name}/{kind}": (_shape(table, local_rows.dim() > 1), local_rows.dtype)
        for table in model.rows.layout.tables
        for kind, local_rows in _kinds(model.rows).items()
    }
    expected |= {f"dense/{n}": (tuple(v.shape), v.dtype) for n, v in model.backbone.state_dict().items()}
    expected |= {
        f"sharded/{name}": (_by_user(strategy, values), values.dtype)
        for name, (_, values) in strategy.sharded_state().items()
    }
    found = {
        name: (entry.shape, DTYPES[entry.dtype])
        for name, entry in saved.tensors.items()
        if name.startswith(("rows/", "dense/", "sharded/"))
    }
    for name in sorted(expected.keys() | found.keys()):
        if not same_ids and not name.startswith("dense/") and name in expected and name in found:
            found[name] = ((expected[name][0][0], *found[name][0][1:]), found[name][1])
        if expected.get(name) != found.get(name):
            wrong.append(f"{name}: {_size(found.get(name))} there, {_size(expected.get(name))} here")
    if wrong:
        raise UserError(
            f"{checkpoint.path} is a checkpoint of another model: {'; '.join(wrong)}. "
            "Resume with the config of the run that wrote it"
        )


def _size(tensor: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    if tensor is None:
        return "nothing"
    shape, dtype = tensor
    return f"{DTYPE_NAMES[dtype]} {' x '.join(map(str, shape)) or 'scalar'}"


def _whole(name: str, value: Tensor) -> TensorSlice:
    return TensorSlice(name, tuple(value.shape), value)
