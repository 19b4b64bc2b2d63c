"""`python -m sparroll` is the command `sparroll`."""

from __future__ import annotations

import sys

from sparroll.cli import main

sys.exit(main())
