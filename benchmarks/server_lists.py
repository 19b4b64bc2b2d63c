"""What the lists of a probe cost the hosts of a vLLM server and of its client, without the model: from what vLLM's engine
hands to its server to the tensors that a trainer compares. Once as vLLM's text and TRL's client have it, and once as the
bytes of engines/vllm/lists_route.py, for rollouts that are read again ("scores") and for the sampling before ("samples").
Random numbers; CPU seconds of one thread, server and client one after the other. Needs vLLM and TRL.

    python benchmarks/server_lists.py --out benchmarks/results/server-lists-cpu.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sparroll import records
from sparroll.engines.load_model import load_tokenizer
from sparroll.engines.vllm import lists_route, outputs, rescoring
from sparroll.models import resolve
from sparroll.types import Rollout, TokenScores, TopK

PROMPT_TOKENS = 64
SPREAD = 3.0
"""Of the logits, so that nearly all drawn tokens are in the lists."""
IN_ONE_ANSWER = 4
"""Rollouts, as in integrations/trl/server.py."""
Both = tuple[Tensor, TopK]
"""Log-probabilities of the tokens, and the lists."""


def drawn(options: argparse.Namespace, vocabulary: int, seed: int) -> tuple[Rollout, Any]:
    """A rollout from random distributions, and what vLLM's engine says of its tokens but the first."""
    from vllm.v1.outputs import LogprobsTensors

    draw = torch.Generator().manual_seed(seed)
    logits_NV = torch.randn(PROMPT_TOKENS + options.response_tokens, vocabulary, generator=draw)
    logp_NV = (SPREAD * logits_NV).log_softmax(-1)
    ids_N = logp_NV.exp().multinomial(1, generator=draw)[:, 0]
    best, own_N1 = logp_NV[1:].topk(options.top_k), logp_NV[1:].gather(-1, ids_N[1:, None])
    lists = LogprobsTensors(
        torch.cat([ids_N[1:, None], best.indices], 1),
        torch.cat([own_N1, best.values], 1),
        (logp_NV[1:] > own_N1).sum(-1) + 1,
    )
    ids = ids_N.tolist()
    return Rollout(ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:], torch.zeros(options.response_tokens), "stop"), lists


class Server:
    """What vLLM's server does with the lists of a request that reads a prompt, and of one that samples."""

    def __init__(self, top_k: int, flat: bool):
        self.tokenizer, self._top_k, self._flat = load_tokenizer(str(resolve("tiny-reasoner"))), top_k, flat

    def _processor(self, reads: bool) -> Any:
        from vllm.logprobs import create_prompt_logprobs, create_sample_logprobs
        from vllm.v1.engine.logprobs import LogprobsProcessor

        return LogprobsProcessor(
            # Our requests have their tokens not decoded.
            tokenizer=None if self._flat else self.tokenizer,
            logprobs=None if reads else create_sample_logprobs(self._flat),
            prompt_logprobs=create_prompt_logprobs(self._flat) if reads else None,
            cumulative_logprob=None if reads else 0.0,
            num_logprobs=None if reads else self._top_k,
            num_prompt_logprobs=self._top_k if reads else None,
        )

    def read(self, lists: Any) -> Any:
        processor = self._processor(reads=True)
        processor._update_prompt_logprobs(lists)
        return processor.prompt_logprobs

    def sampled(self, steps: Sequence[Any]) -> Any:
        processor = self._processor(reads=False)
        for step in steps:
            processor._update_sample_logprobs(step)
        return processor.logprobs

    def text(self, rollouts: Sequence[Rollout], kept: Sequence[Any], reads: bool) -> bytes:
        """The answer of /v1/completions."""
        from fastapi.responses import JSONResponse
        from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice, UsageInfo
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion as Serving

        of_vllm = SimpleNamespace(return_tokens_as_token_ids=True, _get_decoded_token=Serving._get_decoded_token)
        choices = []
        for number, (rollout, lists) in enumerate(zip(rollouts, kept, strict=True)):
            said = {"prompt_logprobs": lists}
            if not reads:
                tokens = rollout.response_ids
                made = Serving._create_completion_logprobs(
                    of_vllm, tokens, lists, self._top_k, self.tokenizer, return_as_token_id=True
                )
                said = {"logprobs": made, "token_ids": tokens}
            choices.append(CompletionResponseChoice(index=number, text="", **said))
        return bytes(JSONResponse(CompletionResponse(model="m", choices=choices, usage=UsageInfo()).model_dump()).body)

    def packed(self, rollouts: Sequence[Rollout], kept: Sequence[Any], reads: bool) -> bytes:
        """The answer of our routes."""
        if not reads:
            rows = [
                outputs.log_probs(lists, one.response_ids, self._top_k)
                for one, lists in zip(rollouts, kept, strict=True)
            ]
            return lists_route.packed_scores([TokenScores(*row) for row in rows])
        tokens = PROMPT_TOKENS + len(rollouts[0].response_ids)
        vocabulary = len(self.tokenizer)
        return lists_route.packed_scores(
            [
                rescoring.scores_of(lists, one, tokens, top_k=self._top_k, vocabulary=vocabulary)
                for one, lists in zip(rollouts, kept, strict=True)
            ]
        )


