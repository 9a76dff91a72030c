"""The report as one HTML page that opens offline: its data, its template, and how they are put together."""
