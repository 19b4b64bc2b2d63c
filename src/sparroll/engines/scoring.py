"""The trainer's log-probabilities of given tokens: teacher-forced, with dense attention or with the sparse attention of
the rollouts. Logits exist only for a chunk of tokens at a time, never for a whole response.
"""

# B rollouts, S tokens of prompt + response, T response tokens, N scored tokens of a batch, V vocabulary, K top-k,
# E hidden

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparroll.attention.masked.api import implementation
from sparroll.engines.base import Engine
from sparroll.engines.generate_arguments import check_distribution
from sparroll.engines.hf.attention import ReplayStep, routed, run_step
from sparroll.engines.load_model import load_model
from sparroll.engines.sampling import check_finite, log_probs
from sparroll.engines.supported_models import check_supported
from sparroll.errors import UserError
from sparroll.mismatch.acceptance import acceptance
from sparroll.progress import OnProgress
from sparroll.schedule import Schedule
from sparroll.types import Rollout, TokenBatch, TokenScores, TopK


class Scorer:
    """Teacher-forced scoring of rollouts with one model.

    model: name, folder, or a model object (used as it is).  batch_tokens: padded tokens per forward.
    logit_chunk_tokens: tokens whose logits exist at one time (1024 x 152K in fp32 are 620 MB).
    impl: what runs the sparse attention; `self.impl` says what "auto" became.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        batch_tokens: int = 16_384,
        logit_chunk_tokens: int = 1024,
        impl: str = "auto",
    ):
        self.tokenizer: PreTrainedTokenizerBase | None = None
        if isinstance(model, PreTrainedModel):
            self.model = model
        else:
            self.model, self.tokenizer = load_model(model, dtype, device)
        check_supported(self.model)
        self.batch_tokens = batch_tokens
        self.logit_chunk_tokens = logit_chunk_tokens
        self._asked = impl

    @classmethod
    def beside(
        cls, engine: Engine, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Scorer:
        """A scorer for the model that the engine was made with. It uses the engine's own weights where the engine can
        share them, else it loads a copy with this dtype and device."""
        shared = engine.shared_model()
        return cls(engine.model_name if shared is None else shared, dtype=dtype, device=device)

    @property
    def impl(self) -> str:
        """The implementation of sparse attention that runs here. Raises UserError where the one that was asked for
        cannot run."""
        return implementation(self._asked, self.model.device)

    def dense(
        self,
        rollouts: list[Rollout],
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        at_ids: list[Tensor] | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[TokenScores]:
        """Scores under the dense policy, in the rollouts' order. at_ids: also the log-probabilities of these tokens,
        [T, K] ids for each rollout, such as the engine's own list. top_p: as in the engine's `generate`; a sampled token
        that the dense policy would leave out has -inf."""
        return self._scores(rollouts, None, temperature, top_p, top_k, at_ids, on_progress)

    def sparse(
        self,
        rollouts: list[Rollout],
        schedule: Schedule,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        at_ids: list[Tensor] | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[TokenScores]:
        """Scores under sparse decoding: each response token as an engine with this schedule would have seen it. at_ids: as
        in `dense`, such as the dense policy's own list."""
        schedule.check_layers(self.model.config.num_hidden_layers)
        return self._scores(rollouts, schedule, temperature, 1.0, top_k, at_ids, on_progress)

    @torch.inference_mode()
    def exact_acceptance(
        self, rollouts: list[Rollout], *, temperature: float = 1.0, on_progress: OnProgress | None = None
    ) -> list[Tensor]:
        """Acceptance [T] per rollout from whole distributions: this model's dense one, and the one that the engine drew
        from, which it returns with `generate(top_k=engine.vocabulary)`."""
        check_distribution(temperature)
        _check_whole(rollouts, self._vocabulary)
        results: dict[int, Tensor] = {}
        for members, batch in self._batches(rollouts):
            dense_NE = self._hidden(batch, None)[_scored(batch)]
            engines = TopK.cat([whole for number in members if (whole := rollouts[number].top_k) is not None])
            parts = []
            for hidden, ids, logp in zip(
                *(column.split(self.logit_chunk_tokens) for column in (dense_NE, engines.ids, engines.logp)),
                strict=True,
            ):
                dense_NV = self._logits(hidden, temperature).gather(-1, ids.to(hidden.device))
                parts.append(acceptance(dense_NV, logp.to(hidden.device)).cpu())
            results |= dict(zip(members, torch.cat(parts).split(batch.response_tokens_B.tolist()), strict=True))
            if on_progress:
                on_progress(len(results), len(rollouts))
        return [results[number] for number in range(len(rollouts))]

    @torch.inference_mode()
    def exact_replay(
        self,
        rollouts: list[Rollout],
        schedule: Schedule,
        *,
        temperature: float = 1.0,
        on_progress: OnProgress | None = None,
    ) -> list[Tensor]:
        """Acceptance [T] per rollout from the whole distributions of this model, dense and under the schedule. It says
        nothing about the engine that sampled the rollouts."""
        check_distribution(temperature)
        schedule.check_layers(self.model.config.num_hidden_layers)
        results: dict[int, Tensor] = {}
        for members, batch in self._batches(rollouts):
            dense_NE = self._hidden(batch, None)[_scored(batch)]
            sparse_NE = self._hidden(batch, schedule)[_scored(batch)]
            parts = [
                acceptance(self._logits(dense, temperature), self._logits(sparse, temperature)).cpu()
                for dense, sparse in zip(
                    dense_NE.split(self.logit_chunk_tokens), sparse_NE.split(self.logit_chunk_tokens), strict=True
                )
            ]
            results |= dict(zip(members, torch.cat(parts).split(batch.response_tokens_B.tolist()), strict=True))
            if on_progress:
                on_progress(len(results), len(rollouts))
        return [results[number] for number in range(len(rollouts))]

    @torch.inference_mode()
    def _scores(
        self,
        rollouts: list[Rollout],
        schedule: Schedule | None,
        temperature: float,
        top_p: float,
        top_k: int,
        at_ids: list[Tensor] | None,
        on_progress: OnProgress | None,
    ) -> list[TokenScores]:
        check_distribution(temperature, top_k, top_p)
        results: dict[int, TokenScores] = {}
        asked = _checked_ids(rollouts, at_ids, self._vocabulary)
        for members, batch in self._batches(rollouts):
            hidden_NE, tokens_N = self._hidden(batch, schedule)[_scored(batch)], _response_ids(batch)
            asked_NK = torch.cat([asked[number] for number in members]).to(tokens_N.device)
            parts = []
            for hidden, tokens, others in zip(
                *(column.split(self.logit_chunk_tokens) for column in (hidden_NE, tokens_N, asked_NK)), strict=True
            ):
                logp = log_probs(self.model.get_output_embeddings()(hidden), temperature, top_p)
                sampled = logp.gather(-1, tokens[:, None])[:, 0]
                best = logp.topk(min(top_k, logp.shape[-1]), dim=-1)
                parts.append((sampled.cpu(), best.indices.cpu(), best.values.cpu(), logp.gather(-1, others).cpu()))
            lengths = batch.response_tokens_B.tolist()
            columns = [torch.cat(column).split(lengths) for column in zip(*parts, strict=True)]
            for number, logp, ids, best_logp, asked_logp in zip(members, *columns, strict=True):
                check_finite(logp, "while scoring")
                results[number] = TokenScores(
                    logp,
                    TopK(ids, best_logp) if top_k else None,
                    asked_logp if at_ids is not None else None,
                )
            if on_progress:
                on_progress(len(results), len(rollouts))
        return [results[number] for number in range(len(rollouts))]

    @property
    def _vocabulary(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def _hidden(self, batch: TokenBatch, schedule: Schedule | None) -> Tensor:
        training = self.model.training
        self.model.eval()
        try:
            return last_hidden(self.model, batch, schedule, self._asked)
        finally:
            self.model.train(training)

    def _logits(self, hidden: Tensor, temperature: float) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden).float()
        return logits if temperature in (0, 1) else logits / temperature

    def _batches(self, rollouts: list[Rollout]) -> Iterator[tuple[list[int], TokenBatch]]:
        """Rollouts of similar length together, up to `batch_tokens` padded tokens, longest first."""
        if not rollouts:
            raise UserError("there are no rollouts to score")
        for number, rollout in enumerate(rollouts):
            ids = [*rollout.prompt_ids, *rollout.response_ids]
            if min(ids, default=0) < 0 or max(ids, default=0) >= self._vocabulary:
                raise UserError(
                    f"rollout {number} has token ids outside 0..{self._vocabulary - 1}: they are {min(ids)} to {max(ids)}",
                    "score it with the model that it was sampled from",
                )
        for members in length_buckets([len(r.prompt_ids) + len(r.response_ids) for r in rollouts], self.batch_tokens):
            yield members, TokenBatch.from_rollouts([rollouts[i] for i in members], 0, self.model.device)


