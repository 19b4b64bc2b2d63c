"""The types that several folders share: a prompt, a rollout, a policy's scores of it, the batch that an update reads,
and a step's metrics. Data only: nothing here runs a model or computes a weight."""

# B rollouts, S tokens of prompt + response (right-padded), T response tokens (right-padded), K top-k entries

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.rounding import percent_up

LARGEST_SEED = 2**32 - 1
"""Largest seed of a command or a run. The seed of each request is derived from it, and larger."""


def check_seed(seed: int) -> None:
    """Raise UserError for a seed that a command or a run cannot have."""
    if not is_whole(seed) or not 0 <= seed <= LARGEST_SEED:
        raise UserError(f"a seed must be a whole number from 0 to {LARGEST_SEED}, got {seed!r}")


@dataclass(frozen=True)
class Prompt:
    """A question with a verifiable answer.

    >>> Prompt(prompt_id="synthetic/train/3/17", text="a = 7 ; b = a + 3 ; b ?", answer="0", task="synthetic", level=3)
    """

    prompt_id: str
    text: str
    answer: str
    task: str = ""
    level: int = 0
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) of each turn if the question is a chat, which goes through the model's chat template; `text` then
    holds its words. Empty if the question is a plain text."""


@dataclass(frozen=True)
class TopK:
    """A policy's most likely tokens at each position, most likely first.

    >>> TopK(ids=torch.tensor([[7, 2, 5], [0, 3, 9]]), logp=torch.tensor([[-0.1, -2.6, -4.2], [-0.7, -1.1, -2.3]]))

    This example has the 3 most likely tokens at each of 2 positions. An entry with log-probability -inf is padding, or
    was left out by top-p. The log-probabilities are over the whole vocabulary, after temperature and top-p; `mismatch`
    checks this when it uses them.
    """

    ids: Tensor
    """[T, K] int64; also [B, T, K], or [K] at one position."""
    logp: Tensor
    """Their log-probabilities, float32, of the same shape."""

    def __post_init__(self) -> None:
        check_tensors(ids=self.ids, logp=self.logp)
        if self.ids.shape != self.logp.shape or not self.ids.ndim:
            shapes = f"{list(self.ids.shape)} and {list(self.logp.shape)}"
            raise UserError(f"the ids and log-probabilities of a top-k list must have one shape [T, K], got {shapes}")

    @property
    def k(self) -> int:
        """How many entries each position has."""
        return self.ids.shape[-1]

    def __getitem__(self, positions: Tensor | slice) -> TopK:
        """The lists at some positions."""
        return TopK(self.ids[positions], self.logp[positions])

    def split(self, tokens: list[int]) -> list[TopK]:
        """Cut into lists of these many positions each, the inverse of `cat`."""
        return [TopK(*both) for both in zip(self.ids.split(tokens), self.logp.split(tokens), strict=True)]

    def to(self, device: torch.device | str) -> TopK:
        return TopK(self.ids.to(device), self.logp.to(device))

    @staticmethod
    def cat(parts: Sequence[TopK]) -> TopK:
        """Join the parts along the positions."""
        return TopK(torch.cat([part.ids for part in parts]), torch.cat([part.logp for part in parts]))


@dataclass
class Checks:
    """What the dense checks of drafted tokens did, in one rollout or in all.

    >>> Checks(windows=16, cut_windows=2, drafted_tokens=1003, taken_back_tokens=57, extra_tokens=13)
    """

    windows: int = 0
    cut_windows: int = 0
    """Windows in which a token was not kept. Each of them got one token from the dense policy in its place."""
    drafted_tokens: int = 0
    taken_back_tokens: int = 0
    """Drafted tokens that did not stay: the first one of a window that was not kept, and those after it."""
    extra_tokens: int = 0
    """Tokens that the dense policy gave behind windows that stood whole. They were not drafted."""
    behind_stop_tokens: int = 0
    """Drafts behind a drafted stop id. They ran, and no check looked at them, so they are not among `drafted_tokens`. Only
    vLLM has such."""

    @property
    def cut_share(self) -> float:
        """Windows that were cut / windows; 0 when nothing was checked."""
        return self.cut_windows / self.windows if self.windows else 0.0

    @property
    def drafted_per_kept(self) -> float:
        """Drafts that ran, also behind a stop id / tokens that came of the windows: drafts that stand, tokens in place of
        rejected ones, and those behind whole windows. Below 1 where nearly all windows stand whole; 1 when nothing was
        checked."""
        stand = self.drafted_tokens - self.taken_back_tokens + self.cut_windows + self.extra_tokens
        return (self.drafted_tokens + self.behind_stop_tokens) / stand if stand else 1.0

    def table(self) -> dict[str, float]:
        """Plain data for a JSON record: the counts and what follows from them. `from_table` gives the counts back."""
        counts = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**counts, "cut_share": self.cut_share, "drafted_per_kept": self.drafted_per_kept}

    @staticmethod
    def from_table(table: dict[str, Any]) -> Checks:
        """The counts in a table that `table` wrote, which may hold more. Older ones do not count drafts behind a stop
        id."""
        counts = {"behind_stop_tokens": 0, **table}
        return Checks(**{each.name: counts[each.name] for each in fields(Checks)})

    def add(self, other: Checks) -> None:
        """Count these, too."""
        counts = vars(self)
        for name, count in vars(other).items():
            counts[name] += count


@dataclass(repr=False)
class Rollout:
    """One sampled response, with the log-probabilities of the policy that sampled it.

    >>> Rollout(prompt_ids=[1, 5, 9], response_ids=[7, 2], sparse_logp=torch.tensor([-0.1, -2.3]), finish_reason="stop",
    ...         prompt_index=0, sample_index=3, seed=11, weight_version=4, schedule_name="qwen3-1.7b-0.86",
    ...         attention="sparse", kv_read_share=0.31, wall_seconds=1.8, text="4")
    Rollout(prompt 0, sample 3: 3 + 2 tokens, stop, sparse, 31% of the KV read, '4')
    """

    prompt_ids: list[int]
    response_ids: list[int]
    sparse_logp: Tensor
    """[T] float32, log-probability of each response token under the distribution it was drawn from, after temperature
    and top-p. At temperature 0 it is the log-probability at temperature 1. Where drafts are checked, it is log q~ of
    `draft_check`."""
    finish_reason: Literal["stop", "length"]
    """stop: the response ended with a stop id, which is its last id. length: it reached `max_new_tokens`."""
    prompt_index: int = 0
    sample_index: int = 0
    seed: int = 0
    weight_version: int = 0
    schedule_name: str | None = None
    """Name of the schedule in force; None when the engine, or this request of it, was asked for dense attention, or for
    a compression."""
    compression_name: str | None = None
    """Kind and budget of the compression in force."""
    attention: Literal["dense", "sparse", "evicted"] = "dense"
    """What really ran. "sparse": at least one decode step of a sparse layer read only a part of the context. "evicted":
    at least one token, of the prompt or later, was dropped from the cache."""
    kv_read_share: float = 1.0
    """Tokens attended / tokens in context, over this rollout's decode steps and all layers, dense ones included. Where
    drafts are checked: tokens that all drafts and checks read / tokens that dense decoding of the same response reads."""
    wall_seconds: float = 0.0
    top_k: TopK | None = None
    """The K most likely tokens under the sampling distribution at each response token; None if they were not asked
    for."""
    dense: TokenScores | None = None
    """What the dense policy said of each response token, in the same engine, where drafts are checked; its lists are
    there if `top_k` was asked for. None elsewhere."""
    draft_acceptance: Tensor | None = None
    """[T] float32, probability mass that the drafting policy shares with the dense one at each response token; 1 at
    tokens that were not drafted: the first one, and those behind whole windows. None where no drafts are checked."""
    acceptance: Tensor | None = None
    """[T] float32, the exact acceptance of what was sampled at each response token, sum over v of min(p(v), q~(v)), as
    the engine's checks saw it; 1 at tokens that were not drafted. None where no drafts are checked."""
    checks: Checks | None = None
    """What the checks did; None where no drafts are checked."""
    text: str | None = None
    """The response as text, without special tokens; None where the engine has no tokenizer, or the rollout comes from
    elsewhere."""

    def __repr__(self) -> str:
        """One line, since the ids and log-probabilities of a response fill pages."""
        what = f"{len(self.prompt_ids)} + {len(self.response_ids)} tokens, {self.finish_reason}"
        read = (
            self.attention
            if self.attention == "dense"
            else f"{self.attention}, {percent_up(self.kv_read_share)} of the KV read"
        )
        said = "" if self.text is None else f", {reprlib.repr(self.text)}"
        return f"Rollout(prompt {self.prompt_index}, sample {self.sample_index}: {what}, {read}{said})"

    @property
    def dense_logp(self) -> Tensor | None:
        """[T] float32, log-probability of each response token under the dense policy, as the engine's checks saw it;
        None where no drafts are checked."""
        return None if self.dense is None else self.dense.logp

    @property
    def context_tokens(self) -> Tensor:
        """[T] context length at which each response token was drawn: the prompt and the response tokens before it.

        The token at response index t was drawn from the query at position `len(prompt_ids) + t - 1`, whose context
        holds `len(prompt_ids) + t` tokens.
        """
        return len(self.prompt_ids) + torch.arange(len(self.response_ids))

    def read_by(self, scores: TokenScores) -> Rollout:
        """The same response with another policy's log-probabilities: a replay."""
        return replace(
            self,
            sparse_logp=scores.logp,
            top_k=scores.top_k,
            dense=None,
            draft_acceptance=None,
            acceptance=None,
            checks=None,
        )


