"""What the training tests share: a random tiny Qwen3 with a tokenizer, a task that a random model sometimes solves, and a
short run of both. Importable from a subprocess too."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sparroll import tasks
from sparroll.train import DistillConfig, TrainConfig
from sparroll.train.config.file import config_from, distill_config_from
from sparroll.train.config.outputs import HeldOutSection
from sparroll.train.config.rollout import SamplingSection
from sparroll.train.config.training import StepsSection
from sparroll.train.runtime.sinks import read_lines
from sparroll.types import Prompt, Rollout

WORDS = ("<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz")


class Vowels:
    """Say as many vowels as you can: the reward is their share of the response. Needs no skill to get off the ground."""

    name = "vowels"

    def prompts(self, split: str, level: int, seed: int, count: int) -> list[Prompt]:
        drawn = []
        for index in range(count):
            rng = random.Random(f"{split}/{level}/{seed}/{index}")
            text = " ".join(rng.choices(WORDS[2:], k=rng.randint(20, 60)))
            drawn.append(Prompt(f"vowels/{split}/{index}", text, "", task=self.name, level=level))
        return drawn

    def reward(self, prompt: Prompt, response_text: str) -> float:
        words = response_text.split()
        return sum(word in "aeiou" for word in words) / max(len(words), 1)


if "vowels" not in tasks.names():
    tasks.register("vowels", Vowels)


def early_vowel(prompt: Prompt, response_text: str, rollout: Rollout, words: int = 2) -> float:
    """1 where one of the first words is a vowel: a custom reward that a group sometimes gets as a whole or not at all.

    On one prompt in five nothing is ever right.
    """
    if int(prompt.prompt_id.rsplit("/", 1)[1]) % 5 == 0:
        return 0.0
    return float(any(word in "aeiou" for word in response_text.split()[:words]))


SHORT: dict[str, dict[str, Any]] = {
    "train": {"steps": 2},
    "rollout": {"max_new_tokens": 60},
    "mismatch": {"bin_tokens": 50, "ceiling_every_steps": 0, "ceiling_prompts": 1},
    "evaluate": {"prompts": 0},
}
"""A run as small as can be."""

DYNAMIC: dict[str, dict[str, Any]] = {
    "reward": {"terms": [{"use": "integration.train_runs:early_vowel"}]},
    "rollout": {"dynamic_sampling": True, "max_new_tokens": 40},
    "task": {"train_prompts": 50},
    "mismatch": {"bin_tokens": 50, "ceiling_every_steps": 0, "ceiling_prompts": 1},
    "evaluate": {"prompts": 0},
}
"""About every other prompt is dropped."""


def write_model(folder: Path, seed: int = 0, layers: int = 3) -> str:
    """A random Qwen3 with GQA, peaked enough that sparse attention changes what it says.

    Budgets keep the first two layers dense, so the third is the first sparse one.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # About 2 % a token: responses of some 50 tokens.
        model.model.embed_tokens.weight[config.eos_token_id] = 0
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return str(folder)


def short_config(model: str, /, **changes: dict[str, Any]) -> TrainConfig:
    """Four sparse steps of 4 prompts x 4 rollouts, evaluated before and after. There is no control group, and the
    guard is off: a budget names no target. `changes` by section; one with a `kind` takes the place of the whole section."""
    table: dict[str, dict[str, Any]] = {
        "model": {"name": model, "device": "cpu"},
        "task": {"name": "vowels", "level": 0, "train_prompts": 10},
        "attention": {"kind": "budget", "kv_budget_tokens": 64},
        "rollout": {
            "samples_per_prompt": 4,
            "max_new_tokens": 70,
            "max_batch": 16,
            "top_k": 20,
            "control_share": 0,
        },
        "train": {"steps": 4, "prompts_per_step": 4, "lr": 1e-3, "micro_batch_tokens": 600, "seed": 3},
        "mismatch": {"bin_tokens": 50, "ceiling_every_steps": 2, "ceiling_prompts": 2},
        "guard": {"action": "off"},
        "evaluate": {"prompts": 6},
        "checkpoint": {"every_steps": 2},
        "log": {"sinks": []},
    }
    for section, values in changes.items():
        table[section] = values if "kind" in values else table.get(section, {}) | values
    return config_from(table)


def short_distill_config(model: str, /, **changes: dict[str, Any]) -> DistillConfig:
    """The same for an adapter alone, over lists at a high rate."""
    table = short_config(model).model_dump(mode="json")
    for section in ("check", "control", "guard", "reward", "correction"):
        del table[section]
    for section, kind in (("rollout", SamplingSection), ("train", StepsSection), ("evaluate", HeldOutSection)):
        table[section] = {key: table[section][key] for key in kind.model_fields}
    table["distill"] = {"lr": 1e-3, "rank": 4}
    for section, values in changes.items():
        table[section] = values if "kind" in values else table.get(section, {}) | values
    return distill_config_from(table)


def lines(out: Path, without: tuple[str, ...] = ("time/",)) -> list[dict[str, Any]]:
    """metrics.jsonl, by default without wall times."""
    return [{k: v for k, v in line.items() if not k.startswith(without)} for line in read_lines(out / "metrics.jsonl")]


def steps(out: Path) -> list[dict[str, Any]]:
    return [line for line in lines(out) if "reward/mean" in line]


def assert_same_weights(out: Path, other: Path, step: int = 4) -> None:
    """Weights and optimizer, to the bit."""
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        one, two = (load_file(folder / f"checkpoints/step-{step:06d}" / name) for folder in (out, other))
        assert one.keys() == two.keys()
        assert all(one[key].equal(two[key]) for key in one), name


def assert_same_run(out: Path, other: Path) -> None:
    """Metrics, weights, optimizer and state of two runs of four steps, to the bit, wall times apart."""
    assert lines(out) == lines(other)
    assert_same_weights(out, other)
    here, there = (folder / "checkpoints/step-000004" for folder in (out, other))
    assert (here / "generators.json").read_text() == (there / "generators.json").read_text()
    state, other_state = (json.loads((folder / "state.json").read_text()) for folder in (here, there))
    # Wall times have lengths of their own, and Ctrl-C in the last evaluation saves the step before it.
    ignored = {"metrics_bytes": 0, "evaluated_step": 0}
    assert state | ignored == other_state | ignored
    assert not list((out / "checkpoints").glob(".*"))