def from_bytes(body: bytes, rollouts: Sequence[Rollout], top_k: int, reads: bool) -> list[Both]:
    """Where responses differ in length, samples also hold their tokens, which are 2 % of the bytes."""
    return [(each.logp, each.top_k) for each in lists_route.scores_of(body) if each.top_k is not None]


def from_text(body: bytes, rollouts: Sequence[Rollout], top_k: int, reads: bool) -> list[Both]:
    """What TRL's client makes of it, as tensors."""
    from trl.generation.vllm_client import VLLMClient, parse_logprobs

    choices = json.loads(body)["choices"]
    if not reads:
        found = []
        every_logp, every_ids = parse_logprobs([each["logprobs"] for each in choices])
        for choice, logp, ids in zip(choices, every_logp, every_ids, strict=True):
            own = [row[of.index(token)] for token, row, of in zip(choice["token_ids"], logp, ids, strict=True)]
            ids_TK = torch.tensor([row[:top_k] for row in ids], dtype=torch.int64)
            found.append((torch.tensor(own), TopK(ids_TK, torch.tensor([row[:top_k] for row in logp]))))
        return found
    found = []
    for choice, each in zip(choices, rollouts, strict=True):
        said = VLLMClient._format_sequence_logprobs(
            choice, [*each.prompt_ids, *each.response_ids], len(each.prompt_ids), top_k
        )
        ids_TK = torch.tensor(said["logprob_token_ids"], dtype=torch.int64)
        found.append((torch.tensor(said["actual_logprobs"])[:, 0], TopK(ids_TK, torch.tensor(said["logprobs"]))))
    return found


def cost(options: argparse.Namespace, reads: bool, flat: bool) -> tuple[dict[str, float], list[Both]]:
    """Seconds of both sides, and what arrived."""
    server, seconds = Server(options.top_k, flat), {"server": 0.0, "client": 0.0}

    def timed(side: str, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.process_time()
        value = call(*arguments)
        seconds[side] += time.process_time() - began
        return value

    rollouts, kept = [], []
    for number in range(options.rollouts):
        rollout, lists = drawn(options, len(server.tokenizer), options.seed + number)
        given = lists if reads else steps_of(lists)
        rollouts.append(rollout)
        kept.append(timed("server", server.read if reads else server.sampled, given))
    arrived: list[Both] = []
    size = 0
    for start in range(0, len(rollouts), IN_ONE_ANSWER):
        part = slice(start, start + IN_ONE_ANSWER)
        body = timed("server", server.packed if flat else server.text, rollouts[part], kept[part], reads)
        arrived += timed("client", from_bytes if flat else from_text, body, rollouts[part], options.top_k, reads)
        size += len(body)
    total, tokens = sum(seconds.values()), options.rollouts * options.response_tokens
    said = {f"{side}_seconds": each for side, each in seconds.items()}
    return said | {"seconds": total, "tokens_per_second": tokens / total, "answer_bytes": float(size)}, arrived


def steps_of(lists: Any) -> list[Any]:
    """The response's part of the lists, one token a step, as the engine hands it over while it samples."""
    from vllm.v1.outputs import LogprobsLists

    ids, logp, ranks = (each[PROMPT_TOKENS - 1 :].numpy() for each in lists[:3])
    return [LogprobsLists(ids[n : n + 1], logp[n : n + 1], ranks[n : n + 1], None) for n in range(len(ids))]


def check_alike(text: list[Both], as_bytes: list[Both]) -> None:
    """Both ways bring the same numbers, to the last bit."""
    for (own, lists), (our_own, our_lists) in zip(text, as_bytes, strict=True):
        listed_T = torch.isfinite(own)
        assert torch.equal(own[listed_T], our_own[listed_T]), "other log-probabilities of the tokens"
        assert torch.equal(lists.logp, our_lists.logp), "other log-probabilities of the lists"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=16_384)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    results: dict[str, Any] = {}
    for what, reads in (("scores", True), ("samples", False)):
        for flat in (False, True):
            # Imports are not to be timed.
            cost(argparse.Namespace(**vars(options) | {"rollouts": 1, "response_tokens": 8}), reads, flat)
        (text, of_text), (as_bytes, of_bytes) = cost(options, reads, False), cost(options, reads, True)
        check_alike(of_text, of_bytes)
        results[what] = {"text": text, "bytes": as_bytes, "times_as_fast": text["seconds"] / as_bytes["seconds"]}
        for way in ("text", "bytes"):
            row = results[what][way]
            print(f"{what:8}{way:6} server {row['server_seconds']:6.2f} s, client {row['client_seconds']:6.2f} s")
    config = {name: value for name, value in vars(options).items() if name != "out"}
    wall = time.perf_counter() - began
    path = records.write(options.out, "server-lists", results, config=config, seed=options.seed, wall_seconds=wall)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
