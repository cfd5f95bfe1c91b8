"""The report of a run: figures, tables and the HTML page, without torch."""
