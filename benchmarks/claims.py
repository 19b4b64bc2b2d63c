"""Figures in the sentences of README.md and of the docs, from the records. Measures nothing; render.py writes them.

A claim is a stretch of a page's words with names where figures stand. render.py finds it on the page, however its lines
break, and writes the figures of the records in their places; words that are not there any more are an error. So a
sentence is changed on its page first, and here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import claims_cells
import claims_checks
import claims_drafts
import claims_heads
import claims_kernels
import claims_short_steps
import claims_small_units
import claims_speed
import claims_study
import claims_trainers
import claims_training
import render_pages
from claim_words import Figures

NUMBER = r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d*\.?\d+))"


@dataclass(frozen=True)
class Claim:
    """Words of a page, and where their figures come from."""

    page: str
    words: str
    """With `{name}` where a figure stands."""
    figures: Callable[[], Figures]

    def written(self, text: str) -> str:
        """The page with the claim's figures in their places."""
        found = list(re.finditer(self._pattern(), text))
        if len(found) != 1:
            raise ValueError(f"{self.page} holds {len(found)} times: {self.words}")
        figures, names = self.figures(), re.findall(r"\{(\w+)\}", self.words)
        for place, name in reversed(list(enumerate(names, 1))):
            start, end = found[0].span(place)
            text = text[:start] + figures[name] + text[end:]
        return text

    def _pattern(self) -> str:
        parts = re.split(r"\{\w+\}", self.words)
        return NUMBER.join(r"\s+".join(re.escape(word) for word in re.split(r"\s+", part)) for part in parts)


def _claims(pages: Mapping[str, Mapping[str, Callable[[], Figures]]]) -> tuple[Claim, ...]:
    return tuple(Claim(page, words, figures) for page, those in pages.items() for words, figures in those.items())


CLAIMS = tuple(
    claim
    for each in (
        claims_speed,
        claims_small_units,
        claims_checks,
        claims_kernels,
        claims_short_steps,
        claims_study,
        claims_drafts,
        claims_training,
        claims_trainers,
        claims_heads,
        claims_cells,
        render_pages,
    )
    for claim in _claims(each.PAGES)
)


def write_figures(page: str, text: str) -> str:
    """A page with the figures of all its claims; `page` is its path in the repository."""
    for claim in CLAIMS:
        if claim.page == page:
            text = claim.written(text)
    return text
