"""One object per worker process: the schedules in force, and what each layer ran under them. vLLM is not imported.

Each step's rows are noted once, when its metadata is built. Which attention read them is said by the layers: a layer
that is entered says so itself. A step that is replayed from a full CUDA graph enters no layer, and runs what the layers
ran when the graph was captured; they said so then. Of each graph there may be two: a sparse one, and one for steps in
which all rows read everything (whole_graphs.py). A step of a small model waits for the host, so the steps that graphs ran
are counted many at a time.
"""

# R rows of a step, X rows of several steps, L layers of the model, dense ones included

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sparroll.attention.selectors import Selector
from sparroll.engines.report import EngineReport, LayerReport
from sparroll.engines.vllm.attention.decode_rows import (
    ENGINES,
    NO_ROWS,
    NOTHING,
    Contexts,
    DecodeRows,
    ReadTables,
    most_and_total,
)
from sparroll.engines.vllm.attention.device_budgets import DeviceBudgets
from sparroll.engines.vllm.capacity import MOST_REQUEST_SCHEDULES, check_fits_engine, check_same_window
from sparroll.errors import UserError
from sparroll.schedule import Schedule

STEPS_AT_ONCE = 128
"""So many steps that graphs ran are counted together."""


@dataclass
class Counters:
    """Sums over all steps, besides their decode rows."""

    prefill_tokens: int = 0
    tail_tokens: int = 0
    """Of those, one-token ends of chunked prompts. They ran among the decode rows and read everything."""
    preemptions: int = 0
    """How often a request lost its cache. This and the next three are counted in preemptions.py."""
    recomputed_tokens: int = 0
    """Those of the prefill tokens that belong to responses: a preempted request prefills, densely, what it had
    sampled."""
    resumed_tokens: int = 0
    """Response tokens sampled at the end of such a prefill, and not in a decode row."""
    resumed_sparse_L: np.ndarray = field(default_factory=lambda: NOTHING[0])
    """How many of those would have been sparse rows, in each layer, if a decode row had sampled them."""


@dataclass
class BegunStep:
    """A step whose metadata was built. The last one is under way, and others wait until they are counted."""

    contexts_R: Contexts
    """Contexts of its decode rows; 0 for rows that are none. Nobody else writes to them."""
    which_R: np.ndarray | None
    """The number of the schedule of each; None where all have the engine's."""
    not_decoding: DecodeRows
    """Those of the rows that look like decode rows and are none."""
    may_replay: bool
    """Whether a full CUDA graph may run it."""
    whole: bool = False
    """Whether it has no plan (State.step_is_whole)."""
    ran: dict[int, str] = field(default_factory=dict)
    """Layer -> the attention that it ran, of the layers that were entered."""


