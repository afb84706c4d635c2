"""Prompts: templates, the token budget of contexts, and control words kept as text."""
