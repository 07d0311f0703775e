"""Any ``nn.Module`` as one graph of aten operations without memory."""
