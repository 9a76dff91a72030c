"""The output folder: what may be written there, under which names, and what is carried along."""
