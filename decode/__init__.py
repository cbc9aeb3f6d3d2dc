"""The decode worker: pure batcher and state, and the shell around them."""
