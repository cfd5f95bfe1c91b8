"""The benchmarks of `invdist bench`: each public module has `add_arguments` and `run`."""
