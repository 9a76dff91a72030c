"""Architectures as data: the tables, their language, and a checkpoint bound to one of them."""
