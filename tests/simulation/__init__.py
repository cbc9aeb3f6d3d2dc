"""Seeded simulation of the whole control code."""
