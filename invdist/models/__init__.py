"""The model: sharded rows, backbones over them, and the optimizers of both."""
