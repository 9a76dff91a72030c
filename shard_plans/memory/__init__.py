"""Bytes a rank: weights to the byte, cache and buffers by formula, and the cards that hold them."""
