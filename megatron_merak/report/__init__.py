"""What a run left behind, as one HTML page: reading its directory, charts, the page."""
