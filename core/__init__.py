"""Ids, hashing, requests, configuration types, errors, wire codec; stdlib and msgpack only."""
