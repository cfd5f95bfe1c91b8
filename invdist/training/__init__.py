"""Training: the loop on one rank, Ray workers around it, checkpoints, events and the run folder."""
