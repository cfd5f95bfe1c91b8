"""How well scores rank: metrics of one process, and the same metrics over all ranks."""
