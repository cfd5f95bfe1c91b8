"""Checkpoints of the whole state of a run: independent of the number of ranks and of sharding, without pickle."""

from invdist.training.checkpoint.manifest import DamagedCheckpoint, Position
from invdist.training.checkpoint.reader import CheckpointInfo, read_checkpoint
from invdist.training.checkpoint.store import CheckpointStore

__all__ = ["CheckpointInfo", "CheckpointStore", "DamagedCheckpoint", "Position", "read_checkpoint"]
