"""Studies: strategies compared on the same data, tuned alike, selected on validation, tested once."""
