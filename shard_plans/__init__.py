"""What goes where, and does it fit: checkpoints, family tables, plans and the memory ledger (no torch)."""
