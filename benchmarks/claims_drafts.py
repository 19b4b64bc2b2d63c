"""Figures in sentences about checked drafts in the study and on tiny-reasoner. Measures nothing; claims.py puts them on the
pages."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from claim_words import Claims, Figures, bare, down, up
from claims_study import KIND, changes, gain, means, row_of
from record_tables import results
from render_drafts import dense_runs, trained
from render_study import (
    CHECK_BUDGETS,
    CHECK_GRID,
    DRAFT_BUDGETS,
    DRAFT_UNITS,
    DRAFTS,
    STUDY_CHECKS,
    TINY_CHECKS,
    UNIT_CHECKS,
    VERIFIED,
    gained,
)


def _changes(found: dict[str, Any], row: str) -> list[float]:
    """Change of dense accuracy of each of the row's runs that ended."""
    return [gained(run) for run in found["runs"] if run["row"] == row and run["state"] == "finished"]


def verified() -> Figures:
    """Rows that check their drafts, beside the same budgets without a check."""
    found = results(VERIFIED, KIND)
    made: Figures = {"dense": gain(means(60, "dense")), "dense_low": gain(min(changes(60, "dense")))}
    for name, row, plain in (
        ("fixed", "fixed-verified", "fixed-tis"),
        ("75", "calibrated-0.75-verified", "calibrated-0.75"),
        ("86", "calibrated-0.86-verified", "calibrated-0.86"),
    ):
        line = next(line for line in found["table"] if line["row"] == row)
        ends = _changes(found, row)
        made |= {
            f"checked_{name}": gain(statistics.mean(ends)),
            f"checked_{name}_low": gain(min(ends)),
            f"checked_{name}_high": gain(max(ends)),
            f"plain_{name}": gain(means(60, plain)),
            f"read_{name}": up(100 * line["kv_read_share"]["mean"]),
            f"reward_{name}": down(line["reward_last"]["mean"], 2),
            f"plain_reward_{name}": down(row_of(60, plain)["reward_last"]["mean"], 2),
        }
    return made


SMALL_KL = 0.011
"""Of what checks keep, over all lengths: rows up to it trained about like dense rollouts."""


def kept_kl() -> Figures:
    """What rows with checks gained, by the KL of what their checks kept."""
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for record in (VERIFIED, CHECK_GRID, CHECK_BUDGETS, DRAFTS, *itertools.chain(*DRAFT_BUDGETS.values())):
        study = results(record, KIND)
        for line in study["table"]:
            ends = _changes(study, line["row"])
            if "verified" in line["row"] and ends:
                kl = line["kl"]["mean"]
                found[kl <= SMALL_KL].append((kl, statistics.mean(ends)))
    said: Figures = {"dense": gain(means(60, "dense"))}
    for small, word in ((True, "small"), (False, "large")):
        kls, gains = zip(*found[small], strict=True)
        said |= {f"{word}_from": bare(up(min(kls), 3)), f"{word}_to": bare(up(max(kls), 3))}
        said |= {f"{word}_least": gain(min(gains)), f"{word}_most": gain(max(gains))}
    return said


def check_grid() -> Figures:
    """128 tokens everywhere with other checks than the usual one."""
    found = results(CHECK_GRID, KIND)
    rows = ("fixed-verified-32-0.1", "fixed-verified-32-0.5", "fixed-verified-64-0.1")
    made: dict[str, str] = {"dense": gain(means(60, "dense")), "usual": verified()["checked_fixed"]}
    apart = []
    for name, row in zip(("short", "strict", "higher"), rows, strict=True):
        ends = _changes(found, row)
        apart.append(max(ends) - min(ends))
        made[name] = gain(statistics.mean(ends))
    strict = next(line for line in found["table"] if line["row"] == rows[1])
    least, most = bare(down(min(apart), 3)), bare(up(max(apart), 3))
    return made | {"least": least, "most": most, "kl": bare(up(strict["kl"]["mean"], 3))}


