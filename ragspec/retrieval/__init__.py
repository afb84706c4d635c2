"""From documents to contexts: an index of passages, and the search in it."""
