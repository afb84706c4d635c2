"""Batched speculative decoding on unmodified Hugging Face causal models: rows in, tokens out."""
