"""Attention that begins while lists are still made: it reads what it would read after them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged_caches import (
    DEVICE,
    ODD_CONTEXTS,
    SHORT_CONTEXTS,
    PagedCache,
    assert_attends,
    budgets_of,
    paged_cache,
    units_wanted,
)
from sparroll.attention.decode import paged
from sparroll.attention.decode.new_tokens import NewTokens
from sparroll.attention.decode.workspace import StepWorkspace
from sparroll.attention.selectors import PageMean, QuantizedMean
from sparroll.attention.selectors.remainder import Remainder
from sparroll.errors import UserError

pytest.importorskip("triton", reason="triton runs on Linux only")


class Step:
    """Choice and attention of a layer, in a workspace full of rubbish with a plan."""

    def __init__(self, cache: PagedCache, programs: int | None = None, budgets_R: Tensor | None = None) -> None:
        self.cache, self.budgets_R = cache, budgets_of(cache) if budgets_R is None else budgets_R
        self.workspace = cache.workspace(programs)
        lists = (*cache.query_RHGD.shape[:2], units_wanted(cache, self.budgets_R) + 3)
        self.ids, self.pages = (torch.full(lists, 1 << 20, dtype=torch.int32, device=DEVICE) for _ in range(2))
        self.out = torch.full_like(cache.query_RHGD, torch.nan)
        paged.plan_step(cache.context_tokens_R, self.budgets_R, cache.selector, lists[2], self.workspace)

    def choose(self, scores: Tensor, workspace: StepWorkspace | None, planned: bool = True) -> None:
        cache = self.cache
        paged.choose_units(
            scores, cache.context_tokens_R, self.budgets_R, cache.selector, self.ids, "triton", pages_RHN=self.pages,
            block_table_RM=cache.block_table_RM, units_per_block=cache.index_PSHW.shape[1], fill_rest=False,
            planned=planned, workspace=workspace,
        )  # fmt: skip

    def attend(self, announced: bool, planned: bool = True, out: Tensor | None = None) -> None:
        cache = self.cache
        paged.paged_decode(
            cache.query_RHGD, cache.keys_PBHD, cache.values_PBHD, cache.block_table_RM, self.ids, cache.context_tokens_R,
            self.budgets_R, cache.selector, cache.scale, self.out if out is None else out, self.workspace, "triton",
            pages_RHN=self.pages, planned=planned, announced=announced,
        )  # fmt: skip

    @property
    def reads_R(self) -> Tensor:
        return torch.minimum(self.budgets_R, self.cache.context_tokens_R) > 0


@pytest.mark.parametrize("programs", [None, 2, 7, 40, 600])
@pytest.mark.parametrize(("contexts", "unit"), [(ODD_CONTEXTS, 16), (SHORT_CONTEXTS, 4)], ids=["odd", "short"])
def test_lists_are_announced_once_complete_and_taken_back_once_read(
    contexts: list[int], unit: int, programs: int | None
) -> None:
    cache = paged_cache(contexts, unit).index_written()
    scores = cache.scores("triton")
    step, after = Step(cache, programs), Step(cache, programs)
    after.choose(scores, None), after.attend(announced=False)
    assert not after.workspace.listed_RH.any()
    for _ in range(2):
        step.out.fill_(torch.nan), step.ids.fill_(1 << 20), step.pages.fill_(1 << 20)
        step.choose(scores, step.workspace)
        assert torch.equal(step.workspace.listed_RH != 0, step.reads_R[:, None].expand(-1, cache.query_RHGD.shape[1]))
        step.attend(announced=True)
        assert torch.equal(step.out, after.out)
        assert not step.workspace.listed_RH.any()


def test_what_was_announced_is_taken_back_by_attention_that_was_not_told() -> None:
    cache = paged_cache([100, 0, 17], 4).index_written()
    step = Step(cache, 2)
    step.choose(cache.scores("triton"), step.workspace)
    step.attend(announced=False)
    assert not step.workspace.listed_RH.any()


def test_a_remainder_waits_for_the_whole_choice_and_takes_back_what_was_announced() -> None:
    selector = PageMean(16, 16, 32, remainder=Remainder(16, "fp8"))
    cache = paged_cache([100, 0, 257], 16, selector=selector).index_written()
    groups = torch.zeros(*cache.index_PSHW.shape[:3], selector.group_width(32), dtype=torch.uint8, device=DEVICE)
    paged.update_groups(cache.keys_PBHD, cache.values_PBHD, groups, cache.slots(), selector)
    step, scores = Step(cache, 2), cache.scores("triton")
    outs = []
    for announced in (False, True):
        step.out.fill_(torch.nan)
        step.choose(scores, step.workspace if announced else None)
        paged.paged_decode(
            cache.query_RHGD, cache.keys_PBHD, cache.values_PBHD, cache.block_table_RM, step.ids, cache.context_tokens_R,
            step.budgets_R, selector, cache.scale, step.out, step.workspace, "triton", pages_RHN=step.pages, planned=True,
            index_PSHW=cache.index_PSHW, groups_PSHV=groups, announced=announced,
        )  # fmt: skip
        outs.append(step.out.clone())
        assert not step.workspace.listed_RH.any()
    assert torch.equal(*outs) and not outs[0].isnan().any()


def test_lists_that_nobody_announces_are_read_once_the_choice_ends() -> None:
    cache = paged_cache([100, 0, 17], 4).index_written()
    step = Step(cache, 2)
    step.choose(cache.scores("triton"), None)
    step.attend(announced=True)
    ids, _ = cache.chosen(cache.scores("reference"), step.budgets_R, step.ids.shape[2], "reference")
    assert_attends(cache, ids, step.out)


def test_programs_that_all_run_at_a_time_begin_together_after_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads for a single (request, head) of at least 32, and most of those that run have one."""
    from sparroll.attention.decode import triton_attend

    cache = paged_cache([100, 0] * 8 + [17], 4).index_written()
    heads = cache.query_RHGD.shape[1]
    assert heads == 2
    together = {
        requests: [running for running in range(1, 90) if not cache.workspace(running).begins_early(requests)]
        for requests in (15, 16, 17)
    }
    # 30 are few. 17 requests take the kernel of 32 requests, so they begin as these do.
    assert together == {15: [], 16: [*range(32, 38), *range(64, 76)], 17: [*range(68, 76)]}

    overlapped: list[Tensor] = []
    monkeypatch.setattr(triton_attend, "overlapping", lambda query: overlapped.append(query) or {})
    for running, early in ((70, False), (34, True)):
        step = Step(cache, running)
        step.choose(cache.scores("triton"), step.workspace)
        assert bool(step.workspace.listed_RH.any()) == early, "lists are announced that nobody waits for, or are not"
        step.attend(announced=True)
        assert bool(overlapped) == early
        ids, _ = cache.chosen(cache.scores("reference"), step.budgets_R, step.ids.shape[2], "reference")
        assert_attends(cache, ids, step.out)


