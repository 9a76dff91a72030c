"""Changes of precision: stored numbers decoded, rounded to another format, and the error measured."""
