"""Tests of prefill."""
