"""What ragspec adds to stock transformers: a tokenizer of our shape, counted acceptance, where answers end."""
