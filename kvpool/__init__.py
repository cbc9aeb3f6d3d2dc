"""The pooled KV cache: slots, pool nodes, their clients and the directory."""