def test_announced_lists_need_a_plan_that_is_older_and_a_workspace_for_the_same_heads() -> None:
    cache = paged_cache([100, 17], 4).index_written()
    scores = cache.scores("triton")
    step = Step(cache, 2)
    step.choose(scores, step.workspace)
    with pytest.raises(UserError, match="lists that are announced need a plan"):
        step.attend(announced=True, planned=False)
    with pytest.raises(UserError, match="a choice that is announced needs a plan"):
        step.choose(scores, step.workspace, planned=False)
    with pytest.raises(UserError, match="the workspace is for 3 kv heads, got scores of 2"):
        step.choose(scores, paged_cache([100, 17], 4, heads=3).workspace())
    with pytest.raises(UserError, match="the workspace is for 1 requests"):
        step.choose(scores, paged_cache([100], 4).workspace())


def in_shared_blocks(contexts_R: Tensor, table_RM: Tensor, blocks: int) -> PagedCache:
    """In blocks of 64 tokens, with an empty index of 4 x 2. Requests may share blocks: that saves memory, and makes no
    difference to the kernels."""
    selector, requests = QuantizedMean(4, 16, 32, 2), len(contexts_R)
    keys, values = torch.randn(blocks, 64, 8, 256, dtype=torch.bfloat16, device=DEVICE).split(128, dim=-1)
    query = torch.randn(requests, 8, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    shape = blocks, 8, 64 // 4, selector.index_width(128)
    index = torch.zeros(shape, dtype=selector.index_dtype, device=DEVICE).transpose(1, 2)
    return PagedCache(selector, contexts_R.tolist(), query, keys, values, index, table_RM, contexts_R, keys, values)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [9, 32, 67, 89])
