"""The sparse training forward against the engine whose steps it repeats, and its gradient against the oracle's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from equivalence.models import prompts, tiny_model
from equivalence.oracle import sparse_logp
from equivalence.test_hf_engine import ODD_LENGTHS, RISING, SMALL_PAGES
from paged_caches import DEVICE
from sparroll.attention.decode import api
from sparroll.attention.masked import unit_bitmap, unit_choice
from sparroll.attention.selectors import HeadSoftmax, OraclePage, QuantizedMean, Quest, Selector
from sparroll.engines import HFEngine
from sparroll.engines.hf import attention as hf_attention
from sparroll.engines.hf.attention import ReplayStep
from sparroll.engines.scoring import Scorer, response_logp
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.types import Rollout, TokenBatch

SELECTORS: list[Selector] = [
    SMALL_PAGES,
    Quest(page_tokens=4, first_tokens=4, recent_tokens=8),
    HeadSoftmax(page_tokens=4, first_tokens=0, recent_tokens=4),
    OraclePage(page_tokens=4, first_tokens=4, recent_tokens=8),
    QuantizedMean(page_tokens=4, first_tokens=4, recent_tokens=8),
]


def rollouts_of(model: PreTrainedModel, schedule: Schedule = RISING, tokens: int = 45) -> list[Rollout]:
    """Of different prompt and response lengths."""
    engine = HFEngine(model, schedule=schedule, max_batch=4)
    return engine.generate(prompts(ODD_LENGTHS), n=2, max_new_tokens=tokens, seed=3, temperature=0.7, stop_ids=[7, 8])


def batch_of(rollouts: list[Rollout]) -> TokenBatch:
    return TokenBatch.from_rollouts(rollouts, 0)


def gradients(model: PreTrainedModel, logp: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Of a sum that gives every token a weight of its own."""
    model.zero_grad(set_to_none=True)
    logp_N = logp().flatten()
    (logp_N * torch.linspace(-1, 1, len(logp_N), device=logp_N.device)).sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = float((found[name] - gradient).abs().max())
        assert error <= relative * max(float(gradient.abs().max()), 1e-3), f"{name}: {error:.2e}"


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: selector.kind)
def test_log_probs_equal_the_engine_for_every_selector(selector: Selector) -> None:
    model = tiny_model()
    schedule = Schedule(steps=RISING.steps, selector=selector, dense_layers=(1,))
    rollouts = rollouts_of(model, schedule)
    assert len({len(each.response_ids) for each in rollouts}) > 3
    logp_BT = response_logp(model, batch_of(rollouts), 0.7, schedule, 17)
    assert logp_BT.requires_grad
    for row, rollout in enumerate(rollouts):
        ours = logp_BT[row, : len(rollout.response_ids)].detach()
        torch.testing.assert_close(ours, rollout.sparse_logp, atol=1e-5, rtol=0)


@pytest.mark.parametrize("longest", [1, 31, 32, 63, 97])
def test_log_probs_equal_the_engine_at_odd_lengths(longest: int) -> None:
    model = tiny_model("llama")
    for rollout in HFEngine(model, schedule=RISING).generate(prompts([3, 29]), max_new_tokens=longest, seed=1):
        logp_BT = response_logp(model, batch_of([rollout]), 1.0, schedule=RISING)
        torch.testing.assert_close(logp_BT[0].detach(), rollout.sparse_logp, atol=1e-5, rtol=0)


def test_gradient_equals_autograd_through_the_oracle() -> None:
    model = tiny_model()
    rollouts = rollouts_of(model)[::3]

    def oracle() -> Tensor:
        batch = batch_of(rollouts)
        logp_BT = torch.zeros(batch.sparse_logp_BT.shape)
        for row, rollout in enumerate(rollouts):
            logp = (
                sparse_logp(
                    model,
                    rollout.prompt_ids + rollout.response_ids,
                    len(rollout.prompt_ids),
                    RISING.kv_budget_tokens,
                    page=4,
                    first_pages=1,
                    recent_pages=2,
                    dense_layers=RISING.dense_layers,
                    gradient=True,
                )
                / 1.0
            )
            logp_BT = logp_BT.index_put((torch.tensor(row), torch.arange(len(logp))), logp)
        return logp_BT

    found = gradients(model, lambda: response_logp(model, batch_of(rollouts), 1.0, schedule=RISING))
    dense = gradients(model, lambda: response_logp(model, batch_of(rollouts), 1.0))
    expected = gradients(model, oracle)
    assert_same(found, expected, 1e-4)
    with pytest.raises(AssertionError):
        assert_same(dense, expected, 1e-2)


def test_gradient_of_a_layer_equals_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(2, heads, 23, 2, dtype=torch.float64, generator=generator).requires_grad_() for heads in (4, 2, 2)
    ]

    def attended(*each: Tensor) -> Tensor:
        step = ReplayStep(RISING, torch.tensor([3, 20]))
        mixed = step.attend(0, *each, 0.5)
        assert step.ran == {0: "sparse"}
        return mixed

    assert torch.autograd.gradcheck(attended, leaves)


