"""The engine: the training loop on one rank, the workers around it, checkpoints and events."""
