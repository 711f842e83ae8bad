"""One training run: config, model, loss, optimizers, loop, metrics, checkpoints, run folder.

Nothing in this folder may know about studies, commands or reports, which use it.
"""
