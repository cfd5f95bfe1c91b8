"""A trained run whose tables and raw ids are divided among Ray workers, so that no process holds them whole."""
