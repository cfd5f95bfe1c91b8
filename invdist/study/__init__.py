"""Studies: strategies compared on the same data, tuned equally, selected on validation, tested once per seed."""
