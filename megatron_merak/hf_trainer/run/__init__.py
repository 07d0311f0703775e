"""One call of ``train``: its loop, its rates, its directory and what a resumed run needs."""
