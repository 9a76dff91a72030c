"""Reading, hashing and writing in bounded memory, on a few threads."""
