"""Using a trained run: annotate pairs, recommend items, score, export. Needs no process group and no TorchRec."""
