"""Ids, block hashing, requests, configuration types, errors, wire codec and connections; stdlib and msgpack only."""
