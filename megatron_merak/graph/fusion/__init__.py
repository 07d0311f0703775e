"""Groups of aten operations replaced by operations of ``ops``."""
