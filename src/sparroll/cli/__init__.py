"""The command line: one verb, one file. Reads options, calls the library, prints; nothing is computed here."""

from __future__ import annotations

from sparroll.cli.app import main

__all__ = ["main"]
