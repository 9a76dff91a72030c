"""Commands that start an engine with a plan's layout, and the reasons why one can't have it."""
