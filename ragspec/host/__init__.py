"""The machine that ragspec runs on."""
