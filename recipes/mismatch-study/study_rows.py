"""The study's grid as data: what all runs share, what each row changes, and the `sparroll train` tables that come of it.
Runs nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import table_sums
from table_sums import LEVELS

from sparroll import files
from sparroll.attention.selectors import PageMean, QuantizedMean
from sparroll.control.control_group import ControlGroupSettings
from sparroll.errors import UserError, nearest
from sparroll.schedule import Schedule, Step
from sparroll.train.config.control_group import why_none
from sparroll.train.config.file import config_from
from sparroll.train.config.run import TrainConfig

Tables = dict[str, dict[str, Any]]

NARROW_FIRST = "narrow-first"
"""The row, and its schedule, that reads little in the first bin and plenty elsewhere."""


@dataclass(frozen=True)
class Settings:
    """What all rows share. The defaults are those of docs/study.md, but for `engine` (there vllm) and
    `checkpoint_every_steps` (there only the last). In OUT/settings.json; a resumed study must agree."""

    model: str
    """Folder that from_pretrained reads."""
    level: int = 124
    temperature: float = 0.8
    engine: str = "hf"
    """Of the rows that do not evict; those always run on HFEngine."""
    device: str = "cuda"
    dtype: str = "bf16"
    """Arithmetic of trainer and engine. The trainer's weights are fp32."""
    steps: int = 25
    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    lr: float = 1.5e-4
    evaluate_prompts: int = 256
    max_batch: int = 128
    micro_batch_tokens: int = 16_384
    """Small enough for sixteen runs on a GPU of 139 GiB."""
    checkpoint_every_steps: int = 5
    top_k: int = 20
    page_tokens: int = 16
    first_tokens: int = 16
    recent_tokens: int = 32
    dense_layers: tuple[int, ...] = (0, 1)
    bin_tokens: int = 256
    fixed_budget: int = 128
    uniform_budget: int = 800
    """The same at every length, and in all about what the schedule of .86 reads here."""
    wide_from_tokens: int = 4096
    """Context length from which `narrow-first` reads `wide_budget` tokens; below it, `fixed_budget`."""
    wide_budget: int = 1536
    """Plenty: the most that a bin from there on needed to hold a tail of .86 in rollouts that verified it."""
    eviction_budgets: tuple[int, ...] = (1024, 3584)
    """Tokens that R-KV and SnapKV keep, the prompt's included: equal memory for both, once little and once most of it."""
    targets: tuple[float, ...] = (0.75, 0.80, 0.86, 0.92)
    corrected_target: float = 0.86
    """The schedule whose rollouts get every correction: one of `targets`."""
    distill_target: float = 0.75
    """The cheap schedule under which the adapter is trained: one of `targets`."""
    distill_lr: float = 1e-3
    """Of the adapter."""
    controller_target: float = 0.86
    check_window_tokens: int = 64
    check_floor: float = 0.01
    """Of the rows that verify their rollouts."""
    check_windows: tuple[int, ...] = (32, 64)
    check_floors: tuple[float, ...] = (0.01, 0.1, 0.5)
    """Grid of checks that are tried beside that one, with the fixed budget."""
    check_budgets: tuple[int, ...] = (256, 512)
    """Larger budgets at every length, with the usual check."""
    quantized_budgets: tuple[int, ...] = (64, 128)
    """Budgets of units in few bits, with the usual check."""
    unchecked_quantized_budgets: tuple[int, ...] = (192, 800)
    """The same without a check: first what holds the tail of pages with `uniform_budget` here (recipes/code-lm), then as
    many tokens as those pages."""
    wide_times: int = 4
    """How many times as much the first two layers read in rows that have no dense layers."""
    draft_units: tuple[str, ...] = ("4x4", "8x4")
    """Such rows with the fixed budget and the usual check: tokens of a unit x bits of a channel."""
    layers: int = 8
    """Of the model. study.py reads it from the model's configuration."""
    quantized_unit_tokens: int = 4
    quantized_bits: int = 4
    budgets: tuple[int, ...] = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 5120)
    """Grid of the sweep that all calibrated schedules share, in tokens. The largest holds every context, so each target
    has a budget."""
    calibration_prompts: int = 16
    calibration_samples: int = 2
    gpu_memory_share: float = 0.08
    """Only for vLLM: of one run, so several fit on a GPU."""
    kv_cache_gib: float = 2.5
    """Only for vLLM: given, not measured, because runs that share a GPU would disturb each other's measurement."""
    keep_checkpoints: bool = False
    control_share: float = 0.0
    """Share of the rollouts that is decoded densely as a control group, in rows that can have one. Its alarms are in the
    record and change nothing."""
    control_share_first: float = ControlGroupSettings.share_first
    """The same over a run's first steps; only where `control_share` is above 0."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UserError(f"{table_sums.NAME} has no level {self.level}", f"levels are {', '.join(map(str, LEVELS))}")
        if self.control_share > self.control_share_first:
            raise UserError(
                f"control_share_first = {self.control_share_first:g} must be at least control_share = "
                f"{self.control_share:g}",
                "the same share in all steps: give both the same value",
            )
        if self.layers < 3:
            raise UserError(f"the study's rows are for models of 3 layers or more, got {self.layers}")
        for name in ("corrected_target", "distill_target"):
            if getattr(self, name) not in self.targets:
                raise UserError(f"{name} must be one of the targets {self.targets}, got {getattr(self, name)}")
        for name, said in (
            ("targets", [f"{target:.2f}" for target in self.targets]),
            ("eviction_budgets", self.eviction_budgets),
        ):
            if len(set(said)) < len(said):
                given = getattr(self, name)
                raise UserError(f"{name} name rows and must differ (targets in two decimals), got {given}")

    @property
    def selector(self) -> PageMean:
        return PageMean(page_tokens=self.page_tokens, first_tokens=self.first_tokens, recent_tokens=self.recent_tokens)

    @property
    def quantized_selector(self) -> QuantizedMean:
        """By default a quarter of the unit in a quarter of the bits, so its index is as large as that of `selector`."""
        return QuantizedMean(
            page_tokens=self.quantized_unit_tokens,
            first_tokens=self.first_tokens,
            recent_tokens=self.recent_tokens,
            bits=self.quantized_bits,
        )

    def fixed_schedules(self) -> dict[str, Schedule]:
        """Budgets that are not calibrated, by what rows call them: all but `narrow-first` are the same at every
        length."""
        pages = {"fixed": self.fixed_budget, "uniform": self.uniform_budget}
        pages |= {f"fixed-{budget}": budget for budget in self.check_budgets}
        units = {f"quantized-{each}": each for each in (*self.quantized_budgets, *self.unchecked_quantized_budgets)}
        made = {
            name: Schedule.fixed(budget, selector, self.dense_layers)
            for selector, budgets in ((self.selector, pages), (self.quantized_selector, units))
            for name, budget in budgets.items()
        }
        wide = [(self.unchecked_quantized_budgets[0], self.quantized_selector, "quantized")]
        wide += [(self.fixed_budget, self.small_units(each), f"quantized-{each}") for each in self.draft_units]
        made |= {schedule.name: schedule for schedule in (self.wide_schedule(*each) for each in wide)}
        steps = Step(0, self.fixed_budget), Step(self.wide_from_tokens, self.wide_budget)
        return made | {NARROW_FIRST: Schedule(steps, self.selector, self.dense_layers, name=NARROW_FIRST)}

    def small_units(self, named: str) -> QuantizedMean:
        """4x2: units of 4 tokens with 2 bits a channel."""
        tokens, bits = unit_and_bits(named)
        return QuantizedMean(tokens, self.first_tokens, self.recent_tokens, bits=bits)

    def wide_schedule(self, budget: int, selector: QuantizedMean, called: str) -> Schedule:
        """A budget at every length, more of it in layers 0 and 1, and no dense layer."""
        return Schedule(
            (Step(0, (self.wide_times * budget, budget)),),
            selector,
            dense_layers=(),
            layer_groups=((0, 1), tuple(range(2, self.layers))),
            name=f"{called}-{budget}-wide",
        )

    @property
    def max_new_tokens(self) -> int:
        """A tenth more than a right response has."""
        return round(LEVELS[self.level].response_tokens * 1.1)

    def table(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @staticmethod
    def from_table(table: dict[str, Any]) -> Settings:
        unknown = set(table) - {field.name for field in fields(Settings)}
        if unknown:
            raise UserError(f"the study has no setting {min(unknown)!r}", "go on with the version that wrote it")
        return Settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in table.items()})


def unit_and_bits(named: str) -> tuple[int, int]:
    """Tokens of a unit and bits of a channel, as options name them: 4x2."""
    tokens, _, bits = named.partition("x")
    if not (tokens.isdigit() and bits.isdigit()):
        raise UserError(f"units are tokens x bits, got {named!r}", "4x4 or 8x4")
    return int(tokens), int(bits)


@cache
def model_sha256(folder: str) -> str | None:
    """Which weights a folder holds, whatever it is called: digests of its files, `+` between them; None if it has none."""
    return "+".join(files.sha256(path) for path in sorted(Path(folder).glob("*.safetensors"))) or None


SAMPLED_UNDER = ("level", "temperature", "dtype", "top_k", "bin_tokens", "calibration_prompts", "calibration_samples")
CALIBRATED_UNDER = (
    *SAMPLED_UNDER,
    "page_tokens",
    "first_tokens",
    "recent_tokens",
    "dense_layers",
    "targets",
    "budgets",
)
"""Settings that the calibrated schedules depend on, beside the model."""


@dataclass(frozen=True)
class Row:
    """One line of the table, run once per seed."""

    name: str
    family: str
    about: str
    """What this row does, in words; in the record."""
    schedule: str = "dense"
    """dense, calibrated-0.86, or a name in Settings.fixed_schedules."""
    tables: Tables = field(default_factory=dict)
    """Sections of the configuration that differ from what all share."""
    hf_only: bool = False


def rows(settings: Settings) -> dict[str, Row]:
    """All rows by name, in the order of the table."""
    made = [Row("dense", "dense", "dense rollouts", tables=_correction("none"))]
    fixed = f"{settings.fixed_budget} tokens at every length"
    for name in ("none", "tis", "icepop", "sparse_rl", "jackpot"):
        made.append(Row(f"fixed-{name}", "fixed", f"{fixed}, correction `{name}`", "fixed", _correction(name)))
    for budget, kind, name in product(settings.eviction_budgets, ("r_kv", "snap_kv"), ("none", "sparse_rl")):
        tables = _correction(name) | {"attention": {"kind": "compression", "policy": kind, "budget_tokens": budget}}
        about = f"`{kind}` keeps {budget} tokens, correction `{name}`"
        made.append(Row(f"{kind}-{budget}-{name}", "eviction", about, tables=tables, hf_only=True))
    for target in settings.targets:
        name = f"calibrated-{target:.2f}"
        made.append(Row(name, "calibrated", f"schedule calibrated to {target:.2f}, TIS", name, _correction("tis")))
    uniform = f"{settings.uniform_budget} tokens at every length, TIS"
    made.append(Row("uniform", "calibrated", uniform, "uniform", _correction("tis")))
    narrow = f"{settings.fixed_budget} tokens below a context of {settings.wide_from_tokens:,}"
    about = f"{narrow}, {settings.wide_budget:,} from there on, TIS"
    made.append(Row(NARROW_FIRST, "calibrated", about, NARROW_FIRST, _correction("tis")))
    schedule = f"calibrated-{settings.corrected_target:.2f}"
    for name in ("none", "icepop", "sparse_rl", "jackpot"):
        about = f"schedule of {schedule}, correction `{name}`"
        made.append(Row(f"{schedule}-{name}", "corrected", about, schedule, _correction(name)))
    usual = settings.check_window_tokens, settings.check_floor
    for window, floor in dict.fromkeys([usual, *product(settings.check_windows, settings.check_floors)]):
        name = "fixed-verified" if (window, floor) == usual else f"fixed-verified-{window}-{floor:g}"
        made.append(Row(name, "verified", f"{fixed}, {_said(window, floor)}", "fixed", _checked(window, floor)))
    for budget in settings.check_budgets:
        about = f"{budget} tokens at every length, {_said(*usual)}"
        made.append(Row(f"fixed-{budget}-verified", "budgets", about, f"fixed-{budget}", _checked(*usual)))
    units = f"units of {settings.quantized_unit_tokens} in {settings.quantized_bits} bits"
    for budget in settings.quantized_budgets:
        name, about = f"quantized-{budget}", f"{budget} tokens at every length, {units}, {_said(*usual)}"
        made.append(Row(f"{name}-verified", "budgets", about, name, _checked(*usual)))
    for budget in settings.unchecked_quantized_budgets:
        name, about = f"quantized-{budget}", f"{budget} tokens at every length, {units}, TIS"
        made.append(Row(name, "budgets", about, name, _correction("tis")))
    budget = settings.unchecked_quantized_budgets[0]
    name = f"quantized-{budget}-wide"
    wide = f"{settings.wide_times} times as many in layers 0 and 1"
    about = f"{budget} tokens at every length, {wide}, none dense, {units}, TIS"
    made.append(Row(name, "budgets", about, name, _correction("tis")))
    for each in settings.draft_units:
        name = f"quantized-{each}-{settings.fixed_budget}-wide"
        about = f"{fixed}, {wide}, none dense, units of {' in '.join(each.split('x'))} bits, {_said(*usual)}"
        made.append(Row(f"{name}-verified", "budgets", about, name, _checked(*usual)))
    for target in sorted({settings.distill_target, settings.corrected_target}):
        name = f"calibrated-{target:.2f}"
        about = f"schedule calibrated to {target:.2f}, {_said(*usual)}"
        made.append(Row(f"{name}-verified", "verified", about, name, _checked(*usual)))
    cheap = f"calibrated-{settings.distill_target:.2f}"
    about = f"DistillSparse under the schedule of {cheap}, TIS"
    for name, note, settings_of in (
        ("distill", "published loss", {}),
        ("distill-kl", "KL over top-k lists", {"objective": "kl", "kl": "top_k"}),
    ):
        tables = _correction("tis") | {"distill": {"lr": settings.distill_lr, **settings_of}}
        made.append(Row(name, "adaptive", f"{about}; {note}", cheap, tables))
    tables = _correction("tis") | {"control": {"by": "controller", "target": settings.controller_target}}
    about = f"controller holds {settings.controller_target:.2f}, TIS"
    made.append(Row("controller", "adaptive", f"{about}; started from {fixed}", "fixed", tables))
    made.append(Row("controller-safe-start", "adaptive", f"{about}; started from half of the context", tables=tables))
    return {row.name: row for row in made}


def _correction(name: str) -> Tables:
    return {"correction": {"name": name}}


def _checked(window_tokens: int, floor: float) -> Tables:
    return _correction("tis") | {"check": {"window_tokens": window_tokens, "floor": floor}}


def _said(window_tokens: int, floor: float) -> str:
    return f"checked every {window_tokens} tokens at floor {floor:g}, TIS"


def chosen(settings: Settings, names: list[str] | None) -> list[Row]:
    """The named rows; all without names."""
    known = rows(settings)
    for name in names or []:
        if name not in known:
            raise UserError(f"the study has no row {name!r}", nearest(name, list(known)))
    return [row for row in known.values() if not names or row.name in names]


def schedule_path(out: Path, row: Row) -> Path | None:
    """Where the row's schedule is, or will be; None for full attention."""
    return None if row.schedule == "dense" else out / "calibration" / f"{row.schedule}.toml"


