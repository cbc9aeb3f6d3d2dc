"""Model execution over a paged KV cache."""
