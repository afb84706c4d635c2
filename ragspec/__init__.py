"""Batch RAG generation with speculative decoding, from the command line."""

__version__ = "0.1.0"
