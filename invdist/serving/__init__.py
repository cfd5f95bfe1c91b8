"""Using a trained run: evaluate, score, annotate, recommend, export. Imports no trainer, no TorchRec and no Ray."""
