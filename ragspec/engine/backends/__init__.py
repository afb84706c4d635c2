"""Backends: how a step's attention is computed, and its forward run, for rows whose keys and values are in blocks."""
