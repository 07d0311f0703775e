"""Rates, sizes and times in the words of the table."""


def rate_text(rate: float) -> str:
    """Return bytes per second as "12.3 GB/s" or "45.6 MB/s"."""
    return f"{rate / 1e9:,.2f} GB/s" if rate >= 0.995e9 else f"{rate / 1e6:,.1f} MB/s"


def size_text(size: int) -> str:
    """Return a number of bytes, as "4 KiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def time_text(seconds: float) -> str:
    """Return a short time, as "120 us" or "3.4 ms"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:,.0f} us"
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
