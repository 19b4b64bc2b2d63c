"""What HFEngine refuses, and what it says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sparroll.compression import make_compression
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer
from sparroll.errors import UserError
from sparroll.schedule import Schedule

SIZES = dict(
    vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 32,
    }, "original_max_position_embeddings": 32,
}  # fmt: skip
"""Contexts of 33 to 64 tokens have other factors than shorter ones."""


def build(architecture: str = "qwen3", **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **{**SIZES, **changes}))


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("mistral", {"sliding_window": 32}, "sliding-window attention of 32 tokens"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding_attention"),
        ("gemma2", {}, "sliding_attention"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "sliding_attention"),
        ("granite", {"logits_scaling": 2.0}, "more than its output head"),
        ("phi3", {**LONG_ROPE, "sliding_window": None}, r"rope_type longrope\) by its longest context.* = 32 keeps"),
        ("llama", LONG_ROPE, r"rope_type longrope\) by its longest context"),
        (
            "deepseek_v3",
            {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
             "n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
             "num_key_value_heads": 2},
            "multi-head latent attention",
        ),
    ],
)  # fmt: skip
def test_unsupported_attention_is_refused_with_the_reason(architecture: str, changes: dict, reason: str) -> None:
    with pytest.raises(UserError, match="is not supported: .*" + reason):
        HFEngine(build(architecture, **changes))


def test_a_context_that_no_batch_scales_may_have_long_rope() -> None:
    engine = HFEngine(build("llama", **LONG_ROPE, max_position_embeddings=32))
    assert engine.context_limit == 32 and engine.generate([[1, 2, 3]], max_new_tokens=2)[0].response_ids


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "there are no prompts"),
        ([[]], {}, "prompt 0 is empty"),
        ([[1], [50]], {}, "prompt 1 has token ids outside 0..49"),
        ([[1] * 64], {}, "prompt 0 has 64 tokens, the model's context holds 64"),
        ([[1] * 60], {}, "set max_new_tokens to at most 4"),
        (["text"], {}, "string prompts need a tokenizer"),
        ("text", {}, "prompts must be a list"),
        ([[1]], {"n": 0}, "n=0"),
        ([[1]], {"temperature": -1.0}, "the temperature must be 0 or from 0.001 up, and finite, got -1.0"),
        ([[1]], {"stop_ids": [2, -1]}, "stop_ids must be from 0 to 49, the model's last token id, got -1"),
        ([[1]], {"stop_ids": [50]}, "stop_ids must be from 0 to 49, the model's last token id, got 50"),
        ([[1]], {"seed": [1, 2]}, "a list of seeds needs one per request, 1 in all, got 2"),
        ([[1]], {"seed": torch.tensor(3)}, "seed must be a whole number or a list of them"),
        (None, {}, "prompts must be a list, got NoneType"),
        ((ids for ids in [[1]]), {}, "prompts must be a list, got generator"),
    ],
)
def test_bad_requests_are_refused(prompts: list, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        HFEngine(build()).generate(prompts, **{"max_new_tokens": 8, **settings})


def test_weights_that_are_no_tensors_of_the_model_are_refused() -> None:
    engine = HFEngine(build(tie_word_embeddings=True))
    state = engine.model.state_dict()
    for weights, message in (
        ([1], "a model or a table of tensors, got list"),
        ({"a": 1}, "a must be a tensor, got int"),
        ({name: tensor * torch.nan for name, tensor in state.items()}, "lm_head.weight holds NaN"),
    ):
        with pytest.raises(UserError, match=message):
            engine.load_weights(weights, 1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="dtype must be one of torch's, got 'bf16'"):
        HFEngine("tiny-reasoner", dtype="bf16")  # type: ignore[arg-type]


def test_nan_logits_are_an_error_not_a_token() -> None:
    model = build()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="NaN logits"):
        HFEngine(model).generate([[1, 2]], max_new_tokens=4)
    rollouts = HFEngine(build()).generate([[1, 2]], max_new_tokens=4)
    with pytest.raises(UserError, match="NaN logits"):
        Scorer(model).dense(rollouts)


def test_a_schedule_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="names layer 5"):
        HFEngine(build(), schedule=Schedule.fixed(64, dense_layers=(0, 5)))
    engine = HFEngine(build())
    with pytest.raises(UserError, match="unknown schedule preset"):
        engine.set_schedule("no-such-preset")
    assert engine.schedule is None


def test_a_schedule_and_a_compression_exclude_each_other_and_a_refusal_changes_nothing() -> None:
    schedule, policy = Schedule.fixed(64, dense_layers=(0,)), make_compression("r_kv")
    with pytest.raises(UserError, match=r"(?s)schedule \(fixed-64\) and a compression \(r_kv-512\) exclude each other"):
        HFEngine(build(), schedule=schedule, compression=policy)
    engine = HFEngine(build(), compression="r_kv")
    with pytest.raises(UserError, match="exclude each other"):
        engine.set_schedule(schedule)
    assert (engine.schedule, engine.compression) == (None, policy)
    engine.set_schedule(None)
    assert engine.compression == policy
    engine.set_compression(None)
    engine.set_schedule(schedule)
    with pytest.raises(UserError, match="exclude each other"):
        engine.set_compression(policy)
    assert (engine.schedule, engine.compression) == (schedule, None)
    assert (engine.report().schedule_name, engine.report().compression_name) == (schedule.name, None)
    with pytest.raises(UserError, match="unknown compression 'h2o'"):
        engine.set_compression("h2o")
    with pytest.raises(UserError, match="a compression is the kind of one or a Compression, got <class"):
        engine.set_compression(type(policy))  # type: ignore[arg-type]


def test_weights_must_fit_and_their_version_must_rise() -> None:
    engine, other = HFEngine(build()), build(tie_word_embeddings=False)
    nn.init.normal_(other.lm_head.weight, std=3.0)
    engine.load_weights(other, version=1)
    (rollout,) = engine.generate([[1, 2]], max_new_tokens=3)
    assert rollout.weight_version == engine.report().weight_version == 1
    expected = HFEngine(other).generate([[1, 2]], max_new_tokens=3)[0]
    assert rollout.response_ids == expected.response_ids
    with pytest.raises(UserError, match="must rise above 1, got 1"):
        engine.load_weights(other, version=1)
    with pytest.raises(UserError, match="do not fit"):
        engine.load_weights(build(hidden_size=64), version=2)
    for odd in (math.nan, "5", 2.5):
        with pytest.raises(UserError, match="must rise above 1"):
            engine.load_weights(other, version=odd)  # type: ignore[arg-type]
    assert engine.weight_version == 1


def test_weights_that_are_refused_change_nothing_and_a_tied_head_may_be_left_out() -> None:
    model = build(tie_word_embeddings=True)
    engine, before = HFEngine(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    doubled = {name: 2 * tensor for name, tensor in before.items()}
    for wrong, reason in (
        (doubled | {"model.norm.weight": torch.zeros(3, 3)}, "model.norm.weight must have shape"),
        ({name: tensor for name, tensor in doubled.items() if name != "model.norm.weight"}, "1 tensors are missing"),
        (doubled | {"lm_head.weight": torch.zeros_like(doubled["lm_head.weight"])}, "lm_head.weight differs"),
    ):
        with pytest.raises(UserError, match=reason):
            engine.load_weights(wrong, version=1)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    engine.load_weights({name: tensor for name, tensor in doubled.items() if name != "lm_head.weight"}, version=1)
    assert all(torch.equal(tensor, doubled[name]) for name, tensor in model.state_dict().items())


def test_the_model_is_left_as_it_was() -> None:
    model = build().train()
    before = model.config._attn_implementation
    HFEngine(model, schedule=Schedule.fixed(64, dense_layers=(0,))).generate([[1, 2]], max_new_tokens=3)
    assert model.training and model.config._attn_implementation == before


def test_scoring_nothing_is_an_error() -> None:
    with pytest.raises(UserError, match="no rollouts"):
        Scorer(build()).dense([])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "the temperature must be 0 or from 0.001 up, and finite, got -1.0"),
        ({"temperature": math.nan}, "the temperature must be 0 or from 0.001 up, and finite, got nan"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_p": math.nan}, "top_p must be above 0 and at most 1, got nan"),
        ({"top_k": -1}, "top_k must not be negative, got -1"),
        ({"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        ({"at_ids": [torch.tensor([[0, -1], [1, 2]])]}, r"rollout 0 has token ids outside 0\.\.49: they are -1 to 2"),
        ({"at_ids": [torch.tensor([[0, 1], [1, 50]])]}, r"rollout 0 has token ids outside 0\.\.49: they are 0 to 50"),
        ({"at_ids": [torch.full((2, 2), math.nan)]}, "at_ids must hold whole numbers, got torch.float32"),
    ],
)
def test_scores_of_what_no_policy_can_be_are_refused(settings: dict, message: str) -> None:
    rollouts = HFEngine(build()).generate([[1, 2]], max_new_tokens=2, seed=1)
    scorer = Scorer(build())
    with pytest.raises(UserError, match=message):
        scorer.dense(rollouts, **settings)
    if "temperature" in settings:
        with pytest.raises(UserError, match=message):
            scorer.exact_replay(rollouts, Schedule.fixed(64, dense_layers=(0,)), **settings)
        with pytest.raises(UserError, match=message):
            scorer.exact_acceptance(rollouts, **settings)
    elif "top_p" not in settings:
        with pytest.raises(UserError, match=message):
            scorer.sparse(rollouts, Schedule.fixed(64, dense_layers=(0,)), **settings)


@pytest.mark.parametrize(("ids", "said"), [([1, 50], "1 to 50"), ([-1], "-1 to 2")])
def test_scores_of_tokens_outside_the_vocabulary_are_refused(ids: list[int], said: str) -> None:
    scorer, rollouts = Scorer(build()), HFEngine(build()).generate([[1, 2], [1, 2]], max_new_tokens=2)
    rollouts[1].response_ids = ids
    rollouts[1].sparse_logp = torch.zeros(len(ids))
    for score in (scorer.dense, lambda each: scorer.exact_replay(each, Schedule.fixed(64, dense_layers=(0,)))):
        with pytest.raises(UserError, match=rf"rollout 1 has token ids outside 0\.\.49: they are {said}"):
            score(rollouts)


def test_scores_at_ids_of_32_bits_are_those_at_64() -> None:
    rollouts = HFEngine(build()).generate([[1, 2]], max_new_tokens=2, seed=1)
    ids = torch.tensor([[0, 49], [7, 3]])[: len(rollouts[0].response_ids)]
    short, long = (Scorer(build()).dense(rollouts, at_ids=[each])[0].logp_at_ids for each in (ids.int(), ids))
    assert short is not None and long is not None and torch.equal(short, long)
