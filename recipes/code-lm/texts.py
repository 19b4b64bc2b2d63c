"""What is measured on: a model, and sequences of a kind that it knows. Three pairs: the decoder of this recipe on held-out
sources, the study's model on solved tables, and tiny-reasoner on solved sums. Measures nothing.

Sources are read whole, every position sparsely. A problem has a prompt, whose prefill is dense, as in a rollout; its
reference response stands for the model's own, because what it leaves open it draws as the model does.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

HERE = Path(__file__).resolve().parent
STUDY = HERE.parent / "mismatch-study"
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import corpus  # noqa: E402
from code_model import load_folder  # noqa: E402

from sparroll import files  # noqa: E402
from sparroll.engines.load_model import load_model, load_tokenizer  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.tasks.synthetic.task import example  # noqa: E402
from sparroll.types import Rollout  # noqa: E402

STUDY_LEVEL, TINY_KIND, TINY_LEVELS = 6, "add", (5, 6, 7, 8)


@dataclass(frozen=True)
class Text:
    """Sequences to measure on, and the context lengths that are told apart."""

    name: str
    sequences: list[Rollout]
    bins: tuple[int, ...]
    """Context lengths at which bins begin, and the end of the last one."""
    about: dict[str, object]
    """What a record says of it. A folder of cells goes on only with a text of which the same is said."""


def open_text(
    model: str, sequences: int, tokens: int, corpus_folder: Path | None = None
) -> tuple[PreTrainedModel, Text]:
    """model: "tiny-reasoner", "study", or the --out of train_code.py. tokens: of a held-out sequence."""
    if model == "tiny-reasoner":
        return load_model(model, torch.float32, "cpu")[0], solved_sums(sequences)
    if model == "study":
        return study_model(), solved_tables(sequences)
    folder = Path(model)
    corpus_folder = corpus_folder or folder.parent / "corpus"
    ids = corpus.read(corpus_folder, "held-out")
    loaded = load_folder(folder / "model")
    return loaded, held_out(ids, sequences, tokens, same_tokenizer(corpus_folder, folder / "model"))


def same_tokenizer(corpus_folder: Path, model_folder: Path) -> str:
    """The digest of the tokenizer that both the corpus and the model have. Raises UserError where they have different ones:
    the ids of the corpus would then be other words to the model."""
    hint = f"name the corpus that {model_folder.parent} was trained on with --corpus"
    path = model_folder / "tokenizer.json"
    if not path.exists():
        raise UserError(f"{path} is missing, so nothing tells whether the corpus suits the model", "train it anew")
    described = files.read_table(corpus_folder / "corpus.json", hint)
    of_corpus, of_model = str(described["tokenizer_digest"]), files.sha256(path)
    if of_corpus != of_model:
        raise UserError(
            f"the ids of the corpus in {corpus_folder} are of another tokenizer ({of_corpus[:12]}...) than that of the "
            f"model, {path} ({of_model[:12]}...)",
            hint,
        )
    return of_model


def held_out(ids: np.ndarray, sequences: int, tokens: int, tokenizer_digest: str) -> Text:
    """Windows of the held-out row, spread evenly over it. All but the first token is a response."""
    windows = (len(ids) - 1) // tokens
    if windows < sequences:
        raise UserError(
            f"the held-out text has {len(ids):,} tokens, too few for {sequences} sequences of {tokens:,}",
            "take fewer --sequences or --tokens, or a corpus of more --roots",
        )
    rows = []
    for place in range(sequences):
        begin = place * windows // sequences * tokens
        rows.append(_rollout(*np.split(np.asarray(ids[begin : begin + tokens + 1]).astype(np.int64), [1])))
    # Bins of 2K to 4K, 4K to 8K and 8K to 16K, or of like shares of shorter sequences.
    bins = tuple(tokens // part for part in (8, 4, 2, 1))
    about = {"sequences": sequences, "tokens": tokens, "prefill": "none", "tokenizer_digest": tokenizer_digest}
    about["held_out_digest"] = hashlib.sha256(ids.tobytes()).hexdigest()
    return Text("code", rows, (*bins[:-1], tokens + 1), about)


def solved_tables(sequences: int) -> Text:
    sys.path.insert(0, str(STUDY))
    from table_sums import LEVELS, problem

    shape = LEVELS[STUDY_LEVEL]
    rows = [
        _rollout(*np.split(problem("eval", STUDY_LEVEL, 0, index).astype(np.int64), [shape.prompt_tokens]))
        for index in range(sequences)
    ]
    bins = (shape.prompt_tokens, shape.prompt_tokens + shape.response_tokens + 1)
    return Text("study", rows, bins, {"sequences": sequences, "level": STUDY_LEVEL, "prefill": "prompt"})


def solved_sums(sequences: int) -> Text:
    tokenizer = load_tokenizer("tiny-reasoner")
    rows = []
    for index in range(sequences):
        words = example("eval", TINY_KIND, TINY_LEVELS[index % len(TINY_LEVELS)], 0, index)
        ids = (np.array(tokenizer.convert_tokens_to_ids(part)) for part in words)
        rows.append(_rollout(*ids))
    about = {"sequences": sequences, "task": TINY_KIND, "levels": list(TINY_LEVELS), "prefill": "prompt"}
    return Text("tiny-reasoner", rows, (256, 512, 1024, 2049), about)


def study_model() -> PreTrainedModel:
    sys.path.insert(0, str(STUDY))
    from study_folder import load_packed, new_config

    return load_packed(STUDY / "model", new_config())


def _rollout(prompt_ids: np.ndarray, response_ids: np.ndarray) -> Rollout:
    return Rollout(prompt_ids.tolist(), response_ids.tolist(), torch.zeros(len(response_ids)), "stop")
