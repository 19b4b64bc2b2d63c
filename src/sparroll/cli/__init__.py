"""The command line: one verb, one file. A verb reads its options, calls the library and prints; it computes nothing
itself."""

from __future__ import annotations

from sparroll.cli.app import main

__all__ = ["main"]
