"""The closed set of wire messages, one module per receiver."""
