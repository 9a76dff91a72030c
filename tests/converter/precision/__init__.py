"""Tests of converter/precision."""
