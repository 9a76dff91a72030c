"""Bugs put into a sharded run at random places, and what the verification says of each."""
