"""Speculation without an engine: methods, drafters, step costs, draft lengths, guards and citations."""
