"""The runtime's forward pass replayed in shapes alone: what each operation takes and gives back, and the peak."""