@dataclass
class TokenScores:
    """A policy's log-probabilities of one rollout's response, which it read again. The tensors are on the CPU.

    >>> TokenScores(logp=torch.tensor([-0.2, -1.9]), top_k=TopK(ids_TK, logp_TK))
    """

    logp: Tensor
    """[T] float32, log-probability of each response token at the given temperature."""
    top_k: TopK | None = None
    """This policy's own most likely tokens; None if they were not asked for."""
    logp_at_ids: Tensor | None = None
    """[T, K] float32, log-probabilities of given ids, such as those in the sampling policy's list; None if no ids were
    given."""


@dataclass(frozen=True)
class NowWeights:
    """Weights that follow the policy while it is updated: a function of now_logp, token by token.

    Which tokens are kept never changes within a step; only the weights of kept tokens do.
    """

    rule: Callable[..., Tensor]
    """(now_logp [B, T], *columns) -> weights [B, T]; 0 for every dropped token."""
    columns_BT: tuple[Tensor, ...]
    """What the rule needs to know of each token beside now_logp, each [B, T]."""

    @torch.no_grad()
    def __call__(self, now_logp_BT: Tensor) -> Tensor:
        return self.rule(now_logp_BT.detach(), *self.columns_BT)

    def rows(self, rows: Tensor | list[int], tokens: int) -> NowWeights:
        """The weights of some rollouts, up to `tokens` response tokens of each."""
        return NowWeights(self.rule, tuple(column[rows, :tokens] for column in self.columns_BT))

    def to(self, device: torch.device) -> NowWeights:
        return NowWeights(self.rule, tuple(column.to(device) for column in self.columns_BT))


