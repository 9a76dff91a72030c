"""What each rank holds: the grid, the cuts, the native layout, and a plan laid out file by file."""
