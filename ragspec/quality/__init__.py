"""How good answers are: against references, between two runs, with intervals."""
