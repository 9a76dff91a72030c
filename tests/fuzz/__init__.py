"""Hostile input: documents mutated by the thousand are refused in words or are truly valid."""
