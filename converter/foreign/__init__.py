"""Folders that engines' own tools wrote: no manifest says what is in them."""
