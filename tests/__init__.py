"""Tests, which mirror the modules, and the makers of the checkpoints that they read."""
