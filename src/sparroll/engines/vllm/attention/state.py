"""One object per worker process: the schedule as tensors on the device, and what each layer ran. vLLM is not imported.

Each step's rows are noted once, when its metadata is built. Which attention read them is said by the layers: a layer
that is entered says so itself. A step that is replayed from a full CUDA graph enters no layer, and runs what the layers
ran when the graph was captured; they said so then. Of each graph there may be two: a sparse one, and one for steps in
which all rows read everything (whole_graphs.py). A step of a small model waits for the host, so the steps that graphs ran
are counted many at a time.
"""

# R rows of a step, S schedule steps, L layers of the model, dense ones included, P parts of the schedule and before them one
# of the dense layers, U tokens of a context, X rows of several steps; of 2, rows that leave tokens out
# and these tokens

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from sparroll.attention.selectors import Selector
from sparroll.engines.report import EngineReport, LayerReport
from sparroll.errors import UserError
from sparroll.schedule import Schedule

_BY_ITSELF = "run the other one by itself: in a command, a run or an engine of its own"
MOST_STEPS = 64
FEW_ROWS = 256
"""Lists of so few numbers are searched and added up faster than arrays, which counts where a step waits for the host."""
STEPS_AT_ONCE = 128
"""So many steps that graphs ran are counted together."""
UNLIMITED = 1 << 30
"""A budget above every context: the row reads everything."""


NOTHING = np.zeros((2, 1), dtype=np.int64)
"""A count of nothing, which can be added to the counts of any number of layers."""
NOTHING.flags.writeable = False


def most_and_total(numbers_R: np.ndarray) -> tuple[int, int]:
    """The largest and the sum of some integers; 0 of none."""
    if len(numbers_R) > FEW_ROWS:
        return int(numbers_R.max()), int(numbers_R.sum())
    numbers = numbers_R.tolist() or [0]
    return max(numbers), sum(numbers)


@dataclass(frozen=True)
class DecodeRows:
    """Decode rows of a step, or of several. A decode row is one new token of one request."""

    rows: int = 0
    context_tokens: int = 0
    left_out_2L: np.ndarray = field(default_factory=lambda: NOTHING)
    """In each layer, how many rows read a part of their context, and how many tokens these leave out."""
    dense_rows: int = 0
    """Those of the rows that belong to dense requests. They read everything in every layer."""
    dense_context_tokens: int = 0

    @property
    def sparse_L(self) -> np.ndarray:
        """Rows that read a part of their context, in each layer."""
        return self.left_out_2L[0]

    @property
    def unread_tokens_L(self) -> np.ndarray:
        """Tokens that these rows leave out, in each layer."""
        return self.left_out_2L[1]

    def __add__(self, other: DecodeRows) -> DecodeRows:
        return DecodeRows(
            self.rows + other.rows,
            self.context_tokens + other.context_tokens,
            self.left_out_2L + other.left_out_2L,
            self.dense_rows + other.dense_rows,
            self.dense_context_tokens + other.dense_context_tokens,
        )

    def __neg__(self) -> DecodeRows:
        return DecodeRows(
            -self.rows, -self.context_tokens, -self.left_out_2L, -self.dense_rows, -self.dense_context_tokens
        )


