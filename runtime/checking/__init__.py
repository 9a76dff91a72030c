"""The reference, and the ladder of comparisons with it."""
