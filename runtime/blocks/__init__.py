"""Forward math on one rank: the blocks that family tables name, and the layer made of them."""
