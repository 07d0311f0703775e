"""A captured model on this rank: its parameters, its programs, its optimizer's state."""
