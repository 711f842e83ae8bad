"""One run: the loop, the model, the loss, the optimizers, checkpoints, the run folder, metrics,
devices."""
