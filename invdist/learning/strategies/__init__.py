"""One file per strategy; each registers itself."""
