"""Measurements, run by hand: their numbers are in docs/performance.md."""
