"""Sharded embedding tables: placement, exchange between ranks, updates, optimizers."""
