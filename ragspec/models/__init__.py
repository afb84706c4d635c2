"""Models: a name resolved to files, checks before loading, tokenizers, weights, and fixes for transformers."""
