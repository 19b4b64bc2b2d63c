"""How long checks of drafts took in vLLM, beside what a plan has for them, and the constants of the plan fitted to the
records again. Reads records and measures nothing.

    python benchmarks/check_times.py

Each verified cell of verified_rollouts.py's records is a measurement: the seconds between the last draft and the verdicts
of a window of every request. Relative errors are fitted, so that short checks count as much as long ones. A row of a
window is a token that stands when nothing is taken back, so a cell in which everything was kept says how many rows its
windows had. Records of checks that compared the logits operator by operator, before a kernel did, are left out.

Until 2026-11-28 the verdicts that the benchmark forced waited for the device after every 256 rows, which the rule does not
do, and the kernel compared logits in smaller parts. Both are in the records, and grow with the rows as the logits' time
does. So those records have logit bytes of their own in the fit, and the plan takes those of the records since then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from sparroll import records
from sparroll.plan.check_time import ATTENTION_SHARE, LAYERS_SHARE, LOGIT_BYTES, check_time
from sparroll.plan.hardware import find_hardware
from sparroll.plan.model_shape import model_shape

RESULTS = Path(__file__).parent / "results"
DEVICE = find_hardware("H200")
BEFORE_THE_KERNEL = {
    f"verified-rollouts-{name}-h200"
    for name in ("qwen3-1.7b-65-rows", "qwen3-1.7b-128", "qwen3-1.7b", "windows-qwen3-1.7b", "qwen3-8b")
}
WAITED_UNTIL = "2026-11-28T22:00"
"""Records of before had forced verdicts that waited for the device."""
WAITING_LOGIT_BYTES = 233.0
"""Logit bytes of those."""

PLANNED = {
    "attention_share": ATTENTION_SHARE,
    "layers_share": LAYERS_SHARE,
    "logit_bytes": LOGIT_BYTES,
    "waiting_logit_bytes": WAITING_LOGIT_BYTES,
}
"""What is fitted, as the plan has it, and the last one as it is here."""


@dataclass(frozen=True)
class TimedCheck:
    """One measured cell."""

    record: str
    model: str
    batch: int
    context_tokens: float
    """Mean of the requests."""
    rows: int
    """Of each request's window."""
    seconds: float
    waited: bool
    """Whether its verdicts waited for the device."""
    cell: dict[str, Any]
    """As the record has it."""

    def planned(
        self,
        attention_share: float = ATTENTION_SHARE,
        layers_share: float = LAYERS_SHARE,
        logit_bytes: float = LOGIT_BYTES,
        waiting_logit_bytes: float = WAITING_LOGIT_BYTES,
    ) -> float:
        return check_time(
            model_shape(self.model),
            DEVICE,
            batch=self.batch,
            mean_context_tokens=self.context_tokens,
            window_tokens=self.rows,
            attention_share=attention_share,
            layers_share=layers_share,
            logit_bytes=waiting_logit_bytes if self.waited else logit_bytes,
        ).seconds

    @property
    def error(self) -> float:
        return self.planned() / self.seconds - 1


def timed_checks() -> list[TimedCheck]:
    """Of all records of an H200."""
    found: list[TimedCheck] = []
    for path in sorted(RESULTS.glob("verified-rollouts-*-h200.json")):
        if path.stem in BEFORE_THE_KERNEL:
            continue
        record = records.read(path, "verified-rollouts")
        cells = [cell for cell in record["results"] if "check_share" in cell]
        rows = {_window(cell): tokens for cell in cells if (tokens := _tokens_if_whole(record, cell))}
        found += [_timed(record, path.stem, cell, rows.get(_window(cell), _window(cell))) for cell in cells]
    return found


def _window(cell: dict[str, Any]) -> int:
    return int(cell["window_tokens"])


def _tokens_if_whole(record: dict[str, Any], cell: dict[str, Any]) -> int | None:
    """Tokens that a window gave, where nothing was taken back."""
    if cell["cut_share"]:
        return None
    return round(cell["tokens"][0] / cell["batch"] / record["config"]["timed_windows"])


def _timed(record: dict[str, Any], name: str, cell: dict[str, Any], rows: int) -> TimedCheck:
    seconds = cell["check_share"] * cell["seconds_per_window"]
    context = cell["context_tokens"] / cell["batch"]
    waited = record["date"] < WAITED_UNTIL
    return TimedCheck(name, record["config"]["model"], cell["batch"], context, rows, seconds, waited, cell)


def fitted(checks: Sequence[TimedCheck]) -> dict[str, float]:
    """The constants with the least squares of relative errors, by their names in `check_time`."""

    def errors(constants: np.ndarray) -> np.ndarray:
        return np.array([each.planned(*constants) / each.seconds - 1 for each in checks])

    found = least_squares(errors, [0.5, 0.7, 150.0, 200.0], x_scale=[0.1, 0.1, 50.0, 50.0]).x
    return dict(zip(PLANNED, map(float, found), strict=True))


def main() -> None:
    checks = timed_checks()
    for each in checks:
        print(
            f"{each.record:42} batch {each.batch:3}  context {each.context_tokens:8,.0f}  rows {each.rows:4}  "
            f"took {1e3 * each.seconds:6.1f} ms  planned {1e3 * each.planned():6.1f} ms  {100 * each.error:+5.1f} %"
        )
    print(json.dumps({"fitted": {name: round(value, 3) for name, value in fitted(checks).items()}, "plan": PLANNED}))


if __name__ == "__main__":
    main()
