"""Machinery shared by tests: a fault proxy, clusters in one process, simulation."""