@dataclass
class TokenBatch:
    """Rollouts of one step, padded on the right, with everything that an update reads. Each stage of the step fills in
    its fields. Response token t of row b is at `input_ids_BS[b, prompt_tokens_B[b] + t]`.

    >>> batch = TokenBatch.from_rollouts(rollouts, pad_id=0)      # rollouts of 2 and 1 tokens after prompts of 3 and 2
    >>> batch.input_ids_BS, batch.prompt_tokens_B, batch.response_tokens_B
    (tensor([[1, 5, 9, 7, 2], [1, 4, 8, 0, 0]]), tensor([3, 2]), tensor([2, 1]))
    >>> batch.advantage_B = torch.tensor([0.7, -0.7])
    >>> batch.add_scores(scorer.dense(rollouts, top_k=20))
    """

    # -- sampling
    input_ids_BS: Tensor
    prompt_tokens_B: Tensor
    response_tokens_B: Tensor
    sparse_logp_BT: Tensor

    # -- rewards
    advantage_B: Tensor | None = None
    left_out_B: Tensor | None = None
    """[B] bool: rollouts that stay out of the loss; none of their tokens is kept or counted. None: all rollouts are
    in."""

    # -- scoring
    dense_logp_BT: Tensor | None = None
    dense_top_k: list[TopK | None] | None = None
    """The dense policy's most likely tokens of each rollout, [T, K] without padding. This is by far the largest
    field."""
    reference_logp_BT: Tensor | None = None
    """Log-probabilities under the model that the run began with, for the KL term."""

    # -- the correction
    weight_BT: Tensor | None = None
    """What the loss of each token is multiplied by, in the step's first update."""
    kept_BT: Tensor | None = None
    """[B, T] bool: response tokens that stay in the loss."""
    kept_tokens: int = 0
    """Kept tokens of the step over all micro batches and processes, the denominator of the loss."""
    now_weights: NowWeights | None = None
    """Takes the place of `weight_BT` if the weights follow the policy while it is updated."""

    def __len__(self) -> int:
        """B, the number of rollouts."""
        return len(self.prompt_tokens_B)

    @property
    def mask_BT(self) -> Tensor:
        """[B, T] bool: true at response tokens, false at padding."""
        steps_T = torch.arange(self.sparse_logp_BT.shape[1], device=self.sparse_logp_BT.device)
        return steps_T < self.response_tokens_B[:, None]

    @property
    def context_tokens_BT(self) -> Tensor:
        """[B, T] context length at which each response token was drawn (see Rollout.context_tokens)."""
        steps_T = torch.arange(self.sparse_logp_BT.shape[1], device=self.sparse_logp_BT.device)
        return self.prompt_tokens_B[:, None] + steps_T

    @staticmethod
    def from_rollouts(rollouts: list[Rollout], pad_id: int, device: torch.device | str = "cpu") -> TokenBatch:
        """The padded batch of these rollouts. There may be none, in a process that has no share of the step."""
        prompt_tokens_B = torch.tensor([len(r.prompt_ids) for r in rollouts], dtype=torch.int64)
        response_tokens_B = torch.tensor([len(r.response_ids) for r in rollouts], dtype=torch.int64)
        longest_S = max((len(r.prompt_ids) + len(r.response_ids) for r in rollouts), default=0)
        longest_T = max((len(r.response_ids) for r in rollouts), default=0)
        input_ids_BS = torch.full((len(rollouts), longest_S), pad_id, dtype=torch.int64)
        sparse_logp_BT = torch.zeros(len(rollouts), longest_T)
        for row, rollout in enumerate(rollouts):
            check_tensors(sparse_logp=rollout.sparse_logp)
            ids = [*rollout.prompt_ids, *rollout.response_ids]
            input_ids_BS[row, : len(ids)] = torch.tensor(ids)
            sparse_logp_BT[row, : len(rollout.response_ids)] = rollout.sparse_logp
        return TokenBatch(
            input_ids_BS.to(device), prompt_tokens_B.to(device), response_tokens_B.to(device), sparse_logp_BT.to(device)
        )

    def add_scores(self, dense: Sequence[TokenScores]) -> None:
        """Take over the dense policy's scores, one for each rollout in the batch's order."""
        self.dense_logp_BT = padded([score.logp for score in dense])
        self.dense_top_k = [score.top_k for score in dense]

    def weight_at(self, now_logp_BT: Tensor) -> Tensor:
        """[B, T] weights for the policy as it is now."""
        assert self.weight_BT is not None, "the batch needs weights"
        return self.weight_BT if self.now_weights is None else self.now_weights(now_logp_BT)

    def take(self, rows: list[int], device: torch.device | str = "cpu") -> TokenBatch:
        """These rows on the device, without the padding that only other rows needed. The shape letters at the end of a
        field's name say along which dimensions it is cut."""
        index_B = torch.tensor(rows, dtype=torch.int64)
        tokens_S = int((self.prompt_tokens_B + self.response_tokens_B)[index_B].max())
        tokens_T = int(self.response_tokens_B[index_B].max())
        cuts: dict[str, Any] = {"BS": (index_B, slice(tokens_S)), "BT": (index_B, slice(tokens_T)), "B": index_B}
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in values.items():
            cut = cuts.get(name.rpartition("_")[2])
            if value is not None and cut is not None:
                values[name] = value[cut].to(device)
        if self.dense_top_k is not None:
            values["dense_top_k"] = [self.dense_top_k[row] for row in rows]
        if self.now_weights is not None:
            values["now_weights"] = self.now_weights.rows(index_B, tokens_T).to(torch.device(device))
        return TokenBatch(**values)


