"""Settings: the keys of a run (`schema`), how they are read (`loading`), and the types of fields (`fields`)."""

from invdist.config.loading import add_arguments, dump, from_mapping, from_text, load
from invdist.config.schema import Config

__all__ = ["Config", "add_arguments", "dump", "from_mapping", "from_text", "load"]
