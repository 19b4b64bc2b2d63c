"""TrainConfig: everything that a run of `sparroll train` depends on, and the few rules that hold between sections."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from sparroll.engines.make import check_samples_at
from sparroll.errors import UserError
from sparroll.mismatch.checks import check_bins
from sparroll.tasks import is_data
from sparroll.tasks.data.settings import DataSettings
from sparroll.train.config.adapter import DistillSection
from sparroll.train.config.base import Section
from sparroll.train.config.control import (
    ByControllerSection,
    ControlSection,
    GuardSection,
    NobodySection,
)
from sparroll.train.config.control_group import check_control_group, default_share
from sparroll.train.config.outputs import CheckpointSection, EvaluateSection, LogSection, MismatchSection
from sparroll.train.config.reward import RewardSection
from sparroll.train.config.rollout import (
    AttentionSection,
    CheckSection,
    DenseAttention,
    EngineSection,
    HFEngineSection,
    RolloutSection,
)
from sparroll.train.config.task import ModelSection, TaskSection
from sparroll.train.config.training import CorrectionSection, TrainSection


class TrainConfig(Section):
    """A run's whole configuration, immutable. `model_dump(mode="json")` is written beside the results."""

    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    data: DataSettings = DataSettings()
    engine: EngineSection = HFEngineSection()
    """What samples the rollouts."""
    rollout: RolloutSection = RolloutSection()
    attention: AttentionSection = DenseAttention()
    """What a decode step of the rollouts reads."""
    check: CheckSection | None = None
    """How the dense policy checks the drafts of the rollouts; None: as the schedule's file says, or not at all."""
    control: ControlSection = NobodySection()
    """Who may move the schedule."""
    guard: GuardSection = GuardSection()
    """The alarm for a low tail, and for a reward gap."""
    reward: RewardSection = RewardSection()
    train: TrainSection = TrainSection()
    correction: CorrectionSection = CorrectionSection()
    mismatch: MismatchSection = MismatchSection()
    distill: DistillSection | None = None
    """The adapter of DistillSparse; None: the run has no adapter."""
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _the_control_group_is_decided(self) -> Self:
        if self.rollout.control_share is None:
            rollout = self.rollout.model_copy(update={"control_share": default_share(self)})
            rollout.model_fields_set.discard("control_share")
            # The configuration is frozen from now on.
            self.__dict__["rollout"] = rollout
        return self

    @model_validator(mode="after")
    def _data_is_read(self) -> Self:
        if self.data != DataSettings() and not is_data(self.task.name):
            raise ValueError(f'[data] is for task.name = "data" or the name of a set, got "{self.task.name}"')
        return self

    @model_validator(mode="after")
    def _rows_have_no_levels(self) -> Self:
        if is_data(self.task.name):
            none = (0, TaskSection.model_fields["level"].default)
            for field, level in (("task", self.task.level), ("evaluate", self.evaluate.level)):
                if level is not None and level not in none:
                    raise ValueError(
                        f"{field}.level does nothing with task.name = {self.task.name!r}: rows have no levels"
                    )
        return self

    @model_validator(mode="after")
    def _rewards_fit_the_rollouts(self) -> Self:
        rollout, buffer, by = self.rollout, self.reward.overlong_buffer_tokens, self.rollout.dynamic_sampling_by
        if buffer > rollout.max_new_tokens:
            raise ValueError(
                f"reward.overlong_buffer_tokens = {buffer} must not be more than rollout.max_new_tokens = "
                f"{rollout.max_new_tokens}"
            )
        if not rollout.dynamic_sampling and (by is not None or rollout.dynamic_sampling_rounds != 10):
            field = "dynamic_sampling_by" if by is not None else "dynamic_sampling_rounds"
            raise ValueError(f"rollout.{field} does nothing without rollout.dynamic_sampling = true")
        names = [term.name for term in self.reward.terms]
        if by is not None and by not in names:
            raise ValueError(f"rollout.dynamic_sampling_by = {by!r} is no reward term; there are {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _the_engine_samples_at_the_temperatures(self) -> Self:
        check_samples_at(self.engine.kind, self.rollout.temperature, "rollout.temperature")
        check_samples_at(self.engine.kind, self.evaluate.temperature, "evaluate.temperature")
        return self

    @model_validator(mode="after")
    def _the_tail_has_few_bins(self) -> Self:
        check_bins(self.mismatch.bin_tokens, self.rollout.max_new_tokens)
        return self

    @model_validator(mode="after")
    def _compression_has_its_engine(self) -> Self:
        if self.attention.kind == "compression" and self.engine.kind != "hf":
            raise UserError(
                f'attention.kind = "compression" needs engine.kind = "hf", got "{self.engine.kind}"',
                "vLLM cannot drop tokens from its cache",
            )
        return self

    @model_validator(mode="after")
    def _there_is_something_to_check(self) -> Self:
        kind = self.attention.kind
        if self.check is None:
            return self
        if kind == "compression":
            raise UserError(
                '[check] cannot be used with attention.kind = "compression": what left the cache cannot be checked against',
                "leave [check] out, --set check=none",
            )
        if self.all_dense:
            raise UserError(
                '[check] checks sparse drafts, and attention.kind = "dense" has none',
                "set attention.kind to schedule or budget, or leave [check] out, --set check=none",
            )
        for name, why, without in self.excludes_checks:
            raise UserError(
                f"[check] and {name} exclude each other: {why}",
                f"leave one of them out: --set check=none or --set {without}",
            )
        return self

    @property
    def excludes_checks(self) -> list[tuple[str, str, str]]:
        """What of this run goes with no check of drafts, neither [check] nor one in a schedule's file: (name, why, the
        setting that leaves it out)."""
        train = self.train
        excluded = (
            (
                self.distill is not None,
                "[distill]",
                "the adapter learns from rollouts that sparse attention sampled alone",
                "distill=none",
            ),
            (
                train.rollouts_behind_steps > 0,
                f"train.rollouts_behind_steps = {train.rollouts_behind_steps}",
                "the checks score with the weights that sample",
                "train.rollouts_behind_steps=0",
            ),
            (
                train.whole_union,
                "train.whole_union",
                "checked drafts come from neither of the two policies",
                "train.whole_union=false",
            ),
        )
        return [(name, why, without) for given, name, why, without in excluded if given]

    @model_validator(mode="after")
    def _there_is_something_to_move(self) -> Self:
        control, kind = self.control, self.attention.kind
        if kind not in control.moves:
            raise UserError(
                f'control.by = "{control.by}" moves a schedule, and attention.kind = "{kind}" has none',
                f'set attention.kind to {" or ".join(control.moves)}, or control.by = "nobody"',
            )
        share = ByControllerSection.model_fields["start_share"].default
        if isinstance(control, ByControllerSection) and kind != "dense" and control.start_share != share:
            raise UserError(
                f'control.start_share = {control.start_share} does nothing with attention.kind = "{kind}", which the '
                "controller starts from",
                'leave control.start_share out, or set attention.kind = "dense"',
            )
        return self

    @model_validator(mode="after")
    def _the_adapter_has_sparse_rollouts(self) -> Self:
        control, kind = self.control, self.attention.kind
        if self.distill is None:
            if control.by == "cheaper":
                raise UserError(
                    'control.by = "cheaper" needs [distill]: without an adapter nothing gets cheaper',
                    "--set distill.rank=16 is enough for a section [distill]",
                )
            return self
        if kind == "compression" or self.all_dense:
            raise UserError(
                f'[distill] needs the sparse rollouts of a schedule, got attention.kind = "{kind}"',
                'set attention.kind to schedule or budget, or control.by = "controller"',
            )
        if "dense" in control.following:
            raise UserError(
                f'control.by = "{control.by}" goes on to "dense", where the adapter of [distill] has nothing to do',
                'leave "dense" out, or leave [distill] out',
            )
        return self

    @model_validator(mode="after")
    def _the_control_group_has_something_to_compare(self) -> Self:
        check_control_group(self)
        return self

    @model_validator(mode="after")
    def _the_alarm_has_a_target(self) -> Self:
        guard, control, kind = self.guard, self.control, self.attention.kind
        if control.by == "guard" and guard.action == "off":
            raise UserError(
                'control.by = "guard" does nothing with guard.action = "off"', 'set guard.action to "warn" or "stop"'
            )
        if isinstance(control, ByControllerSection):
            if guard.action != "off":
                _refuse_more_than_held(guard, control)
            return self
        acts = (
            'guard.action = "stop"'
            if guard.action == "stop"
            else 'control.by = "guard"'
            if control.by == "guard"
            else ""
        )
        named = guard.at_least is not None or guard.impossible_at_most is not None
        if acts and not named and kind in ("budget", "compression") and not self.watches_reward_gap:
            raise UserError(
                f'{acts} needs guard.at_least: attention.kind = "{kind}" names no target of its own',
                "for example --set guard.at_least=0.86, or --set guard.impossible_at_most=1e-4",
            )
        return self

    @model_validator(mode="after")
    def _the_union_can_be_scored(self) -> Self:
        if not self.train.whole_union:
            return self
        if "top_k" not in self.correction.make().needs:
            raise UserError(
                f'train.whole_union does nothing with correction.name = "{self.correction.name}", which compares no lists',
                "--set correction.name=jackpot, or leave train.whole_union out",
            )
        for given, name, why in (
            (self.attention.kind == "compression", 'attention.kind = "compression"', "a replay drops no tokens"),
            (self.distill is not None, "[distill]", "the sparse policy has the adapter, which the scorer lacks"),
            (self.train.rollouts_behind_steps > 0, "train.rollouts_behind_steps", "the scorer has the newest weights"),
            (self.control_share > 0, "rollout.control_share", "its rollouts are not under the schedule"),
        ):
            if given:
                raise UserError(f"train.whole_union and {name} exclude each other: {why}", "leave one of them out")
        return self

    @model_validator(mode="after")
    def _older_rollouts_have_dense_scores(self) -> Self:
        train = self.train
        if train.rollouts_behind_steps == 0:
            if train.dense_of != "now":
                raise UserError(
                    f'train.dense_of = "{train.dense_of}" does nothing with train.rollouts_behind_steps = 0',
                    "--set train.rollouts_behind_steps=1 samples with the weights of the step before",
                )
            return self
        for given, name, why in (
            (self.distill is not None, "[distill]", "the adapter belongs to the newest weights"),
            (self.control_share > 0, "rollout.control_share", "its ceiling is that of the newest weights"),
        ):
            if given:
                raise UserError(
                    f"train.rollouts_behind_steps = {train.rollouts_behind_steps} and {name} exclude each other: {why}",
                    f"leave {name} out, or set train.rollouts_behind_steps to 0",
                )
        return self

    @property
    def all_dense(self) -> bool:
        """Whether all rollouts are dense. A controller has a schedule also where none is named."""
        return self.attention.kind == "dense" and self.control.by != "controller"

    @property
    def eval_level(self) -> int:
        """Difficulty of the prompts that are evaluated."""
        return self.task.level if self.evaluate.level is None else self.evaluate.level

    @property
    def control_share(self) -> float:
        """`rollout.control_share`, which the configuration decides where nobody else does."""
        assert self.rollout.control_share is not None, "decided when the configuration was made"
        return self.rollout.control_share

    @property
    def names_control_share(self) -> bool:
        """Whether the share of the control group was given, and not left to its default."""
        return "control_share" in self.rollout.model_fields_set

    @property
    def watches_reward_gap(self) -> bool:
        """Whether a reward gap raises an alarm: there is a control group, and a tolerated gap."""
        return self.control_share > 0 and self.guard.reward_gap is not None


def _refuse_more_than_held(guard: GuardSection, control: ByControllerSection) -> None:
    """Raise UserError where the guard asks for more of a statistic than the controller holds."""
    if guard.at_least is not None and control.target is not None and guard.at_least > control.target:
        raise UserError(
            f"guard.at_least = {guard.at_least} asks for more than the controller holds, control.target = {control.target}",
            "lower guard.at_least or raise control.target",
        )
    asked, held = guard.impossible, control.impossible
    if asked is not None and held is not None and asked.nats == held.nats and asked.at_most < held.at_most:
        raise UserError(
            f"guard.impossible_at_most = {asked.at_most:g} asks for more than the controller holds, "
            f"control.impossible_at_most = {held.at_most:g}",
            "raise guard.impossible_at_most or lower control.impossible_at_most",
        )
