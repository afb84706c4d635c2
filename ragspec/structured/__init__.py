"""Structured answers: from a config's or a record's form to a grammar, and to the tokens that may follow."""
