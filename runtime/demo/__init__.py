"""The main job on a small checkpoint that reshard makes itself."""
