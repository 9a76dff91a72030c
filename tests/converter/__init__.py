"""Tests of converter, a file a module."""
