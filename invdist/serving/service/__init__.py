"""`invdist serve`: a trained run behind HTTP, on Ray Serve."""
