"""Config files that come with the package."""

from pathlib import Path

LOCAL = Path(__file__).with_name("local.yaml")
"""Settings of `invdist local`. In a checkout, configs/local.yaml is a link to this file."""

OWN_DATA = Path(__file__).with_name("own-data.yaml")
"""Settings of `invdist train` without --config. configs/own-data.yaml is a link to this file."""
