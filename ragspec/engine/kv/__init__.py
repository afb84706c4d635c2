"""The KV cache, its memory budget, and prefixes that rows share."""
