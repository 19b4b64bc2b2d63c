"""A schedule says how many tokens of the KV cache a decode step may read at each context length, in all sparse layers alike
or in each group of layers. Load, check, look up, save.

schedule.py is the Schedule itself. steps.py has its steps and what a budget may be, file_tables.py reads and writes the
tables of its file, target.py checks what the file says of a target, and made_for.py compares it with a model.

Nothing here decides a budget (see calibrate/) or reads a cache (see attention/).
"""

from __future__ import annotations

from sparroll.schedule.file_tables import FORMAT, GROUPED_FORMAT
from sparroll.schedule.schedule import Schedule, caveats_of, check_is_schedule
from sparroll.schedule.steps import MOST_TOKENS, Step, check_budget

__all__ = [
    "FORMAT",
    "GROUPED_FORMAT",
    "MOST_TOKENS",
    "Schedule",
    "Step",
    "caveats_of",
    "check_budget",
    "check_is_schedule",
]
