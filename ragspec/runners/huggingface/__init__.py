"""Hugging Face models: ragspec's engine, or stock generate()."""
