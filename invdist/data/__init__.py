"""From a raw log to a stream: labeling, splitting, sharding, sampling, streaming."""
