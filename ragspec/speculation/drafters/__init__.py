"""Where drafts come from when no second model writes them. A new drafter is one new file (see base.py)."""