def write_fixed_schedules(settings: Settings, out: Path) -> None:
    for name, schedule in settings.fixed_schedules().items():
        schedule.save(out / "calibration" / f"{name}.toml")


def run_config(settings: Settings, out: Path, row: Row, seed: int) -> TrainConfig:
    """The configuration of one run. The task has to be registered."""
    path = schedule_path(out, row)
    engine: dict[str, Any] = {"kind": "hf" if row.hf_only else settings.engine}
    if engine["kind"] == "vllm":
        engine |= {"gpu_memory_share": settings.gpu_memory_share, "kv_cache_gib": settings.kv_cache_gib}
    tables: Tables = {
        "model": {"name": settings.model, "device": settings.device},
        "task": {
            "name": table_sums.NAME,
            "level": settings.level,
            "train_prompts": settings.steps * settings.prompts_per_step,
        },
        "engine": engine,
        "attention": {"kind": "schedule", "name": str(path)} if path else {"kind": "dense"},
        "rollout": {
            "samples_per_prompt": settings.samples_per_prompt,
            "temperature": settings.temperature,
            "max_new_tokens": settings.max_new_tokens,
            "max_batch": settings.max_batch,
            "dtype": settings.dtype,
            "top_k": settings.top_k,
            "control_share": 0,
        },
        "train": {
            "steps": settings.steps,
            "prompts_per_step": settings.prompts_per_step,
            "lr": settings.lr,
            "beta2": 0.95,
            "dtype": settings.dtype,
            "micro_batch_tokens": settings.micro_batch_tokens,
            "seed": seed,
        },
        "mismatch": {"bin_tokens": settings.bin_tokens},
        "guard": {"action": "off"},
        "evaluate": {
            "prompts": settings.evaluate_prompts,
            "every_steps": (settings.steps + 1) // 2,
            "temperature": settings.temperature,
        },
        "checkpoint": {"every_steps": settings.checkpoint_every_steps, "keep": 1},
        "log": {"sinks": []},
    }
    for section, table in row.tables.items():
        tables[section] = tables.get(section, {}) | table
    config = config_from(tables)
    if settings.control_share == 0 or why_none(config):
        return config
    # The guard says when it would have acted, and does not.
    group = {"control_share": settings.control_share, "control_share_first": settings.control_share_first}
    return config_from(tables | {"rollout": tables["rollout"] | group, "guard": {"action": "warn"}})
