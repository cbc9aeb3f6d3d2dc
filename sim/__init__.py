"""Discrete-event driver that runs the real scheduler, batchers and directory."""
