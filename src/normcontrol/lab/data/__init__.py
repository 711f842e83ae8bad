"""Text in, batches out: corpora, tokenizers, shards with a manifest, preparation, batches."""
