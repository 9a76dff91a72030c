"""Ranks talking to each other: virtual ones in one process, or processes under torchrun; devices."""
