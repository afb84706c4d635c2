"""One forward of a Hugging Face model over packed rows: layout, masks, attention, weights, compilation, self-check."""
