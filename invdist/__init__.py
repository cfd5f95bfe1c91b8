"""invdist: distributed inverse learning for recommenders with extremely sparse feedback."""

__version__ = "0.1.0"
