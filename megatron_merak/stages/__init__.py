"""A model on this rank, native or captured: its parameters, its programs, its optimizer's state."""
