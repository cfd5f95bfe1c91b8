"""The benchmarks behind `invdist bench`: each module offers `add_arguments` and `run`."""
