"""Learning: losses, the inverse gradient, and every strategy that `method:` can name."""
