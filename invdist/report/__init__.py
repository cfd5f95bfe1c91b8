"""What a run did, for people: its history read back, figures, tables, the HTML report, TensorBoard."""