def response_logp(
    model: PreTrainedModel,
    batch: TokenBatch,
    temperature: float,
    schedule: Schedule | None = None,
    logit_chunk_tokens: int = 1024,
    *,
    impl: str = "auto",
) -> Tensor:
    """[B, T] log-probabilities of the response tokens, with gradient; 0 where the mask is false.

    This is the training forward. It computes what `Scorer.dense` computes, for autograd; with a schedule, it computes
    what `Scorer.sparse` does: every token as an engine with this schedule saw it. Logits are recomputed in the backward
    pass. `impl` names the sparse attention (`attention.masked.api.implementation` says what "auto" is). Raises
    UserError where that cannot run.
    """
    tokens_N1 = _response_ids(batch)[:, None]
    logp_N1 = _logp_of(model, batch, tokens_N1, temperature, schedule, logit_chunk_tokens, impl)
    mask_BT = batch.mask_BT
    return logp_N1.new_zeros(mask_BT.shape).masked_scatter(mask_BT, logp_N1)


def response_logp_of(
    model: PreTrainedModel,
    batch: TokenBatch,
    ids_NK: Tensor,
    temperature: float,
    schedule: Schedule | None = None,
    logit_chunk_tokens: int = 1024,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`response_logp`, and from the same pass the log-probabilities [N, K] of other tokens at the same positions, with
    gradient.

    ids_NK: K token ids for each response token of the batch, row by row without padding.
    """
    both_NK = torch.cat([_response_ids(batch)[:, None], ids_NK], dim=1)
    logp_NK = _logp_of(model, batch, both_NK, temperature, schedule, logit_chunk_tokens, impl)
    mask_BT = batch.mask_BT
    return logp_NK.new_zeros(mask_BT.shape).masked_scatter(mask_BT, logp_NK[:, 0]), logp_NK[:, 1:]


def _logp_of(
    model: PreTrainedModel,
    batch: TokenBatch,
    ids_NK: Tensor,
    temperature: float,
    schedule: Schedule | None,
    logit_chunk_tokens: int,
    impl: str,
) -> Tensor:
    if schedule is not None:
        schedule.check_layers(model.config.num_hidden_layers)
    hidden_NE = last_hidden(model, batch, schedule, impl, training=True)[_scored(batch)]

    def chunk_logp(hidden: Tensor, ids: Tensor) -> Tensor:
        return log_probs(model.get_output_embeddings()(hidden), temperature).gather(-1, ids)

    chunks = zip(hidden_NE.split(logit_chunk_tokens), ids_NK.split(logit_chunk_tokens), strict=True)
    run: Callable[..., Tensor] = checkpoint if torch.is_grad_enabled() else lambda fn, *args, **_: fn(*args)
    return torch.cat([run(chunk_logp, hidden, ids, use_reentrant=False) for hidden, ids in chunks])


def last_hidden(
    model: PreTrainedModel,
    batch: TokenBatch,
    schedule: Schedule | None,
    impl: str = "auto",
    *,
    training: bool = False,
) -> Tensor:
    """[B, S, E] final hidden states of prompt + response; under a schedule, those of the rollouts' sparse stream.

    training: under a schedule, leave the model in its mode instead of eval mode, so that its layers may be
    checkpointed.
    """
    body: nn.Module = model.get_decoder()
    # Right padding needs no mask: under causal attention no real token sees what comes after it.
    positions = torch.arange(batch.input_ids_BS.shape[1], device=batch.input_ids_BS.device).expand_as(
        batch.input_ids_BS
    )
    if schedule is None:
        return body(input_ids=batch.input_ids_BS, position_ids=positions, use_cache=False).last_hidden_state
    with routed(model, training=training):
        step = ReplayStep(
            schedule,
            batch.prompt_tokens_B,
            implementation(impl, batch.input_ids_BS.device),
            keep_selection=torch.is_grad_enabled(),
        )
        layers = int(model.config.num_hidden_layers)
        return run_step(body, step, layers, input_ids=batch.input_ids_BS, position_ids=positions).last_hidden_state


def length_buckets(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Indices in groups with longest * count <= batch_tokens. One that is longer than that has a group to itself."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= batch_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _checked_ids(rollouts: list[Rollout], at_ids: list[Tensor] | None, vocabulary: int) -> list[Tensor]:
    """[T, K] ids of each rollout, K = 0 where none are asked for. Raises UserError on shapes that do not fit, and on what
    is no id of the vocabulary."""
    if at_ids is None:
        return [torch.zeros(len(rollout.response_ids), 0, dtype=torch.int64) for rollout in rollouts]
    hint = "pass the lists that the engine returned: [rollout.top_k.ids for rollout in rollouts]"
    shapes = [list(ids.shape) for ids in at_ids]
    width = at_ids[0].shape[-1] if at_ids and at_ids[0].dim() else 0
    if shapes != [[len(rollout.response_ids), width] for rollout in rollouts]:
        raise UserError(
            f"at_ids must hold [T, K] ids for each rollout, with one K, got the shapes {shapes}",
            hint,
        )
    for number, ids in enumerate(at_ids):
        if ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise UserError(f"at_ids must hold whole numbers, got {ids.dtype} for rollout {number}", hint)
        if bool(((ids < 0) | (ids >= vocabulary)).any()):
            least, most = int(ids.min()), int(ids.max())
            raise UserError(
                f"at_ids of rollout {number} has token ids outside 0..{vocabulary - 1}: they are {least} to {most}",
                hint,
            )
    return [ids.long() for ids in at_ids]


def _check_whole(rollouts: list[Rollout], vocabulary: int) -> None:
    for rollout in rollouts:
        width = 0 if rollout.top_k is None else rollout.top_k.k
        if width != vocabulary:
            raise UserError(
                f"the exact acceptance needs the engine's distribution over all {vocabulary:,} ids, and a rollout holds "
                f"{width:,}",
                "sample with generate(top_k=engine.vocabulary), or use the estimator top_k_lower",
            )


def _scored(batch: TokenBatch) -> Tensor:
    """[B, S] bool: positions whose next token is a response token, in the order of `_response_ids`."""
    positions = torch.arange(batch.input_ids_BS.shape[1], device=batch.input_ids_BS.device)
    start = batch.prompt_tokens_B[:, None] - 1
    return (positions >= start) & (positions < start + batch.response_tokens_B[:, None])


def _response_ids(batch: TokenBatch) -> Tensor:
    """[N] the response tokens of all rows, row by row."""
    positions = torch.arange(batch.input_ids_BS.shape[1], device=batch.input_ids_BS.device)
    start = batch.prompt_tokens_B[:, None]
    return batch.input_ids_BS[(positions >= start) & (positions < start + batch.response_tokens_B[:, None])]
