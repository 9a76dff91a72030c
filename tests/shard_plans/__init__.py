"""Tests of shard_plans, a file a module."""
