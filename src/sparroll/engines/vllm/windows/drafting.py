"""The drafts of a step: sparse one-token steps of vLLM's model, one after the other, with nothing of vLLM's scheduler in
between. Each is what vLLM runs for a batch that only decodes, full CUDA graphs included. Nothing waits for the device."""

# R requests of a step, D drafts of the longest window, W rows of the longest window that the engine may have, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context

from sparroll.engines.vllm.attention.state import STATE
from sparroll.engines.vllm.windows.draws import Tempers


def draft(
    runner: Any,
    drafts_R: np.ndarray,
    tokens_R: np.ndarray,
    uniforms_RD: Tensor,
    tempers: Tempers,
    logits_RWV: Tensor,
    to_device: Callable[[np.ndarray], Tensor],
) -> Tensor:
    """[R, D] drafted ids, int64; their logits are left in `logits_RWV`.

    drafts_R: how many each request of the runner's batch drafts; 0 takes no part.  tokens_R: how many tokens it has, all
    but the last one in the cache.
    """
    requests, longest = len(drafts_R), int(drafts_R.max())
    batch, everyone = runner.input_batch, np.arange(requests)
    ids_RD = torch.zeros(requests, longest, dtype=torch.int64, device=logits_RWV.device)
    everyone_R = to_device(everyone)
    last_R = to_device(batch.token_ids_cpu[everyone, tokens_R - 1].astype(np.int64))
    start_R, count_R = to_device((tokens_R - 1).astype(np.int64)), to_device(drafts_R.astype(np.int64))
    steps = _Steps(runner, requests)
    for place in range(longest):
        active = drafts_R > place
        steps.lengths_of(np.where(active, tokens_R + place, 0))
        idle_R = None if active.all() else count_R <= place
        hidden = steps.run(last_R, start_R + place, idle_R)
        # Drawn from what is kept, so that the rule sees the very distribution, also where a head computes more exactly.
        logits_RV = runner.model.compute_logits(hidden[:requests]).to(logits_RWV.dtype)
        logits_RWV[:requests, place] = logits_RV
        last_R = ids_RD[:, place] = tempers.draw_of_logits(logits_RV, uniforms_RD[:, place], everyone, everyone_R)
    return ids_RD


class _Steps:
    """Runs the model on one token of each request of the runner's batch, in vLLM's own buffers, which its graphs read."""

    def __init__(self, runner: Any, requests: int):
        self.runner, self.requests = runner, requests
        runner.input_batch.block_table.commit_block_table(requests)
        ones = np.ones(requests, dtype=np.int32)
        self.mode, self.batch, *_ = runner._determine_batch_execution_and_padding(
            num_tokens=requests,
            num_reqs=requests,
            num_scheduled_tokens_np=ones,
            max_num_scheduled_tokens=1,
            use_cascade_attn=False,
        )
        self.tokens = int(self.batch.num_tokens)
        self.whole = self.mode == CUDAGraphMode.FULL
        self.rows = int(self.batch.num_reqs or requests) if self.whole else requests
        starts = runner.query_start_loc
        starts.np[: requests + 1] = np.arange(requests + 1)
        starts.np[requests + 1 :] = requests
        if starts.gpu.is_cuda:
            # Not copied from the host's buffer, which vLLM writes again while this step may still wait for the copy.
            torch.arange(requests + 1, out=starts.gpu[: requests + 1])
            starts.gpu[requests + 1 :] = requests
        runner.seq_lens[requests:] = 0
        runner.positions[requests : self.tokens] = 0
        runner.input_ids.gpu[requests : self.tokens] = 0

    def lengths_of(self, contexts_R: np.ndarray) -> None:
        """Context lengths of the next step, as the host knows them; 0 for a request that takes no part."""
        lengths = self.runner.optimistic_seq_lens_cpu
        lengths[: self.requests] = torch.from_numpy(contexts_R)
        lengths[self.requests :] = 0

    def run(self, ids_R: Tensor, position_R: Tensor, idle_R: Tensor | None) -> Tensor:
        """Hidden states of the next step. A request that takes no part reads one token and writes nothing."""
        runner, requests = self.runner, self.requests
        ids, positions, lengths = runner.input_ids.gpu, runner.positions, runner.seq_lens
        ids[:requests] = ids_R
        positions[:requests] = position_R
        lengths[:requests] = position_R + 1
        if idle_R is not None:
            positions[:requests].masked_fill_(idle_R, 0)
            lengths[:requests].masked_fill_(idle_R, 1)
        tables = runner.input_batch.block_table
        tables.compute_slot_mapping(requests, runner.query_start_loc.gpu[: requests + 1], positions[:requests])
        by_group, by_layer = runner._get_slot_mappings(
            num_tokens_padded=self.tokens, num_reqs_padded=self.rows, num_tokens_unpadded=requests
        )
        if idle_R is not None:
            for slots in by_group.values():
                slots[:requests].masked_fill_(idle_R, -1)
        STATE.drafting = True
        try:
            metadata, _ = runner._build_attention_metadata(
                num_tokens=requests,
                num_tokens_padded=self.tokens if self.whole else None,
                num_reqs=requests,
                num_reqs_padded=self.rows if self.whole else None,
                max_query_len=1,
                slot_mappings=by_group,
            )
        finally:
            STATE.drafting = False
        with set_forward_context(
            metadata,
            runner.vllm_config,
            num_tokens=self.tokens,
            cudagraph_runtime_mode=self.mode,
            batch_descriptor=self.batch,
            slot_mapping=by_layer,
        ):
            return runner._model_forward(input_ids=ids[: self.tokens], positions=positions[: self.tokens])
