"""From a raw log to a prepared data set: read, label, split, write."""
