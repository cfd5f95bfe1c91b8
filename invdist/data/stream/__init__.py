"""From a prepared data set to batches: order, blocks, sampling."""
