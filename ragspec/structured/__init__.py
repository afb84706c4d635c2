"""Answers that a grammar shapes: what a config or a record asks for -> a grammar -> which tokens may follow."""
