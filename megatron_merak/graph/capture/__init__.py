"""Captures any ``nn.Module`` as one graph of aten operations, without memory for its parameters."""