def draft_units() -> Figures:
    """Checked drafts in small units without a dense layer: whole runs in units of 4 tokens, and those in units of 8 as far
    as they went until the clock cut them."""
    halfway = 30

    def of(record: str, row: str) -> list[dict[str, Any]]:
        return [run for run in results(record, KIND)["runs"] if run["row"] == row]

    units, larger = (
        of(record, f"quantized-{each}-128-wide-verified") for record, each in ((DRAFTS, "4x4"), (DRAFT_UNITS, "8x4"))
    )
    accuracy = [{step: value for step, value, *_ in run["dense_accuracy"]} for run in larger]
    ends = _changes(results(DRAFTS, KIND), "quantized-4x4-128-wide-verified")

    def mean(runs: list[dict[str, Any]], name: str) -> float:
        return statistics.mean(value for run in runs for value in run["series"][name] if value is not None)

    solved = {row["sampler"]: row["reward"] for row in results(UNIT_CHECKS, "study-checks")["rows"]}
    return {
        "units": gain(statistics.mean(ends)),
        "units_low": gain(min(ends)),
        "units_high": gain(max(ends)),
        "pages": verified()["checked_fixed"],
        "dense": verified()["dense"],
        "larger": gain(statistics.mean(each[halfway] - each[0] for each in accuracy)),
        "solved": bare(down(solved["verified-128-in-4x4-64-0.01"], 2)),
        "solved_dense": bare(down(solved["dense"], 2)),
        "read": up(100 * mean(units, "rollout/kv_read_share"), 1),
        "read_pages": verified()["read_fixed"],
        "cut": up(100 * mean(units, "check/cut_share"), 1),
        "larger_steps": str(min(run["steps"] for run in larger)),
        "larger_cut": up(100 * mean(larger, "check/cut_share")),
        "larger_drafted": up(mean(larger, "check/drafted_per_kept"), 1),
    }


def draft_budgets() -> Figures:
    """The same drafts with larger budgets beside dense rollouts, by six seeds each."""
    made: Figures = {"dense": gain(statistics.mean(map(gained, dense_runs().values())))}
    for budget, training in trained().items():
        ahead = statistics.mean(training.ahead)
        made |= {
            f"gained_{budget}": gain(statistics.mean(training.gains)),
            f"low_{budget}": gain(min(training.gains)),
            f"high_{budget}": gain(max(training.gains)),
            f"behind_{budget}": bare(up(-ahead, 3)),
            f"ahead_{budget}": bare(down(ahead, 3)),
            f"error_{budget}": bare(up(training.standard_error, 3)),
            f"cut_{budget}": up(1e4 * training.mean("check/cut_share")),
            f"read_{budget}": up(100 * training.mean("rollout/kv_read_share")),
        }
    return made


def study_checks() -> Figures:
    """Rewards of the study's model under checks of every window and floor."""
    rows = {row["sampler"]: row for row in results(STUDY_CHECKS, "study-checks")["rows"]}
    checked = [row["reward"] for name, row in rows.items() if name.startswith("verified-128-")]
    return {
        "sparse": bare(down(rows["sparse-128"]["reward"], 3)),
        "low": bare(down(min(checked), 3)),
        "high": bare(down(max(checked), 3)),
        "dense": bare(down(rows["dense"]["reward"], 3)),
        "error": bare(up(max(row["reward_standard_error"] for row in rows.values()), 3)),
        "least_budget": bare(down(rows["verified-64-64-0.01"]["reward"], 3)),
        "drafts": up(rows["verified-64-64-0.01"]["drafted_per_kept"], 2),
    }


def tiny_checks() -> Figures:
    """Rewards of tiny-reasoner with 160 tokens everywhere, by the floor of the checks."""
    rows = results(TINY_CHECKS, "study-checks")["rows"]

    def rewards(budget: int | None, floor: float | None) -> list[float]:
        return [row["reward"] for row in rows if (row["kv_budget_tokens"], row["floor"]) == (budget, floor)]

    (plain,) = (row for row in rows if row["sampler"] == "sparse-160")
    made: Figures = {
        "sparse": bare(down(*rewards(160, None), 3)),
        "dense": bare(down(*rewards(None, None), 3)),
        "error": bare(up(max(row["reward_standard_error"] for row in rows), 3)),
        "off": down(1 / plain["over_2_nats_share"]),
        "impossible": f"{1 / plain['over_10_nats_share']:,.0f}",
    }
    for name, floor in (("usual", 0.01), ("higher", 0.1), ("lossless", 1.0)):
        made |= {
            f"{name}_low": bare(down(min(rewards(160, floor)), 3)),
            f"{name}_high": bare(down(max(rewards(160, floor)), 3)),
        }
    return made


