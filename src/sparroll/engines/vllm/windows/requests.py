"""What a worker keeps about a request whose drafts are checked: its random draws, and what the checks said. vLLM is not
imported; its SamplingParams are read by name."""

# T response tokens, K top-k entries

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparroll.engines import sampling
from sparroll.engines.sampling import CheckDraws
from sparroll.engines.vllm.attention.request_schedules import number_of
from sparroll.engines.vllm.attention.state import STATE
from sparroll.types import Checks


@dataclass
class CheckedTokens:
    """What the checks said of a request's response so far, one entry for each token that stands."""

    dense_logp: list[Tensor] = field(default_factory=list)
    draft_acceptance: list[Tensor] = field(default_factory=list)
    acceptance: list[Tensor] = field(default_factory=list)
    lists: list[tuple[Tensor, ...]] = field(default_factory=list)
    """Of the most likely tokens under q~: log p; of those under p: ids and log p. [N, K] each."""
    checks: Checks = field(default_factory=Checks)
    check_read_tokens: int = 0
    """Tokens of the cache that the checks read in each layer."""
    draft_context_tokens: int = 0
    """Sum of the contexts' lengths over all drafts, those that were taken back included."""
    draft_unread_tokens: int = 0
    """Tokens that they left out, summed over all layers."""

    def table(self) -> dict[str, Any]:
        """The same as tensors of the whole response, for the engine's process."""
        dense_at_ids, dense_ids, dense_top_logp = (
            (torch.cat(part) for part in zip(*self.lists, strict=True)) if self.lists else (None, None, None)
        )
        tokens = {name: getattr(self, name) for name in ("dense_logp", "draft_acceptance", "acceptance")}
        return {
            **{name: torch.cat(parts) if parts else torch.empty(0) for name, parts in tokens.items()},
            "dense_at_ids": dense_at_ids,
            "dense_ids": dense_ids,
            "dense_top_logp": dense_top_logp,
            "checks": self.checks,
            "check_read_tokens": self.check_read_tokens,
            "draft_context_tokens": self.draft_context_tokens,
            "draft_unread_tokens": self.draft_unread_tokens,
        }


@dataclass
class WindowRequest:
    """One request in the worker. Its draws are HFEngine's for the same seed."""

    temperature: float
    top_p: float
    stops: frozenset[int]
    which: int
    """The number of the schedule of its drafts (see decode_rows.ENGINES)."""
    draws_3T: Tensor
    """float64 uniforms for each response position: to draft, to keep, and to draw from the residual."""
    said: CheckedTokens = field(default_factory=CheckedTokens)

    @staticmethod
    def of(name: str, parameters: Any, most_tokens: int) -> WindowRequest:
        """From vLLM's SamplingParams. A request without a seed gets one from its name, which is the same on each worker.
        most_tokens: the response can have no more."""
        seed = parameters.seed
        if seed is None or seed < 0:
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
        count = min(parameters.max_tokens or most_tokens, most_tokens)
        keep_T, redraw_T = CheckDraws(seed, count).at(slice(0, count), torch.device("cpu"))
        stops = set(parameters.stop_token_ids or ())
        # vLLM sets it only where it may end the response.
        if parameters.eos_token_id is not None:
            stops.add(parameters.eos_token_id)
        return WindowRequest(
            temperature=float(parameters.temperature),
            top_p=float(parameters.top_p),
            stops=frozenset(stops),
            which=number_of(name, parameters, STATE),
            draws_3T=torch.stack([sampling.uniforms(seed, count), keep_T, redraw_T]),
        )
