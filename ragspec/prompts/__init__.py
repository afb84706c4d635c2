"""Record -> prompt: templates, the token budget for contexts, text that stays text."""
