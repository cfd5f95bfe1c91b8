from __future__ import annotations

from dataclasses import replace

import pytest

from invdist.planning.formulas import (
    TableSpread,
    busiest,
    dense_bytes,
    epoch_steps,
    ig_added_bytes,
    ig_traffic,
    memory_traffic,
    operations,
    plain_traffic,
    plain_working_bytes,
)
from invdist.planning.job import Job

JOB = Job(users=37_692, items=131_690, dim=32, batch=4096, gpus=4)
"""GMF: 32 columns, 33 dense parameters, 32 saved values of a pair."""
ROW_WISE = [TableSpread(sharding="row_wise", columns=32), TableSpread(sharding="row_wise", columns=32)]


def test_a_plain_step_by_hand() -> None:
    # 1,024 pairs a rank need 2 x 1,024 pieces, three quarters of them from others: 1,536.
    traffic = plain_traffic(JOB, ROW_WISE)
    assert traffic.ids == 1536 * 8 + 3 * 8
    assert traffic.rows == traffic.gradients == 1536 * 32 * 4
    assert traffic.dense == 2 * (33 + 2) * 4 * 3 / 4
    assert traffic.total == 405_738
    assert (traffic.all_to_alls, traffic.all_reduces) == (4, 1)


def test_an_inverse_gradient_step_by_hand() -> None:
    traffic = ig_traffic(JOB, ROW_WISE)
    assert traffic.ids == 2 * 1536 * 8 + 2 * 3 * 8
    assert traffic.rows == traffic.gradients == 2 * 196_608
    assert traffic.deltas == 196_608
    assert traffic.losses == 2 * (3 + 5 + 2 * 4) * 8 * 3 / 4
    assert traffic.dense == 2 * 210
    assert (traffic.all_to_alls, traffic.all_reduces) == (6, 3)
    # 64 unlabeled rows for each training-test row: only what belongs to U grows.
    many = ig_traffic(replace(JOB, rate=64), ROW_WISE)
    assert many.rows == 65 * 196_608
    assert many.deltas == traffic.deltas


def test_bytes_do_not_depend_on_tables_and_hardly_on_ranks() -> None:
    large = replace(JOB, users=10**9, items=10**8)
    assert ig_traffic(large, ROW_WISE) == ig_traffic(JOB, ROW_WISE)
    # The same 1,024 pairs a rank on ever more ranks: bounded by the case in which every row is on another rank.
    totals = [ig_traffic(replace(JOB, gpus=g, batch=1024 * g), ROW_WISE).total for g in (2, 8, 64, 1024)]
    rows_of_all = 5 * 2 * 1024 * 32 * 4
    assert totals == sorted(totals)
    assert rows_of_all < totals[-1] < 1.12 * rows_of_all


def test_one_rank_sends_nothing() -> None:
    assert ig_traffic(replace(JOB, gpus=1), ROW_WISE).total == 0


def test_table_wise_the_owner_answers_for_all() -> None:
    spreads = [
        TableSpread(sharding="table_wise", columns=32, owners=(0,)),
        TableSpread(sharding="table_wise", columns=32, owners=(1,)),
    ]
    owner, other = (plain_traffic(JOB, spreads, rank) for rank in (0, 2))
    assert owner.rows == 3 * 1024 * 32 * 4
    assert owner.gradients == 1024 * 32 * 4
    assert other.rows == 0
    assert other.gradients == 2 * 1024 * 32 * 4
    assert busiest(JOB, spreads, inverse_gradient=False) == owner


def test_column_wise_a_piece_is_a_column_shard() -> None:
    spreads = [
        TableSpread(sharding="column_wise", columns=32, owners=(0, 1)),
        TableSpread(sharding="column_wise", columns=32, owners=(2, 3)),
    ]
    traffic = plain_traffic(JOB, spreads, rank=0)
    assert traffic.ids == (1024 + 2 * 1024) * 8 + 3 * 8
    assert traffic.rows == 3 * 1024 * 16 * 4
    assert traffic.gradients == 3 * 1024 * 16 * 4


def test_data_parallel_tells_every_rank() -> None:
    spreads = [TableSpread(sharding="data_parallel", columns=32)] * 2
    traffic = plain_traffic(JOB, spreads)
    assert traffic.rows == 0
    assert traffic.gradients == 3 * 2 * 1024 * 32 * 4


def test_memory_by_hand() -> None:
    rows = 2 * 1024 * 32 * 4
    indices = 3 * 8 * 2 * 1024 * 8
    tower = 32 * 1024 * 4
    assert plain_working_bytes(JOB) == 10 * rows + indices + 2 * tower
    of_three_candidates = 3 * (rows + tower + 1024 * 4 + 33 * 4)
    assert ig_added_bytes(JOB) == (11 + 4) * rows + indices + 2 * tower + 2 * 33 * 4 + of_three_candidates
    assert ig_added_bytes(replace(JOB, users=10**9)) == ig_added_bytes(JOB)
    assert JOB.row_bytes == 32 * 4 * 3
    assert replace(JOB, optimizer="sgd").row_bytes == 128
    assert replace(JOB, optimizer="rowwise_adagrad").row_bytes == 132
    assert dense_bytes(JOB) == 33 * 4 * 4
    assert memory_traffic(JOB, False) == 2 * plain_working_bytes(JOB) + 6 * rows


def test_a_candidate_more_costs_its_rows_in_memory_and_a_forward_in_time() -> None:
    more = replace(JOB, candidates=4)
    of_candidate = 2 * 1024 * 32 * 4 + 32 * 1024 * 4 + 33 * 4 + 1024 * 4
    assert ig_added_bytes(more) - ig_added_bytes(JOB) == of_candidate
    assert memory_traffic(more, True) - memory_traffic(JOB, True) == 2 * of_candidate
    assert operations(more, True) - operations(JOB, True) == 2 * 33 * 1024


def test_operations_and_steps() -> None:
    assert operations(JOB, False) == 6 * 33 * 1024
    assert operations(JOB, True) == (6 + 6 + 2 * 3) * 33 * 1024
    assert epoch_steps(9_462_492, 1024, 0.1) == (8317, 925)
    assert epoch_steps(10, 4, 0.1) == (3, 1)


@pytest.mark.parametrize("batch", [1, 4095, 4096, 4097])
def test_the_fullest_rank_counts(batch: int) -> None:
    assert replace(JOB, batch=batch).pairs == {1: 1, 4095: 1024, 4096: 1024, 4097: 1025}[batch]
