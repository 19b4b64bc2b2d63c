"""docs/metrics.md has every name that verl or TRL logs, and says which of them our own loop does not log."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from sparroll.engines.report import EngineReport
from sparroll.engines.vllm.rescoring import RescoringCounts
from sparroll.integrations import measured
from sparroll.mismatch import TailStatistics

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
NAME = re.compile(r"(rollout|staleness|rescoring|control|check|policy|mismatch|time)/[a-z_]+")
PARTS = ("measure", "correct", "watch", "ceiling")


def constants(folder: str) -> set[str]:
    """Names of metrics that are written out in the sources of a folder, also in parts as `time/sparroll_{part}_seconds`."""
    found: set[str] = set()
    for path in (ROOT / "src" / "sparroll" / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
                found.add(node.value)
    # The front of a name that is put together.
    return found - {"time/sparroll_"}


def logged() -> set[str]:
    """By every integration, whatever else the watchers, the corrections and the tail report by their own names."""
    counts, checked = RescoringCounts(), measured.CheckSums(tokens=1)
    state = TailStatistics(bin_tokens=64).state()
    step = measured.EngineStep(state, counts, "top_k_lower", EngineReport("vllm", "m", None, 0), checked)
    names = {*measured.rescoring_report([step]), *measured.ran_report([step]), *measured.spent_report([step])}
    return names | constants("integrations") | {f"time/sparroll_{part}_seconds" for part in PARTS}


def test_every_name_that_an_integration_logs_is_on_the_page() -> None:
    names = logged()
    assert {"rollout/sparse_steps", "rescoring/share_of_step", "staleness/token_share", "control/dense_steps"} <= names
    assert sorted(name for name in names if f"`{name}`" not in PAGE) == []


def test_names_that_our_own_loop_does_not_log_stand_in_the_section_of_other_trainers() -> None:
    own, section = PAGE.split("\n## In other trainers\n")
    ours = constants("train") | constants("control")
    theirs = {name for name in logged() if name.startswith(("rollout/", "staleness/", "time/")) and name not in ours}
    assert theirs == {
        *("rollout/sparse_steps", "rollout/dense_steps", "rollout/preemptions"),
        *("staleness/token_share", "staleness/kl_sampler_to_dense"),
        *(f"time/sparroll_{part}_seconds" for part in PARTS),
    }
    assert all(f"`{name}`" in section and f"`{name}`" not in own for name in theirs)
