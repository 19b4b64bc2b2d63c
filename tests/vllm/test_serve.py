"""`vllm serve` with the arguments that `sparroll serve-args` prints, asked over HTTP: rollouts are sparse, and say so."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparroll import Schedule
from sparroll.engines import HFEngine
from sparroll.engines.report import EngineReport
from sparroll.engines.vllm.serve_args import serve_arguments
from sparroll.models import resolve
from vllm_runs import needs_vllm, random_prompts, serving

pytestmark = [needs_vllm, pytest.mark.slow]

PROMPT_TOKENS, NEW_TOKENS = 120, 60


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Schedule.fixed(64).save(tmp_path_factory.mktemp("serve") / "schedule.toml")


@pytest.fixture(scope="module")
def address(schedule: Path) -> Iterator[str]:
    with serving(serve_arguments(str(schedule), None, False)) as address:
        yield address


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    return json.loads(text) if text else None


def test_a_server_samples_what_the_oracle_samples_and_counts_it(address: str, schedule: Path) -> None:
    (prompt,) = random_prompts([PROMPT_TOKENS])
    post(f"{address}/collective_rpc", {"method": "sparroll_reset_report"})
    asked = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    answer = post(f"{address}/v1/completions", {"model": str(resolve("tiny-reasoner")), **asked})
    reports = post(f"{address}/collective_rpc", {"method": "sparroll_report"})["results"]
    oracle = HFEngine("tiny-reasoner", schedule=schedule, dtype=torch.float32)
    (expected,) = oracle.generate([prompt], max_new_tokens=NEW_TOKENS, temperature=0, stop_ids=[])
    assert expected.attention == "sparse"
    got = torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"])
    torch.testing.assert_close(got, expected.sparse_logp, atol=1e-3, rtol=0)
    table = reports[0]
    report = EngineReport.from_table(table if isinstance(table, dict) else json.loads(table))
    assert report.layers == oracle.report().layers


def test_a_request_to_a_server_may_be_dense(address: str, schedule: Path) -> None:
    (prompt,) = random_prompts([PROMPT_TOKENS], seed=1)
    post(f"{address}/collective_rpc", {"method": "sparroll_reset_report"})
    asked = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    more: dict[bool, dict[str, Any]] = {
        True: {"vllm_xargs": {"sparroll_dense": True}, "cache_salt": "sparroll-dense"},
        False: {},
    }
    oracle = HFEngine("tiny-reasoner", schedule=schedule, dtype=torch.float32)
    expected = oracle.generate(
        [prompt], n=2, max_new_tokens=NEW_TOKENS, temperature=0, stop_ids=[], dense=[True, False]
    )
    for rollout, dense in zip(expected, (True, False), strict=True):
        answer = post(f"{address}/v1/completions", {"model": str(resolve("tiny-reasoner")), **asked, **more[dense]})
        got = torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"])
        torch.testing.assert_close(got, rollout.sparse_logp, atol=1e-3, rtol=0)
    assert (expected[0].sparse_logp - expected[1].sparse_logp).abs().max() > 1e-2
    table = post(f"{address}/collective_rpc", {"method": "sparroll_report"})["results"][0]
    report = EngineReport.from_table(table if isinstance(table, dict) else json.loads(table))
    assert report.dense_request_steps == NEW_TOKENS - 1
    assert report.layers == oracle.report().layers
