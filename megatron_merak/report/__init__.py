"""A training run as one HTML page: its directory is read, charts are drawn, the page is written."""
