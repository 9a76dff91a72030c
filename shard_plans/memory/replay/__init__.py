"""The runtime's forward pass replayed in shapes alone: what memory each operation takes and gives back, and its peak."""
