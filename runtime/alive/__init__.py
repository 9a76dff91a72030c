"""Whether every rank is alive: what each is doing, and what ends a run in which one died, hangs or made no number."""
