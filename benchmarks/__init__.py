"""Benchmarks: ``python -m benchmarks`` lists them. Those of a GPU are files that a session starts:
docs/gpu.md.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EVIDENCE = DOCS / "evidence"
