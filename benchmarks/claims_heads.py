"""Figures in sentences about budgets by KV head. Measures nothing; claims.py puts them on the pages."""

from __future__ import annotations

import math
from collections.abc import Mapping

from claim_words import Claims, Figures, bare
from render_heads import RECORDS, settings

from sparroll.rounding import rounded_down


def against_layers() -> Figures:
    """What budgets by head change against budgets by layer, over all settings."""
    every = [of for record in RECORDS for of in settings(record)]
    pairs = [of["pairs"]["head-kl against layer-kl"] for of in every]
    falls, rises = [-100 * pair["kl_change"] for pair in pairs], [pair["q05_change"] for pair in pairs]
    assert all(pair["q05_change_interval"][0] > 0 for pair in pairs), "the tail is not surely higher everywhere"
    return {
        "settings": str(len(every)),
        "least": str(math.floor(min(falls))),
        "most": str(math.floor(max(falls))),
        "sure": str(sum(pair["kl_change_interval"][1] < 0 for pair in pairs)),
        "pays": str(sum(of["pays"] for of in every)),
        "tail_least": bare(rounded_down(min(rises))),
        "tail_most": bare(rounded_down(max(rises))),
    }


PAGES: Mapping[str, Claims] = {
    "docs/calibration.md": {
        "In {settings} comparisons the KL with budgets by head was {least} to {most} % lower than with budgets by layer, "
        "surely lower in {sure} of them, and by 15 % or more in {pays} of these": against_layers,
        "The tail was higher by {tail_least} to {tail_most}": against_layers,
    },
}
