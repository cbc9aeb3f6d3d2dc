"""Checks that users run against their own models and machines: parity and kills."""
