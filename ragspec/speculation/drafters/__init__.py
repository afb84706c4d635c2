"""Drafters that need no second model. A new drafter is one new file (see base.py)."""
