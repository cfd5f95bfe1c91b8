"""One file per backbone; each registers itself."""
