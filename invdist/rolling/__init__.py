"""Day by day: each day is scored before anything is learned from it."""