PAGES: Mapping[str, Claims] = {
    "docs/calibration.md": {
        "rows with checks whose kept tokens had a KL of {small_from} to {small_to} over all lengths gained {small_least} to "
        "{small_most}, and rows with {large_from} to {large_to} gained {large_least} to {large_most} (dense rollouts "
        "{dense}, three seeds each)": kept_kl,
    },
    "README.md": {
        "the change in accuracy was {gained_512} with them and {dense} with dense ones.": draft_budgets,
        "and the change was {gained_512_4x2}, which six seeds do not tell from {dense}": draft_budgets,
        "The small fixed budget gained {checked_fixed} with checks instead of {plain_fixed}, and the schedule that was "
        "calibrated for a tail of .86 {checked_86} instead of {plain_86} (dense {dense}, three seeds)": verified,
    },
    "docs/verified-rollouts.md": {
        "rollouts alone changed the dense accuracy by {plain_fixed}, with checks of every 64 tokens at floor .01 by "
        "{checked_fixed}. The schedule of .86 gained {checked_86} instead of {plain_86}, and dense rollouts "
        "{dense}.": verified,
        "128 tokens everywhere solved {sparse} of the problems, with checks {low} to {high} (dense {dense}, standard error "
        "{error})": study_checks,
        "Even 64 tokens, which solve nothing alone, solve {least_budget} with checks, for {drafts} drafts a "
        "token.": study_checks,
        "On tiny-reasoner the floor matters: 160 tokens everywhere solved {sparse} of the problems where dense "
        "rollouts solved {dense}. Checks at floor .01 brought {usual_low} to {usual_high}, at .1 {higher_low} to "
        "{higher_high}, and lossless ones {lossless_low} to {lossless_high} (standard error {error}). There one "
        "token in {off} is more than 2 nats off and one in {impossible} more than 10": tiny_checks,
    },
    "docs/study.md": {
        "128 tokens everywhere, whose sparse rollouts no correction repaired ({plain_fixed}), gained {checked_fixed}; the "
        "schedule of .75 gained {checked_75} instead of {plain_75}, and that of .86 {checked_86} instead of {plain_86}, "
        "which is what dense rollouts gain ({dense}).": verified,
        "no layer is dense: {read} % of the cache with the checks, where `fixed-verified` reads {read_pages} %. It gained "
        "{units} ({units_low} to {units_high}), `fixed-verified` {pages} and dense rollouts {dense}. {cut} % of the windows "
        "were cut.": draft_units,
        "cut by the clock after {larger_steps} steps) had gained {larger} after 30 steps, but {larger_cut} % of the "
        "windows are cut, and {larger_drafted} tokens are drafted for each that stands (": draft_units,
        "With 512 tokens (2,048 in layers 0 and 1) runs gained {gained_512} ({low_512} to {high_512}), and dense rollouts "
        "{dense}. With 384 tokens (1,536) they gained {gained_384} ({low_384} to {high_384}) and with 256 (1,024) "
        "{gained_256} ({low_256} to {high_256}).": draft_budgets,
        "with them, and 512 tokens, runs gained {gained_512_4x2} ({low_512_4x2} to {high_512_4x2}).": draft_budgets,
        "This accuracy, compared seed by seed, was {ahead_512} above that of dense rollouts with 512 tokens (standard error "
        "{error_512}), {behind_384} below it with 384 ({error_384}), {behind_256} below it with 256 ({error_256}) and "
        "{behind_512_4x2} below it with 512 in 2 bits ({error_512_4x2}).": draft_budgets,
        "With 512, 384 and 256 tokens {cut_512}, {cut_384} and {cut_256} windows in 10,000 were cut, with 512 in 2 bits "
        "{cut_512_4x2}, and {read_512}, {read_384}, {read_256} and {read_512_4x2} % of the cache were read.": draft_budgets,
        "of the first row solve {solved} of 128 problems and dense rollouts {solved_dense}": draft_units,
        "between 128 tokens everywhere ({usual}) and dense rollouts ({dense}): windows of 32 gained {short} at floor .1 and "
        "{strict} at .5, windows of 64 {higher} at .1, although the KL fell to {kl} at floor .5. Seeds of one row lie "
        "{least} to {most} apart": check_grid,
        "with the checks they read {read_fixed}, {read_75} and {read_86} % of the cache": verified,
    },
}
