"""The proof that no answer changed."""
