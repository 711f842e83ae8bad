"""From text to batches: sources of text, tokenizers, shards with a manifest, and batches.

Nothing in this folder may know about models, optimizers, runs or studies.
"""