NO_ROWS = DecodeRows()


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

    contexts_R: np.ndarray
    """Contexts of its decode rows; 0 for rows that are none."""
    dense_R: np.ndarray | None
    """Which rows belong to dense requests; None where none does."""
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
    dense_rows: np.ndarray | None = None
    """[R] bool: which rows of the step whose metadata is built next belong to dense requests; None where none does."""
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
    _steps_XS: Tensor | None = None
    """Where the schedule's steps start, and below that the budgets of each layer. Each layer has a row of its own,
    whatever its group, so that a CUDA graph that knows the row holds for every grouping."""
    _reads_all_R: Tensor | None = None
    """[most rows] bool, on the device: which rows of the step whose metadata was built last read everything."""
    _said_reads_all: bytes = b""
    """The same as the host said it last; empty where none does."""
    _parts: list[Schedule] = field(default_factory=list)
    """What the sparse layers of the schedule in force read: one for each group of layers."""
    _part_L: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The row of `_left_out_2PU` that is each layer's: 0 for dense layers, then those of the parts."""
    _left_out_2PU: np.ndarray = field(default_factory=lambda: np.zeros((2, 1, 0), dtype=np.int64))
    """Whether a decode row with U tokens of context leaves any out, and how many: looked up, because that takes a fraction
    of what the schedule's formula takes. It grows with the contexts, to at most twice the longest: 16 bytes for each of
    its tokens and groups of layers."""
    _in_part_U: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Whether it leaves any out in some layer."""
    _whole_tokens: int = -1
    """None up to this context does, as far as the tables know."""
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
        self._steps_XS, self._reads_all_R, self._said_reads_all = None, None, b""
        self.index_read_share = {}
        self.captured, self.captured_whole = {}, {}
        self.captures_whole = self.step_is_whole = False
        self.row_names, self.short_reads = None, None
        self.drafting, self.check_rows, self.dense_rows = False, 0, None
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
                _check_same_window(schedule, started)
            schedule.check_layers(self.layers)
            if len(schedule.steps) > MOST_STEPS:
                raise UserError(f"vLLM takes schedules of up to {MOST_STEPS} steps, got {len(schedule.steps)}")
        # Under the schedule that they ran with.
        self._count_all()
        self.schedule = schedule
        # The device is named because vLLM builds models under another default device.
        table = torch.full((1 + self.layers, MOST_STEPS), UNLIMITED, dtype=torch.int32, device="cpu")
        table[0, 0] = 0
        self._parts, self._part_L = [], np.zeros(self.layers, dtype=np.int64)
        self._left_out_2PU = np.zeros((2, 1 + len(schedule.groups if schedule else ()), 0), dtype=np.int64)
        self._in_part_U, self._whole_tokens = np.zeros(0, dtype=bool), -1
        for layers, part in schedule.parts(self.layers) if schedule else ():
            self._parts.append(part)
            self._part_L[list(layers)] = len(self._parts)
            for number, step in enumerate(part.steps):
                table[0, number] = step.from_context_tokens
                table[[1 + layer for layer in layers], number] = step.budgets[0]
        # A new tensor each time: an upload of the old one may still be under way.
        self._host_XS = table.pin_memory() if self.device.type == "cuda" else table
        if self._steps_XS is not None:
            self._steps_XS.copy_(self._host_XS, non_blocking=True)

    def begin_budgets(self, reads_all_R: np.ndarray | None, most_rows: int) -> None:
        """Bring what `budgets` looks up to the device, for the step whose metadata is being built. The host does not wait
        for it. reads_all_R: which of the first rows read everything, whatever their budget; None: none. most_rows: of
        any step."""
        if self._steps_XS is None:
            # Allocated at the first step, because an engine loses in its sleep what was allocated while the model
            # loads. Inference mode, in which steps run, is left, because its tensors could not be written to later.
            with torch.inference_mode(False):
                self._steps_XS = self._host_XS.to(self.device, non_blocking=True)
                self._reads_all_R = torch.zeros(most_rows, dtype=torch.bool, device=self.device)
        assert self._reads_all_R is not None, "budgets without rows"
        said = b"" if reads_all_R is None else reads_all_R.tobytes()
        if said == self._said_reads_all:
            return
        # Rows behind those of this step are told as well: a later step may have more.
        host_R = torch.zeros(len(self._reads_all_R), dtype=torch.bool, device="cpu")
        if reads_all_R is not None:
            host_R[: len(reads_all_R)] = torch.from_numpy(reads_all_R)
        self._reads_all_R.copy_(host_R.pin_memory() if self.device.type == "cuda" else host_R, non_blocking=True)
        self._said_reads_all = said

    def budgets(self, context_tokens_R: Tensor, out_LR: Tensor) -> Tensor:
        """KV budget of each row in each layer, on the device; 0 for padding rows (context 0), and UNLIMITED in dense layers
        and for rows that read everything. It may be part of a CUDA graph: all that changes from step to step is in tensors
        that stay where they are (`begin_budgets`)."""
        assert self._steps_XS is not None and self._reads_all_R is not None, "budgets before their step began"
        starts_S, budgets_LS = self._steps_XS[0], self._steps_XS[1:]
        reads_all_R = self._reads_all_R[: len(context_tokens_R)]
        if self.device.type == "cuda":
            from sparroll.attention.decode import triton_budgets

            triton_budgets.budgets(context_tokens_R, starts_S, budgets_LS, reads_all_R, UNLIMITED, out_LR)
            return out_LR
        step_R = torch.bucketize(context_tokens_R, starts_S, right=True) - 1
        torch.mul(budgets_LS[:, step_R.clamp_(min=0)], context_tokens_R > 0, out=out_LR)
        return out_LR.masked_fill_(reads_all_R, UNLIMITED)

    def decode_rows(self, contexts_R: np.ndarray, dense_R: np.ndarray | bool | None = None) -> DecodeRows:
        """Decode rows with these contexts, as the schedule in force reads them, from lengths that the host knows.
        dense_R: which of them belong to dense requests; None: none of them."""
        left_out_2PR, dense = self._left_out(contexts_R), (0, 0)
        if dense_R is not None:
            dense_R = np.broadcast_to(dense_R, contexts_R.shape)
            left_out_2PR = np.where(dense_R, 0, left_out_2PR)
            dense = (int(dense_R.sum()), int(contexts_R[dense_R].sum()))
        left_out_2L = left_out_2PR.sum(axis=2)[:, self._part_L]
        return DecodeRows(len(contexts_R), int(contexts_R.sum()), left_out_2L, *dense)

    def _left_out(self, contexts: np.ndarray) -> np.ndarray:
        """[2, P, ...] whether decode rows with these contexts [...], integers from 0 on, leave tokens out, and how many, by
        row of `_left_out_2PU`; in the first one none."""
        self._look_up_to(int(contexts.max(initial=0)))
        return self._left_out_2PU.take(contexts, axis=2)

    def _look_up_to(self, longest: int) -> None:
        """Have contexts up to this one in the tables."""
        known = len(self._in_part_U)
        if longest < known:
            return
        more_U = np.arange(known, 1 << longest.bit_length() if longest else 1)
        unread_PU = more_U - np.stack([more_U, *(part.read_tokens(more_U) for part in self._parts)])
        self._left_out_2PU = np.concatenate([self._left_out_2PU, np.stack([unread_PU > 0, unread_PU])], axis=2)
        self._in_part_U = self._left_out_2PU[0].any(axis=0)
        self._whole_tokens = int(self._in_part_U.argmax() if self._in_part_U.any() else len(self._in_part_U)) - 1

    def unread_tokens(self, contexts: np.ndarray) -> np.ndarray:
        """[...] tokens that decode rows leave out, summed over all layers."""
        layers_P = np.bincount(self._part_L, minlength=1 + len(self._parts))
        return np.tensordot(layers_P, self._left_out(contexts)[1], axes=1)

    def begin_step(self, contexts_R: np.ndarray, dense_R: np.ndarray | None, may_replay: bool) -> None:
        """The metadata of a step is being built: these are the contexts of its decode rows, and 0 for rows that are none
        (it may be vLLM's memory), and which of them belong to dense requests (None: none). may_replay: whether a full CUDA
        graph may run the step. From here on `step_is_whole` is about this step: it is true where no row leaves anything
        out, or the step is a short one, if a graph that may run it has no plan either."""
        self._end_step()
        most, total = most_and_total(contexts_R)
        reads_all = total <= self.short_step_tokens or not self._leaves_out(contexts_R, dense_R, most)
        self.step_is_whole = reads_all and (bool(self.captured_whole) or not may_replay)
        if self.step_is_whole and self.short_reads is not None and self.row_names is not None:
            self._note_short_reads(contexts_R if dense_R is None else np.where(dense_R, 0, contexts_R))
        not_decoding, self._not_decoding = self._not_decoding, NO_ROWS
        self._step = BegunStep(contexts_R.copy(), dense_R, not_decoding, may_replay, self.step_is_whole)

    def _leaves_out(self, contexts_R: np.ndarray, dense_R: np.ndarray | None, most: int) -> bool:
        """Whether any of these rows leaves tokens out in some layer. most: the longest of the contexts."""
        if most <= self._whole_tokens:
            return False
        self._look_up_to(most)
        if dense_R is not None:
            contexts_R = contexts_R[~dense_R]
        elif self._in_part_U[most]:
            return True
        return bool(self._in_part_U[contexts_R].any())

    def _note_short_reads(self, contexts_R: np.ndarray) -> None:
        """Note what rows of a whole step read beyond the schedule. contexts_R: of those that the schedule applies to."""
        assert self.short_reads is not None and self.row_names is not None, (
            "nobody asks, or nobody says whose the rows are"
        )
        # Rows behind those of the requests are padding.
        for name, tokens in zip(self.row_names, self.unread_tokens(contexts_R).tolist(), strict=False):
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
        contexts_X, dense_X = np.concatenate([step.contexts_R for step in steps]), None
        if any(step.dense_R is not None for step in steps):
            dense_X = np.concatenate(
                [np.zeros(len(s.contexts_R), bool) if s.dense_R is None else s.dense_R for s in steps]
            )
            dense_X = dense_X[contexts_X > 0]
        rows = self.decode_rows(contexts_X[contexts_X > 0], dense_X)
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


def check_fits_engine(schedule: Schedule, started: Schedule) -> None:
    """Raise UserError where an engine that was started with one schedule cannot go on with another: index, dense layers
    and the memory for drafts are fixed at the start."""
    for what, kept, asked in (
        ("keeps the index of", started.selector.table(), schedule.selector.table()),
        ("has the dense layers", list(started.dense_layers), list(schedule.dense_layers)),
    ):
        if kept != asked:
            raise UserError(
                f"the engine {what} {kept}, the schedule {schedule.name!r} asks for {asked}",
                f"all schedules of one vLLM engine have one selector and the same dense layers; {_BY_ITSELF}",
            )
    most, asks = started.check, schedule.check
    if (most is None) != (asks is None):
        raise UserError(
            f"the engine was started {'without' if most is None else 'with'} checks of drafts, and the schedule "
            f"{schedule.name!r} is {'without' if asks is None else 'with'} them",
            "one vLLM engine checks all drafts or none: give every schedule a check (--check-window 64; in training --set "
            f"check.window_tokens=64; in Python schedule.checked()), or {_BY_ITSELF}; dense rollouts fit both",
        )
    if most is not None and asks is not None and asks.window_tokens > most.window_tokens:
        raise UserError(
            f"the engine has memory for windows of {most.window_tokens} tokens, the schedule {schedule.name!r} asks for "
            f"{asks.window_tokens}",
            "start it with the longest window: VLLMEngine(..., capacity=that schedule), or a server with it",
        )


def _check_same_window(schedule: Schedule, started: Schedule) -> None:
    """Raise UserError where the schedule asks for other windows than those that the scheduler gives."""
    gives, asks = started.check, schedule.check
    if gives is not None and asks is not None and gives.window_tokens != asks.window_tokens:
        raise UserError(
            f"vLLM's scheduler gives windows of {gives.window_tokens} tokens, the schedule {schedule.name!r} asks for "
            f"{asks.window_tokens}, and a scheduler in another process cannot be told",
            f"give the schedule windows of {gives.window_tokens} tokens (`sparroll schedule check NAME --window "
            f"{gives.window_tokens}`), or start the server with it",
        )


STATE = State()