def test_attention_that_overlaps_reads_no_list_of_before(requests: int) -> None:
    """Scores of two kinds by turns, with more lists than programs that make them at a time: a list that was read too early
    would be the other one."""
    torch.manual_seed(0)
    contexts_R = torch.randint(9_000, 40_000, (requests,), dtype=torch.int32, device=DEVICE)
    table = torch.randint(0, 4096, (requests, 640), dtype=torch.int32, device=DEVICE)
    cache = in_shared_blocks(contexts_R, table, 4096)
    step = Step(cache, None, torch.randint(400, 900, (requests,), dtype=torch.int32, device=DEVICE))
    kinds = [torch.rand(requests, 8, 10_240, device=DEVICE) for _ in range(2)]
    expected = []
    for scores in kinds:
        step.choose(scores, None), step.attend(announced=False)
        expected.append(step.out.clone())

    def layers() -> None:
        for scores, out in zip(kinds, outs, strict=True):
            step.choose(scores, step.workspace), step.attend(announced=True, out=out)

    # With nothing between two layers, each kernel may be set up while the one before it runs.
    kinds, expected = 3 * kinds, 3 * expected
    outs = [torch.full_like(step.out, torch.nan) for _ in kinds]
    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for _ in range(50):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for out, right in zip(outs, expected, strict=True):
            assert torch.equal(out, right)
        assert not step.workspace.listed_RH.any()


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [9, 32, 89])
def test_attention_that_overlaps_reads_what_the_scores_kernel_of_its_layer_stored(requests: int) -> None:
    """Layers in one graph, nothing between them. The newest keys and values are NaN before each replay."""
    torch.manual_seed(0)
    block = 64
    contexts_R = torch.randint(9_000, 20_000, (requests,), dtype=torch.int32, device=DEVICE)
    columns = 20_000 // block + 1
    # Only the last block of a request is its own.
    table = torch.randint(0, 2048, (requests, columns), dtype=torch.int32, device=DEVICE)
    last_R = contexts_R.long() - 1
    rows_R = torch.arange(requests, device=DEVICE)
    table[rows_R, last_R // block] = 2048 + rows_R.int()
    slots_R = (2048 + rows_R) * block + last_R % block
    budgets_R = torch.randint(400, 900, (requests,), dtype=torch.int32, device=DEVICE)
    steps, news, scores = [], [], []
    for _ in range(6):
        cache = in_shared_blocks(contexts_R, table, 2048 + requests)
        for slots in torch.arange((2048 + requests) * block, device=DEVICE).split(1 << 14):
            paged.update_index(cache.keys_PBHD, cache.index_PSHW, slots, cache.selector, "triton")
        steps.append(Step(cache, None, budgets_R))
        news.append(NewTokens.held_at(slots_R, cache.keys_PBHD, cache.values_PBHD))
        scores.append(torch.full((requests, 8, 10_240), torch.nan, device=DEVICE))
    # Layers share a plan and its flags.
    workspace = steps[0].workspace

    def layers(stores: bool) -> None:
        for step, new, its_scores, out in zip(steps, news, scores, outs, strict=True):
            cache = step.cache
            paged.score_units(
                cache.query_RHGD, cache.index_PSHW, table, contexts_R, cache.selector, its_scores, "triton",
                kv_budget_tokens_R=budgets_R, workspace=workspace, planned=True, new_tokens=new if stores else None,
            )  # fmt: skip
            step.workspace = workspace
            step.choose(its_scores, workspace), step.attend(announced=True, out=out)

    outs = [torch.full_like(step.out, torch.nan) for step in steps]
    layers(stores=False)
    expected = [out.clone() for out in outs]
    layers(stores=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(stores=True)
    for _ in range(20):
        for new in news:
            new.keys_PBHD[new.places] = new.values_PBHD[new.places] = torch.nan
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for out, right in zip(outs, expected, strict=True):
            assert torch.equal(out, right)
        assert not workspace.listed_RH.any()


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [9, 32])
def test_a_kernel_that_overlaps_waits_for_what_was_written_beside_attention(requests: int) -> None:
    """As in an engine's last layer: index rows are written on a stream of their own, and the next kernel, which reads them,
    may be set up while attention still runs."""
    from sparroll.engines.vllm.attention.cuda_workspace import Beside

    torch.manual_seed(0)
    contexts_R = torch.randint(9_000, 20_000, (requests,), dtype=torch.int32, device=DEVICE)
    table = torch.randint(0, 2048, (requests, 20_000 // 64 + 1), dtype=torch.int32, device=DEVICE)
    cache = in_shared_blocks(contexts_R, table, 2048)
    step = Step(cache, None, torch.randint(400, 900, (requests,), dtype=torch.int32, device=DEVICE))
    slots = torch.arange(2048 * 64, device=DEVICE)
    scores, after = (torch.full((requests, 8, 10_240), torch.nan, device=DEVICE) for _ in range(2))
    beside = Beside(torch.device(DEVICE))

    def score(into: Tensor) -> None:
        paged.score_units(
            cache.query_RHGD, cache.index_PSHW, table, contexts_R, cache.selector, into, "triton",
            kv_budget_tokens_R=step.budgets_R, workspace=step.workspace, planned=True,
        )  # fmt: skip

    def layers() -> None:
        score(scores)
        with beside.what_follows():
            paged.update_index(cache.keys_PBHD, cache.index_PSHW, slots, cache.selector, "triton", beside=True)
        step.choose(scores, step.workspace), step.attend(announced=True)
        beside.join()
        score(after)

    layers()
    right = after.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for _ in range(20):
        cache.index_PSHW.zero_(), after.fill_(torch.nan)
        graph.replay()
        assert torch.equal(after.nan_to_num(7.0), right.nan_to_num(7.0))
        assert not step.out.isnan().any()
    assert not torch.equal(scores.nan_to_num(7.0), right.nan_to_num(7.0)), "the first scores are of an empty index"
