"""Tests of the whole: families, the command, processes, full-size and trained checkpoints."""
