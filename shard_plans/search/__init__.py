"""Choosing the parallel sizes and the stages for a cluster."""
