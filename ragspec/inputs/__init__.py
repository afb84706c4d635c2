"""Inputs: files, archives, pipes, tables and datasets as rows, and rows as records."""
