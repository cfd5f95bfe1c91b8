"""The benchmarks behind `python -m invdist.bench`: each module offers `add_arguments` and `run`."""
