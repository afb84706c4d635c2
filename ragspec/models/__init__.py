"""A model's name -> what loads: folder, tokenizer, vocabulary, weights, and what transformers gets wrong of them."""
