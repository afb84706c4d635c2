"""What vLLM needs of us: its own configuration (config), and drafts for its rows (proposer, rows)."""
