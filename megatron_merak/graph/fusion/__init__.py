"""Replaces groups of aten operations by fused operations of ``ops``."""
