"""Proposers: where the draft tokens of the engine's rows come from."""
