"""The packaged model: small, loadable by plain transformers, and able to reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sparroll import models, tasks
from sparroll.tasks.synthetic.kinds import KINDS, VOCABULARY
from sparroll.tasks.synthetic.task import LEVELS, example

FOLDER = models.resolve("tiny-reasoner")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


def test_resolve_knows_the_packaged_model_and_leaves_other_names_alone() -> None:
    assert (Path(FOLDER) / "config.json").is_file()
    assert models.resolve("Qwen/Qwen3-1.7B") == "Qwen/Qwen3-1.7B"
    assert models.resolve("./tiny-reasoner") == "./tiny-reasoner"


def test_weights_are_at_most_eight_megabytes() -> None:
    assert (Path(FOLDER) / "model.safetensors").stat().st_size <= 8_000_000


def test_architecture_is_qwen3_with_grouped_queries() -> None:
    config = AutoConfig.from_pretrained(FOLDER)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (6, 6, 2)
    assert (config.head_dim, config.max_position_embeddings, config.tie_word_embeddings) == (32, 4096, True)
    assert config.vocab_size == len(VOCABULARY)


def test_plain_loading_gives_fp32_and_every_weight(model) -> None:
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == 2_388_288
    _, info = AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_tokenizer_has_one_token_a_word_and_adds_none(tokenizer) -> None:
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == list(VOCABULARY)
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == ("<pad>", "<bos>", "<eos>")
    assert tokenizer("ba 4 <eos>").input_ids == [VOCABULARY.index(word) for word in ("ba", "4", "<eos>")]


@pytest.mark.parametrize("kind", KINDS)
def test_encode_then_decode_is_the_same_text(tokenizer, kind: str) -> None:
    for level in LEVELS:
        prompt, response = example("eval", kind, level, 0, 0)
        text = " ".join(prompt + response)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.unk_token_id not in tokenizer.encode(text)


@pytest.mark.parametrize(("name", "level"), [("synthetic_add", 0), ("synthetic_walk", 0), ("synthetic_walk", 1)])
def test_greedy_answers_to_easy_problems_are_right(model, tokenizer, name: str, level: int) -> None:
    task = tasks.get(name)
    prompts = task.prompts("eval", level, seed=1, count=8)
    inputs = tokenizer([prompt.text for prompt in prompts], return_tensors="pt", padding=True)
    output = model.generate(**inputs, do_sample=False, temperature=None, max_new_tokens=260)
    responses = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    rewards = [task.reward(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    assert sum(rewards) >= 7


def test_reference_chains_are_likely_under_the_model(model, tokenizer) -> None:
    prompt, response = example("eval", "chain", 2, 3, 0)
    ids = torch.tensor([tokenizer.encode(" ".join(prompt + response))])
    with torch.no_grad():
        logp = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    nats = -logp.gather(1, ids[0, len(prompt) :, None]).mean().item()
    assert 0.02 < nats < 0.5
