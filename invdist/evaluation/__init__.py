"""Ranking metrics, on one process and over all ranks, and their text form."""
