"""From a model to a schedule file in one call: sweep, fit, verify, save. Each step has its own module."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sparroll.attention.selectors import PageMean, Selector
from sparroll.calibrate.bounds import NO_BOUNDS, BlindSpots
from sparroll.calibrate.choice import CheckChoice, Machine, choose, with_reasons
from sparroll.calibrate.fit import MIN_TOKENS, FittedSchedule
from sparroll.calibrate.measure import Measurement, Study
from sparroll.calibrate.prospects import check_ceiling, check_request, check_something_is_sparse
from sparroll.calibrate.sweep import Sweep, sweep
from sparroll.calibrate.verify import Bound, Verification, verify
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.locks import locked
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.models import fingerprint
from sparroll.plan.hardware import Hardware, find_hardware
from sparroll.plan.model_shape import ModelShape, model_shape
from sparroll.progress import OnProgress, Stages
from sparroll.schedule import Schedule


@dataclass(frozen=True)
class Calibration:
    """A schedule file, with everything that it was made from."""

    schedule: Schedule
    path: Path
    sweep: Sweep
    fitted: FittedSchedule
    verification: Verification | None
    choice: CheckChoice | None = None
    """What the check and the budgets were chosen among; None without a check."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the reader: bins without data, and budgets that the verification raised."""
        refused = self.choice.refused if self.choice else ()
        return self.fitted.notes + refused + (self.verification.notes if self.verification else ())

    def rows(self) -> list[dict[str, Any]]:
        """For each bin the budget, the tail under it and the dense ceiling. If there was a verification, the tail is
        from it.

        `q05` is the quantile that the settings ask for; None in bins without enough data.
        """
        tails = {step.from_context_tokens: step.measured or {} for step in self.schedule.steps}
        ceilings = {bin.from_context_tokens: bin.dense_ceiling or {} for bin in self.fitted.bins}
        return [
            {
                "from_context_tokens": start,
                "kv_budget_tokens": self.schedule.kv_budget_tokens(start),
                "q05": tails.get(start, {}).get("value"),
                "q05_low": tails.get(start, {}).get("low"),
                "dense_ceiling_q05": ceilings.get(start, {}).get("value"),
            }
            for start in sorted({*tails, *ceilings})
        ]

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        return {
            "schedule": self.schedule.table(),
            "rows": self.rows(),
            "notes": list(self.notes),
            "bins": [dataclasses.asdict(found) for found in self.fitted.bins],
            "sweep": self.sweep.table(),
            "verification": self.verification.table() if self.verification else None,
            **({"choice": self.choice.table()} if self.choice else {}),
        }


def calibrate(
    study: Study,
    *,
    out: Path | str,
    budgets: Sequence[int],
    target: float = 0.86,
    selector: Selector | None = None,
    dense_layers: tuple[int, ...] = (0, 1),
    verify_rounds: int = 4,
    bound: Bound = "value",
    checks: Sequence[DraftCheck] = (),
    shape: ModelShape | None = None,
    hardware: Hardware | str | Path = "H200",
    bounds: BlindSpots = NO_BOUNDS,
    min_tokens: int = MIN_TOKENS,
    min_rollouts: int = LEAST_ROLLOUTS,
    model: str | None = None,
    made_by: dict[str, Any] | None = None,
    name: str = "schedule",
    on_progress: OnProgress | None = None,
) -> Calibration:
    """Measure `budgets`, fit the cheapest schedule that meets `target`, verify it, and write OUT/NAME.toml.

    Raises UserError before the first budget if it is clear that no schedule can be fitted (see prospects.py). If it was
    interrupted, a second call continues. verify_rounds = 0 leaves the verification out. If bins still miss
    the target after the last round, the file is written with their figures, and `verification.met` is false. model and
    made_by are written into the file as they are, and with the model its fingerprint, if its files are on this machine.
    checks: if there are any, every budget is measured under each of them, and the check and the budgets with the least
    predicted time are taken (see choice.py), for a model of this `shape`, by default the study's, on this `hardware`.
    bounds: what every bin must hold beside the target.
    For the other arguments see `sweep`, `fit_schedule` and `verify`.
    """
    least = {"min_tokens": min_tokens, "min_rollouts": min_rollouts}
    check_request(target, len(study.prompts), study.settings.samples, study.settings.max_new_tokens, **least)
    selector = selector or PageMean()

    def on_ceiling(ceiling: Measurement) -> None:
        check_ceiling(study, ceiling, target, **least)
        check_something_is_sparse(study, min(budgets), selector, dense_layers)

    if bounds.over_2_nats_at_most is not None and not checks:
        raise UserError("a bound on tokens more than 2 nats off needs checked drafts", "give checks to choose among")
    shape = (shape or model_shape(study.scorer.model.config)) if checks else None
    device = hardware if isinstance(hardware, Hardware) else find_hardware(hardware)
    measured = partial(
        sweep,
        study,
        out=out,
        budgets=budgets,
        selector=selector,
        dense_layers=dense_layers,
        on_ceiling=on_ceiling,
    )
    with locked(out, "sparroll calibrate"):
        choice = None
        if shape is not None:
            stages = Stages(on_progress, len(checks))
            sweeps = [measured(check=check, on_progress=stages.next("checked budgets")) for check in checks]
            stages.end()
            machine = Machine.decoding(study.dense_rollouts(), shape, device)
            about: dict[str, Any] = {**least, "model": model, "name": name}
            choice = choose(sweeps, machine, target=target, bounds=bounds, **about)
            fitted = with_reasons(choice, made_by, bounds)
            swept = next(each for each in sweeps if each.check == choice.best.check)
        else:
            swept = measured(on_progress=on_progress)
            fitted = swept.fit(
                target, min_tokens=min_tokens, min_rollouts=min_rollouts, model=model, made_by=made_by, name=name
            )
        verification = None
        if verify_rounds > 0:
            verification = verify(
                study,
                fitted.schedule,
                target=target,
                notches=swept.budgets,
                out=out,
                bound=bound,
                most_rounds=verify_rounds,
                bounds=bounds,
                min_tokens=min_tokens,
                min_rollouts=min_rollouts,
                on_progress=on_progress,
            )
        schedule = replace(
            verification.schedule if verification else fitted.schedule,
            name=name,
            fingerprint=None if model is None else fingerprint.of_model(model),
        )
        path = schedule.save(Path(out) / f"{name}.toml")
    return Calibration(schedule, path, swept, fitted, verification, choice)
