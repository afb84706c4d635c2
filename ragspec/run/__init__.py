"""A run from set-up to statistics."""
