"""The names of TorchRec and torch that are not public and that we still need, all in this module.

`tests/embeddings/test_torchrec_internals.py` fails with the name and the installed version when one of them changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def sharding_types(module: Any) -> list[str]:
    """The sharding types of a sharded `EmbeddingCollection`, in the order in which their shards lie in memory.

    TorchRec makes one lookup per sharding type, each with one FBGEMM module.
    """
    return list(module._sharding_type_to_sharding)


def shard_weights(module: Any) -> list[Tensor]:
    """The weights of every local shard of a sharded `EmbeddingCollection`, in memory order."""
    weights: list[Tensor] = []
    for lookup in module._lookups:
        for kernel in getattr(lookup, "module", lookup)._emb_modules:
            weights += [weight.detach() for weight in kernel.emb_module.split_embedding_weights()]
    return weights


def stats_lines(stats: Any) -> list[str]:
    """The lines of the report that `EmbeddingStats` made of a plan."""
    return stats._stats_table


def place_on_devices(plan: Any, devices: Sequence[str]) -> None:
    """Makes a sharding plan name the device that each rank really has.

    The planner takes rank r for the device r % (ranks of the first rank's node). That is wrong where nodes have
    different numbers of ranks, as after the loss of one.
    """
    from torch.distributed.remote_device import _remote_device

    for module in plan.plan.values():
        for parameter in module.values():
            for shard in parameter.sharding_spec.shards if parameter.sharding_spec is not None else ():
                rank = shard.placement.rank()
                shard.placement = _remote_device(f"rank:{rank}/{devices[rank]}")