@dataclass
class State:
    """Shared by the layers and the metadata builder of a worker. `configure` resets it for a new engine."""

    schedule: Schedule | None = None
    layers: int = 0
    model: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    has_index: bool = False
    """Whether the engine was started with a schedule, so that index layers exist."""
    attention: str = "triton"
    """What attends to the chosen units on CUDA (see VLLMSettings)."""
    short_step_tokens: int = 0
    """A step whose decode rows have contexts of at most so many tokens together reads all of them."""
    has_workspace: bool = False
    """Whether the CUDA backend allocated memory for this engine."""
    drafting: bool = False
    """Whether the metadata being built is that of a draft step. Where drafts are checked, all other steps are dense."""
    check_rows: int = 0
    """How many rows of the next dense step check drafts."""
    request_numbers: Mapping[str, int] = field(default_factory=dict)
    """Request -> the number of its own schedule, of those that have one."""
    own_rows_V: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """Decode rows of requests with a schedule of their own, by its number, since they were told of. Read it by
    `rows_of_own_schedules`."""
    which_rows: np.ndarray | None = None
    """[R] int32: the number of the schedule of each row of the step whose metadata is built next; None where all have the
    engine's."""
    counters: Counters = field(default_factory=Counters)
    captured: dict[int, str] = field(default_factory=dict)
    """Layer -> the attention that it ran while CUDA graphs were captured; "dense" if it was dense in any of them."""
    captured_whole: dict[int, str] = field(default_factory=dict)
    """The same of the graphs in which all rows read everything; empty where there are none."""
    captures_whole: bool = False
    """Whether those are being captured."""
    step_is_whole: bool = False
    """Whether the step whose metadata was built last has no plan: all layers read everything, with vLLM's own attention. A
    step in which nothing is left out may have one, where the only graph for it is sparse."""
    row_names: Sequence[str] | None = None
    """Whose the rows of that step are, in their order; None where nobody said so."""
    short_reads: dict[str, int] | None = None
    """Request -> tokens that it read in short steps and that the schedule would have left out, summed over all layers. None
    until somebody asks."""
    index_read_share: dict[int, float] = field(default_factory=dict)
    budgets: DeviceBudgets = field(default_factory=lambda: DeviceBudgets(0, torch.device("cpu")))
    """What layers look up on the device."""
    reads: ReadTables = field(default_factory=lambda: ReadTables([None], 0))
    """What the same rows read, as the host counts it."""
    _started_with: Schedule | None = None
    _step: BegunStep | None = None
    _decoded: DecodeRows = NO_ROWS
    """Decode rows of all steps that are counted, whatever the layers did with them."""
    _replayed: list[BegunStep] = field(default_factory=list)
    """Steps that graphs replayed and that are not counted yet."""
    _counted: dict[int, LayerReport] = field(default_factory=dict)
    """What each layer ran in the steps before the one under way. A layer that is absent never used our backend."""
    _sparse_rows_ran: dict[int, str] = field(default_factory=dict)
    """Layer -> the attention that read rows which leave out a part of their context; "dense" if it ever was."""
    _not_decoding: DecodeRows = NO_ROWS
    """Rows of the next step that look like decode rows and are none."""

    def configure(
        self,
        schedule: Schedule | None,
        layers: int,
        device: torch.device | str,
        model: str = "",
        attention: str = "triton",
        short_step_tokens: int = 0,
    ) -> None:
        """Reset the state for an engine with `layers` layers. Its selector and dense layers are fixed from here on."""
        self.device, self.layers, self.model = torch.device(device), layers, model
        self.has_index, self.has_workspace = schedule is not None, False
        self.attention, self.short_step_tokens = attention, short_step_tokens
        self._started_with = schedule
        self.budgets = DeviceBudgets(layers, self.device)
        self.index_read_share = {}
        self.captured, self.captured_whole = {}, {}
        self.captures_whole = self.step_is_whole = False
        self.row_names, self.short_reads = None, None
        self.drafting, self.check_rows, self.which_rows = False, 0, None
        self.reset_report()
        self.set_schedule(schedule)

    @property
    def checks_drafts(self) -> bool:
        """Whether the schedule in force checks its drafts."""
        return self.schedule is not None and self.schedule.check is not None

    @property
    def sparse_layers(self) -> frozenset[int]:
        """Layers with an index, whichever schedule is in force."""
        dense = self._started_with.dense_layers if self._started_with else range(self.layers)
        return frozenset(range(self.layers)) - frozenset(dense)

    @property
    def first_indexed_layer(self) -> int:
        """The first layer of this worker that has an index; -1 without one."""
        return min(self.index_read_share, default=-1)

    @property
    def last_indexed_layer(self) -> int:
        """The last layer of this worker that has an index; -1 without one."""
        return max(self.index_read_share, default=-1)

    @property
    def selector(self) -> Selector | None:
        """The selector that the index is for; None without an index."""
        return self._started_with.selector if self._started_with else None

    @property
    def unit_tokens(self) -> int:
        """Tokens per unit of selection; 1 without an index."""
        return self._started_with.selector.unit_tokens if self._started_with else 1

    @property
    def group_tokens(self) -> int:
        """Tokens per group of the remainder; where there is none, as `unit_tokens`."""
        return self._started_with.selector.row_tokens if self._started_with else 1

    def set_schedule(self, schedule: Schedule | None, window_follows: bool = True) -> None:
        """Set the schedule from the next step on; None reads everything. CUDA graphs stay valid, because the new values
        go into the same tensors. window_follows: whether the scheduler gives windows as long as this schedule's check
        asks for."""
        started = self._started_with
        if schedule is not None:
            if started is None:
                raise UserError(
                    "the engine was started without a schedule, so it keeps no index",
                    "start it with a schedule; set_schedule(None) then switches to dense attention",
                )
            check_fits_engine(schedule, started)
            if not window_follows:
                check_same_window(schedule, started)
            schedule.check_layers(self.layers)
        self._put_in_force(schedule, (), {})

    def set_request_schedules(self, schedules: Sequence[Schedule], numbers: Mapping[str, int]) -> None:
        """Give requests that have not begun yet schedules of their own. schedules: 1 is the first one's number; they fit the
        engine, and have its check.  numbers: request -> number of its schedule; all others have the engine's. Must not be
        called while requests run."""
        if self.schedule is None:
            raise UserError("requests have schedules of their own only beside one of the engine", "set_schedule first")
        if len(schedules) > MOST_REQUEST_SCHEDULES:
            raise UserError(f"requests have at most {MOST_REQUEST_SCHEDULES} schedules, got {len(schedules)}")
        for schedule in schedules:
            check_fits_engine(schedule, self.schedule)
            schedule.check_layers(self.layers)
        self._put_in_force(self.schedule, schedules, numbers)

    def rows_of_own_schedules(self) -> list[int]:
        """How many decode rows were read by each of the schedules of requests, the first one's first."""
        self._count_all()
        counts: list[int] = self.own_rows_V[1:].tolist()
        return counts

    def _put_in_force(self, schedule: Schedule | None, own: Sequence[Schedule], numbers: Mapping[str, int]) -> None:
        # What ran is counted under the schedules that it ran with.
        self._count_all()
        self.schedule, self.request_numbers = schedule, numbers
        self.own_rows_V = np.zeros(1 + len(own), dtype=np.int64)
        self.budgets.set_schedules([schedule, *own])
        self.reads = ReadTables([schedule, *own], self.layers)

    def begin_step(self, contexts_R: Contexts, which_R: np.ndarray | None, may_replay: bool) -> None:
        """The metadata of a step is being built: these are the contexts of its decode rows, and 0 for rows that are none (an
        array may be vLLM's memory; a list is kept), and the numbers of their schedules (None: all have the engine's).
        may_replay: whether a full CUDA graph may run the step.
        From here on `step_is_whole` is about this step: it is true where no row leaves anything out, or the step is a short
        one, if a graph that may run it has no plan either."""
        self._end_step()
        most, total = most_and_total(contexts_R)
        reads_all = total <= self.short_step_tokens or not self.reads.leave_out(contexts_R, which_R, most)
        self.step_is_whole = reads_all and (bool(self.captured_whole) or not may_replay)
        if self.step_is_whole and self.short_reads is not None and self.row_names is not None:
            self._note_short_reads(np.array(contexts_R, dtype=np.int64), which_R)
        not_decoding, self._not_decoding = self._not_decoding, NO_ROWS
        kept_R = contexts_R if isinstance(contexts_R, list) else contexts_R.copy()
        self._step = BegunStep(kept_R, which_R, not_decoding, may_replay, self.step_is_whole)

    def _note_short_reads(self, contexts_R: np.ndarray, which_R: np.ndarray | None) -> None:
        """Note what rows of a whole step read beyond their schedules."""
        assert self.short_reads is not None and self.row_names is not None, (
            "nobody asks, or nobody says whose the rows are"
        )
        # Rows behind those of the requests are padding.
        for name, tokens in zip(self.row_names, self.reads.unread_tokens(contexts_R, which_R).tolist(), strict=False):
            if tokens:
                self.short_reads[name] = self.short_reads.get(name, 0) + tokens

    def take_short_reads(self) -> dict[str, int]:
        """`short_reads` of the requests since the last call; the first call begins to keep them."""
        taken, self.short_reads = self.short_reads or {}, {}
        return taken

    def take_back(self, rows: DecodeRows) -> None:
        """These rows of the next step will look like decode rows, and are none."""
        self._not_decoding += rows

    def layer_ran(self, layer: int, attention: str) -> None:
        """A layer was entered in the step under way, and ran this attention."""
        if self._step is not None:
            self._step.ran[layer] = attention

    def layer_captured(self, layer: int, attention: str) -> None:
        """A layer was entered while a CUDA graph was captured. Replays of the graph run this attention again."""
        captured = self.captured_whole if self.captures_whole else self.captured
        if attention == "dense" or layer not in captured:
            captured[layer] = attention

    @property
    def decoded(self) -> DecodeRows:
        """Decode rows of all steps since `reset_report`, whatever the layers did with them."""
        self._count_all()
        return self._decoded

    @property
    def ran(self) -> dict[int, str]:
        """Layer -> the attention that it ran since `reset_report`: of the steps in which the layer left out a part of
        some context or should have, "dense" if any was. A layer that is absent never used our backend."""
        self._count_all()
        return {layer: self._sparse_rows_ran.get(layer, "dense") for layer in sorted(self._counted)}

    def report(self) -> EngineReport:
        """What ran since the last `reset_report`. A layer that never used our backend shows no steps at all."""
        decoded = self.decoded
        return EngineReport(
            engine="vllm",
            model=self.model,
            schedule_name=self.schedule.name if self.schedule else None,
            weight_version=0,
            prefill_tokens=self.counters.prefill_tokens,
            generated_tokens=decoded.rows,
            preemptions=self.counters.preemptions,
            recomputed_tokens=self.counters.recomputed_tokens,
            resumed_tokens=self.counters.resumed_tokens,
            dense_request_steps=decoded.dense_rows,
            dense_request_context_tokens=decoded.dense_context_tokens,
            layers=[self._layer(layer) for layer in range(self.layers)],
        )

    def reset_report(self) -> None:
        """Start counting anew. Must not be called while a step runs."""
        self.counters = Counters()
        self._step, self._not_decoding, self._replayed = None, NO_ROWS, []
        self._decoded, self._counted, self._sparse_rows_ran = NO_ROWS, {}, {}

    def _layer(self, layer: int) -> LayerReport:
        share = self.index_read_share.get(layer, 0.0) if self.schedule else 0.0
        resumed = int(np.broadcast_to(self.counters.resumed_sparse_L, self.layers)[layer])
        counted = self._counted.get(layer, LayerReport())
        return replace(counted, resumed_sparse_tokens=resumed, index_read_share=share)

    def _end_step(self) -> None:
        """Note what ran in the step under way."""
        step, self._step = self._step, None
        if step is None:
            return
        # Where one layer was entered, no graph ran the step: a layer that was not entered ran something else.
        if step.may_replay and not step.ran:
            self._replayed.append(step)
            if len(self._replayed) == STEPS_AT_ONCE:
                self._count_replayed()
        else:
            self._count([step], step.ran, step.whole)

    def _count_replayed(self) -> None:
        for whole, captured in ((False, self.captured), (True, self.captured_whole)):
            steps = [step for step in self._replayed if step.whole is whole]
            if steps:
                self._count(steps, captured, whole)
        self._replayed = []

    def _count_all(self) -> None:
        """Count what ran up to now."""
        self._end_step()
        self._count_replayed()

    def _count(self, steps: Sequence[BegunStep], ran: dict[int, str], whole: bool) -> None:
        """Count the rows of these steps, and for each layer what it ran in them. whole: whether they had no plan."""
        contexts_X, which_X = np.concatenate([np.array(step.contexts_R, dtype=np.int64) for step in steps]), None
        if any(step.which_R is not None for step in steps):
            which_X = np.concatenate(
                [np.full(len(s.contexts_R), ENGINES) if s.which_R is None else s.which_R for s in steps]
            )
            which_X = which_X[contexts_X > 0]
            self.own_rows_V += np.bincount(which_X[which_X > ENGINES], minlength=len(self.own_rows_V))
        rows = self.reads.decode_rows(contexts_X[contexts_X > 0], which_X)
        for step in steps:
            if step.not_decoding is not NO_ROWS:
                rows += -step.not_decoding
        self._decoded += rows
        if not rows.rows:
            return
        sparse_L, unread_L = np.broadcast_to(rows.left_out_2L, (2, self.layers))
        for layer, attention in ran.items():
            leaves_out, unread = int(sparse_L[layer]), int(unread_L[layer])
            needed_sparse = 0 if whole else leaves_out
            sparse = needed_sparse if attention != "dense" else 0
            counted = self._counted.setdefault(layer, LayerReport())
            counted.dense_steps += rows.rows - sparse
            counted.sparse_steps += sparse
            counted.short_dense_steps += leaves_out if whole and attention == "dense" else 0
            counted.context_tokens += rows.context_tokens
            counted.read_tokens += rows.context_tokens - (unread if attention != "dense" else 0)
            if needed_sparse and self._sparse_rows_ran.get(layer) != "dense":
                self._sparse_rows_ran[layer] = attention


STATE = State()
