"""The sizes of a quickstart, read from a TOML file like quickstart.toml, which lies beside this file. Runs nothing."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from sparroll.attention.selectors import Selector, make_selector
from sparroll.errors import UserError, nearest
from sparroll.schedule import Schedule
from sparroll.strict import Strict
from sparroll.types import LARGEST_SEED

CALIBRATED = "calibrated"
"""Stands for the schedule that this quickstart makes, in the place of a schedule's name."""


class _Checked(Strict):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class CalibrateSettings(_Checked):
    task: str = "synthetic"
    level: int = Field(ge=0)
    prompts: int = Field(ge=1)
    samples: int = Field(ge=1)
    """Rollouts per prompt and budget."""
    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, gt=0)
    target: float = Field(0.86, gt=0, lt=1)
    bin_tokens: int = Field(ge=1)
    selector: str = "page_mean"
    page_tokens: int = Field(16, ge=1, le=128)
    first_tokens: int = Field(16, ge=0)
    recent_tokens: int = Field(32, ge=1)
    dense_layers: tuple[int, ...] = (0, 1)
    budgets: tuple[int, ...] = Field(min_length=1)
    """The grid of budgets that are measured, in tokens."""
    verify_rounds: int = Field(ge=0)
    bound: Literal["value", "low"] = "low"
    """What must meet the target in the verification: the measured tail, or the lower end of its interval."""

    def make_selector(self) -> Selector:
        return make_selector(
            {
                "kind": self.selector,
                "page_tokens": self.page_tokens,
                "first_tokens": self.first_tokens,
                "recent_tokens": self.recent_tokens,
            }
        )


class PlanSettings(_Checked):
    model: str
    schedule: str
    gpu: str = "H200"
    lengths: str = "0-32768"


class RunSettings(_Checked):
    schedule: str | None = None
    """"dense", "calibrated", a preset or a file."""
    kv_budget_tokens: int | None = None
    """Instead of a schedule: one budget at every length, with the selector of the calibration."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.schedule is None) == (self.kv_budget_tokens is None):
            raise ValueError("a run needs either schedule or kv_budget_tokens")
        return self


class QuickstartSettings(_Checked):
    model: str = "tiny-reasoner"
    seed: int = Field(0, ge=0, le=LARGEST_SEED)
    calibrate: CalibrateSettings
    plans: tuple[PlanSettings, ...] = ()
    train: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Sections of a `sparroll train` file that all runs share."""
    runs: dict[str, RunSettings] = Field(default_factory=dict)

    def aggressive_schedule(self, run: RunSettings) -> Schedule:
        """The schedule of a run with a fixed budget, with the selector and dense layers of the calibration."""
        assert run.kv_budget_tokens is not None
        selector, layers = self.calibrate.make_selector(), self.calibrate.dense_layers
        return Schedule.fixed(run.kv_budget_tokens, selector, layers)


def load_settings(path: Path | None = None) -> QuickstartSettings:
    """The sizes from a file; without one the packaged sizes."""
    source = path or Path(str(resources.files("sparroll.quickstart") / "quickstart.toml"))
    try:
        table = tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{source} is not valid TOML: {error}", "src/sparroll/quickstart/quickstart.toml is an example"
        ) from None
    for key in table:
        if key not in QuickstartSettings.model_fields:
            raise UserError(f"{source}: unknown key {key!r}", nearest(key, list(QuickstartSettings.model_fields)))
    try:
        return QuickstartSettings.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{source}: {where}: {first['msg']}", "quickstart.toml in the package shows every key"
        ) from None
