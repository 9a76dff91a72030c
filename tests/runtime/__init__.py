"""Tests of runtime, a file a module."""
