"""The table of docs/what-to-use.md: how many times as fast as dense rollouts each way to sample is, by model, from the
records of rollouts on an H200. Measures nothing; render.py writes it."""

from __future__ import annotations

from record_tables import table, times
from render_drafts import speeds
from render_fine import BY_ALL_MODELS, fine_records
from render_speed import REQUEST_SETS, SIZES, rollout_records

VERIFIED_SIZE = "1.7b"
"""The only shape whose verified rollouts were timed on an H200."""
VERIFIED = {
    "512": "verified, 512 tokens in units of 4, 4 bits",
    "512_4x2": "verified, 512 tokens in units of 4, 2 bits",
}
"""By their names in render_drafts."""


def ways() -> str:
    """A row for each way, a column for each model: of the drained set and of the steady one."""
    published = {(size, name): found["speedup"] for size, name, found in rollout_records()}
    units = {(size, name): found["speedup"] for size, name, found in fine_records(BY_ALL_MODELS, ["h200"])}
    measured = {"pages of 16 tokens, published": published, "units of 4 tokens, 2 bits, wide first layers": units}
    for called, told in VERIFIED.items():
        measured[told] = {
            (VERIFIED_SIZE, name): of_dense for (each, name), of_dense in speeds().items() if each == called
        }
    rows = [[way, *(_both(found, size) for size in SIZES)] for way, found in measured.items()]
    return table(["rollouts", *(f"Qwen3-{size.upper()}" for size in SIZES)], rows)


def _both(found: dict[tuple[str, str], float], size: str) -> str:
    if any((size, name) not in found for name in REQUEST_SETS):
        return "not timed"
    return " / ".join(times(found[size, name]) for name in REQUEST_SETS)


TABLES = {"ways": ways}
