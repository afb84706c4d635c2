"""Retrieval: an index built from documents, and searches in it that give records their contexts."""
