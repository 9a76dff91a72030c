"""The result of verify-and-run as one HTML page that opens offline."""