LEAST_TEMPERATURE = 1e-3
"""Below this, logits divided by the temperature overflow. 0 is greedy."""
LEAST_VLLM_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one, but for 0."""
MOST_SAMPLES = 65_536
"""Responses to one prompt that one call or command may ask for. Each is a request in memory before it is sampled."""


def check_tensors(**values: object) -> None:
    """Raise UserError for an argument that is no torch tensor, such as a numpy array or a list."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            kind = type(value)
            raise UserError(
                f"{name} must be a torch tensor, got a {kind.__module__}.{kind.__qualname__}".replace("builtins.", ""),
                f"torch.as_tensor({name}) makes one of a numpy array or a list",
            )


def is_whole(value: object) -> bool:
    """Whether this is a whole number: an int or a numpy integer, but not True or False."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether this is a number: an int, a float or one of numpy, but not True or False."""
    return isinstance(value, Real) and not isinstance(value, bool)


def padded(values: Sequence[Tensor]) -> Tensor:
    """[B, T] from B tensors of different lengths, with zeros after the end of each."""
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True) if len(values) else torch.zeros(0, 0)


StepReport = dict[str, float]
"""Flat metrics of one training step, by names that explain themselves.

>>> {"mismatch/acceptance_q05/16k-18k": 0.871, "correction/truncated_share": 0.002, "time/rollout_seconds": 81.2}
"""
