"""Timing methods against each other: what to run (plan), in turn (measure, worker), and what came (table)."""
