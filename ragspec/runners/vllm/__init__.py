"""vLLM, driven step by step, and our drafters inside it."""
