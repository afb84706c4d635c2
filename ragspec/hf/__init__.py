"""What ragspec adds to stock transformers: the hook that counts acceptance, stopping, quiet loading."""
