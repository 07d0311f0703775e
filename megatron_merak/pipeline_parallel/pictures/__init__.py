"""Timelines as text, PNG, HTML page and trace."""
