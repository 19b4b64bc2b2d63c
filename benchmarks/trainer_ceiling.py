"""How far a trainer's forward is from the engine's dense rollouts, as a tail: the trainer's own ceiling. The ceiling that a
run logs compares the engine's decoding with the engine's prefill; this one compares it with the forward that the loss is
made of, in the trainer's precision and with its kernels. No schedule can come closer to the trainer than that.

A dense rollout with the engine's lists, of its decoding and of its prefill, is a file (`keep_rollout`), and so are the
trainer's lists of the same tokens (`keep_scores`): they come from different processes. `ceilings` reads both.
"""

# T response tokens, S tokens of a row, D hidden, V vocabulary, K entries of a list

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOP_K = 20
CHUNK_TOKENS = 512


def lists_of(hidden_SD: Tensor, head_VD: Tensor, labels_S: Tensor, top_k: int = TOP_K) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability [S] of each label, ids [S, K] and log-probabilities [S, K] of the likeliest tokens), from the last
    hidden states and the weights of the head. The logits are computed as the trainers compute theirs: in the dtype of
    their passes, a chunk at a time, and then in fp32."""
    logp, ids, top = [], [], []
    for start in range(0, len(hidden_SD), CHUNK_TOKENS):
        logits = (hidden_SD[start : start + CHUNK_TOKENS] @ head_VD.t()).float()
        all_logp = logits.log_softmax(-1)
        logp.append(all_logp.gather(-1, labels_S[start : start + CHUNK_TOKENS, None])[:, 0].cpu())
        best = all_logp.topk(min(top_k, all_logp.shape[-1]), dim=-1)
        ids.append(best.indices.cpu())
        top.append(best.values.cpu())
    return torch.cat(logp), torch.cat(ids), torch.cat(top)


# -- files of two processes ----------------------------------------------------------------------------------------------


def keep_rollout(folder: Path, rollout: Any, dense: Any) -> None:
    """rollout: a dense one of the engine (sparroll.types.Rollout), with its lists.  dense: the engine's TokenScores of it,
    from a prefill."""
    read = len(dense.logp)
    found = {
        "prompt_ids": torch.tensor(rollout.prompt_ids),
        "response_ids": torch.tensor(rollout.response_ids[:read]),
        "logp": rollout.sparse_logp[:read].cpu(),
        "top_ids": rollout.top_k.ids[:read].cpu(),
        "top_logp": rollout.top_k.logp[:read].cpu(),
        "read_logp": dense.logp.cpu(),
        "read_top_ids": dense.top_k.ids.cpu(),
        "read_top_logp": dense.top_k.logp.cpu(),
    }
    _save(folder / f"{_name(torch.cat([found['prompt_ids'], found['response_ids']]))}.rollout", found)


def waiting(folder: Path) -> list[tuple[str, Tensor, int]]:
    """(name, the tokens of prompt and response, tokens of the prompt) of the rollouts that the trainer has not read."""
    found = []
    for path in sorted(folder.glob("*.rollout")):
        if not path.with_suffix(".scores").exists():
            rollout = torch.load(path)
            prompt_ids, response_ids = rollout["prompt_ids"], rollout["response_ids"]
            found.append((path.stem, torch.cat([prompt_ids, response_ids]), len(prompt_ids)))
    return found


def keep_scores(folder: Path, name: str, prompt_tokens: int, logp_S: Tensor, ids_SK: Tensor, top_SK: Tensor) -> None:
    """The trainer's lists at all positions of a row, whose labels are the tokens behind them."""
    of_response = slice(prompt_tokens - 1, None)
    found = {"logp": logp_S[of_response], "top_ids": ids_SK[of_response], "top_logp": top_SK[of_response]}
    _save(folder / f"{name}.scores", {key: value.clone() for key, value in found.items()})


def row_of(row_S: Tensor, known: Iterable[tuple[str, Tensor, int]]) -> tuple[str, int, int] | None:
    """(name, tokens, tokens of the prompt) of the rollout that a padded row holds; None where it holds none of them."""
    row_S = row_S.cpu()
    for name, ids, prompt_tokens in known:
        if len(ids) <= len(row_S) and torch.equal(row_S[: len(ids)], ids):
            return name, len(ids), prompt_tokens
    return None


def _save(path: Path, found: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may look at any moment.
    beside = path.with_suffix(".part")
    torch.save(found, beside)
    beside.rename(path)


def _name(ids: Tensor) -> str:
    return hashlib.blake2b(ids.to(torch.int64).numpy().tobytes(), digest_size=8).hexdigest()


# -- the tails -----------------------------------------------------------------------------------------------------------


def ceilings(folder: Path) -> dict[str, float]:
    """The tails of the rollouts that the trainer has read, `trainer_ceiling_*` against its forward and `engine_ceiling_*`
    against the engine's prefill; empty where there are none."""
    from sparroll.mismatch import TailStatistics
    from sparroll.mismatch.of_rollouts import acceptance_of
    from sparroll.mismatch.step_metrics import ESTIMATOR, ceiling_report
    from sparroll.types import Rollout, TokenScores, TopK

    statistics, off_nats = {"trainer": TailStatistics(), "engine": TailStatistics()}, []
    for path in sorted(folder.glob("*.scores")):
        theirs, ours = torch.load(path), torch.load(path.with_suffix(".rollout"))
        lists = TopK(ours["top_ids"], ours["top_logp"])
        rollout = Rollout(
            ours["prompt_ids"].tolist(), ours["response_ids"].tolist(), ours["logp"], "length", top_k=lists
        )
        readers = {
            "trainer": TokenScores(theirs["logp"], TopK(theirs["top_ids"], theirs["top_logp"])),
            "engine": TokenScores(ours["read_logp"], TopK(ours["read_top_ids"], ours["read_top_logp"])),
        }
        for reader, scores in readers.items():
            (acceptance_T,) = acceptance_of([rollout], [scores], ESTIMATOR)
            statistics[reader].add(acceptance_T, rollout.context_tokens, path.stem)
        off_nats.append((rollout.sparse_logp - readers["trainer"].logp).abs())
    if not off_nats:
        return {}
    found: dict[str, float] = {}
    for reader, each in statistics.items():
        report = ceiling_report(each.table(ESTIMATOR), 0)
        names = {name: name.replace("mismatch/dense_ceiling", f"{reader}_ceiling") for name in report}
        found |= {names[name]: value for name, value in report.items() if not name.endswith("_step")}
    off = torch.cat(off_nats)
    found |= {"rollouts": float(statistics["trainer"].rollouts), "tokens": float(statistics["trainer"].tokens)}
    return found | {"trainer_off_nats_mean": float(off.mean()), "trainer_off_nats_max": float(off.max())}