def test_triton_gives_the_log_probs_and_the_gradient_of_the_reference() -> None:
    model = tiny_model()
    batch = TokenBatch.from_rollouts(rollouts_of(model)[::3], 0, DEVICE)
    model.to(DEVICE)
    logp: list[Tensor] = []

    def scored(impl: str) -> Tensor:
        logp.append(response_logp(model, batch, 1.0, schedule=RISING, impl=impl))
        return logp[-1]

    found, expected = (gradients(model, lambda impl=impl: scored(impl)) for impl in ("triton", "reference"))
    assert_same(found, expected, 1e-4)
    torch.testing.assert_close(*logp, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("selector", "chose"), [(SELECTORS[0], "triton"), (SELECTORS[1], "reference")])
def test_a_step_says_what_chose_its_units(selector: Selector, chose: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(1, heads, 30, 4, generator=generator).to(DEVICE) for heads in (2, 1))
    schedule = Schedule(steps=RISING.steps, selector=selector, dense_layers=())
    steps = [ReplayStep(schedule, torch.tensor([3], device=DEVICE), impl) for impl in ("triton", "reference")]
    mixed = [step.attend(0, query, keys, keys, 0.5) for step in steps]
    assert [step.chose for step in steps] == [{0: chose}, {0: "reference"}]
    torch.testing.assert_close(*mixed, atol=1e-5, rtol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant: bool) -> None:
    model = tiny_model()
    batch = batch_of(rollouts_of(model)[::3])
    plain = gradients(model, lambda: response_logp(model, batch, 1.0, schedule=RISING))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    model.train()
    functions = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    found = gradients(model, lambda: response_logp(model, batch, 1.0, schedule=RISING))
    assert_same(found, plain, 1e-6)
    assert model.training and model.config._attn_implementation != hf_attention.IMPLEMENTATION
    assert functions == [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    dense = gradients(model, lambda: response_logp(model, batch, 1.0))
    with pytest.raises(AssertionError):
        assert_same(dense, plain, 1e-2)


def test_a_recomputed_layer_reads_the_units_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: object) -> Tensor:
        calls.append(1)
        return unit_choice.chosen_words(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(hf_attention, "chosen_words", counted)
    model = tiny_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = batch_of(rollouts_of(model)[:3])
    calls.clear()
    response_logp(model.train(), batch, 1.0, schedule=RISING).sum().backward()
    assert len(calls) == 2, "two sparse layers, each chosen once"


def test_under_autocast_the_selection_is_that_of_a_bf16_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    batch = batch_of(rollouts_of(model)[:3])
    seen: list[tuple[torch.dtype, Tensor]] = []

    def recorded(*args: Tensor) -> Tensor:
        plain = unit_choice.chosen_words(*args)  # type: ignore[arg-type]
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(plain, unit_choice.chosen_words(*args))  # type: ignore[arg-type]
        seen.append((args[1].dtype, plain))
        return plain

    monkeypatch.setattr(hf_attention, "chosen_words", recorded)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp = response_logp(model, batch, 1.0, schedule=RISING)
    logp.sum().backward()
    assert {dtype for dtype, _ in seen} == {torch.bfloat16} and len(seen) == 2
    assert all(bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None)


def test_units_are_those_that_select_names_at_every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(unit_choice._SCORED_AT_ONCE, "cpu", 1)
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(2, heads, 77, 8, generator=generator) for heads in (4, 2))
    context = torch.arange(1, 78)
    budgets = RISING.kv_budget_tokens(context)
    dense = (context <= torch.tensor([[9], [50]])) | (budgets >= context)
    words = unit_choice.chosen_words(query, keys, dense, budgets, SMALL_PAGES, 1.0)
    read = unit_bitmap.unpack(words, 0, 77)
    index = SMALL_PAGES.build_index(torch.nn.functional.pad(keys, (0, 0, 0, 3)).unflatten(2, (20, 4)))
    for row in range(2):
        for position in range(77):
            mine = query[row : row + 1, :, position].unflatten(1, (2, 2))[:, None]
            at = torch.tensor([[position + 1]])
            budget = at + 16 if dense[row, position] else budgets[position][None, None]
            (ids,) = api.select(mine, index[row : row + 1], at, budget, SMALL_PAGES, 1.0)[:, 0]
            for head in range(2):
                expected = set(ids[head].tolist()) - {-1}
                assert set(read[row, head, position].nonzero().flatten().tolist()) == expected, (row, position)


def test_dropout_in_attention_is_refused() -> None:
    model = tiny_model(attention_dropout=0.1)
    batch = batch_of(rollouts_of(model)[:1])
    with pytest.raises(UserError, match="attention dropout of 0.1"):
        response_logp(model.train(), batch, 1.0, schedule=RISING)


def test_an_implementation_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model()
    batch = batch_of(rollouts_of(model)[:1])
    with pytest.raises(UserError, match="needs CUDA tensors"):
        response_logp(model, batch, 1.0, schedule=RISING, impl="triton")
    assert Scorer(model).impl == "reference"
    assert model.config._attn_implementation != hf_attention.IMPLEMENTATION


def test_rollouts_within_their_budget_have_the_dense_gradient() -> None:
    model = tiny_model()
    schedule = Schedule.fixed(1024, SMALL_PAGES)
    batch = batch_of(rollouts_of(model, schedule)[:3])
    found = gradients(model, lambda: response_logp(model, batch, 1.0, schedule=schedule))
    assert_same(found, gradients(copy.copy(model), lambda: response_logp(model, batch, 1.0)), 1e-6)
