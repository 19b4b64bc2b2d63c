"""Figures in sentences about speed, memory and precision. Measures nothing; claims.py puts them on the pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from claim_words import Claims, Figures, bare, down, up
from record_tables import RESULTS, results
from render_speed import decode_cells, pairs, rollout_records

from sparroll import records

# -- rollouts and steps in vLLM ------------------------------------------------------------------------------------------


def _of_rollouts(name: str) -> list[float]:
    return [found[name] for *_, found in rollout_records()]


def speedups() -> Figures:
    found = _of_rollouts("speedup")
    shares, fitted = _of_rollouts("attainable_share"), _of_rollouts("attainable_share_fit")
    return {
        "slowest": down(min(found), 1),
        "fastest": down(max(found), 1),
        "least": down(100 * min(shares)),
        "most": down(100 * max(shares)),
        "least_fitted": down(100 * min(fitted)),
        "most_fitted": down(100 * max(fitted)),
    }


def copy_bandwidth() -> Figures:
    return {"rate": down(min(_of_rollouts("copy_bytes_per_second")) / 1e12, 2)}


def fit_of_steps() -> Figures:
    """Two moments of the drained 1.7B run in which fewer requests take longer."""
    found = results("rollout-qwen3-1.7b-drained-h200", "rollout")
    figures = {"error": up(100 * max(fit["largest_relative_error"] for fit in _fits()))}
    for name, batch in (("few", 17), ("more", 21)):
        place = next(n for n, window in enumerate(found["windows"]) if window["batch"] == batch)
        window = found["windows"][place]
        figures[f"{name}_ms"] = down(1e3 * statistics.median(found["repeats"]["dense_seconds"][place]), 1)
        figures[f"{name}_requests"] = str(batch)
        figures[f"{name}_context"] = down(window["context_tokens"] / batch / 1e3)
    return figures


def _fits() -> list[dict[str, Any]]:
    return [found["fit"] for *_, found in rollout_records()]


def index_share() -> Figures:
    return {"share": up(100 * (1 - results("vllm-acceptance-h200", "vllm-acceptance")["capacity"]["of_dense"]), 1)}


def left_over() -> Figures:
    return {"gib": up(max(_of_rollouts("left_over_gib")), 1)}


def short_steps() -> Figures:
    found = pairs(decode_cells())
    shortest = min(context for _, context in found)
    extra = [100 * (found[batch, shortest][1] / found[batch, shortest][0] - 1) for batch in (1, 8)]
    return {"least": up(min(extra), 1), "most": up(max(extra), 1)}


# -- correctness on a GPU ------------------------------------------------------------------------------------------------


def acceptance() -> Figures:
    found = results("vllm-acceptance-h200", "vllm-acceptance")
    bf16, fp16, v1 = found["bf16, sparse, 1,000 tokens"], found["fp16, sparse"], found["V1 runner"]
    return {
        "engine": bare(up(bf16["engine"], 3)),
        "transformers": bare(up(bf16["transformers"], 3)),
        "dense": down(bf16["policies"], 2),
        "fp16": bare(up(fp16["engine"], 4)),
        "fp16_transformers": bare(up(fp16["transformers"], 4)),
        "v1": bare(up(v1["engine"], 3)),
        "v1_transformers": bare(up(v1["transformers"], 3)),
    }


def against_stock() -> Figures:
    found = results("vllm-acceptance-h200", "vllm-acceptance")["full budget against stock, greedy"]
    return {"mean": bare(up(found["mean"], 3))}


def row_scores() -> Figures:
    rows = results("row-scores-h100", "row-scores")["rows"]
    said = {}
    for row in rows:
        if row["dtype"] == "bfloat16" and row["rows"] == 32:
            listed = "_listed" if row["top_k"] else ""
            said |= {f"ours{listed}": up(row["ours_us"]), f"vllm{listed}": down(row["vllm_us"])}
    return said


def sleep() -> Figures:
    found = results("vllm-acceptance-h200", "vllm-acceptance")["sleep level 1"]
    return {"back": down(found["awake_gib"] - found["asleep_gib"]), "of": down(found["awake_gib"])}


def dense_requests() -> Figures:
    found = results("dense-requests-h200", "dense-requests")
    requests = sum(window["batch"] for window in found["windows"])
    return {
        "requests": str(found["windows"][0]["batch"]),
        "context": f"{sum(window['context_tokens'] for window in found['windows']) // requests:,}",
        "share": down(100 * found["dense_share"], 2),
        "cost": up(100 * found["cost"], 1),
    }


def two_gpus() -> Figures:
    record = records.read(RESULTS / "vllm-two-gpus-h200.json", "vllm-acceptance")
    found = record["results"]
    sparse, dense = found["two GPUs, sparse"], found["two GPUs, dense"]
    return {
        "head_dim": str(record["config"]["head_dim"]),
        "sparse": bare(up(sparse["engine"], 3)),
        "sparse_transformers": bare(up(sparse["transformers"], 3)),
        "dense": bare(up(dense["engine"], 3)),
        "dense_transformers": bare(up(dense["transformers"], 3)),
        "one": bare(up(found["two GPUs against one, greedy"]["mean"], 3)),
    }


def calibration(name: str = "calibration-cost-qwen3-1.7b-12288-h100") -> Figures:
    """Seconds of a whole calibration beside those of an evaluation of the same model."""
    record = records.read(RESULTS / f"{name}.json", "calibration-cost")
    found, tokens = record["results"], record["config"]["response_tokens"]
    calibrated = found["calibration"]
    rounds = [each["wall_seconds"] for each in calibrated["sets"] if each["name"] == "schedule"]
    budgets = [each["wall_seconds"] for each in calibrated["sets"] if each["name"].startswith("fixed-")]
    assert len(rounds) == calibrated["verify_rounds"] == 2, "two of four rounds"
    return {
        "budgets": up(sum(budgets)),
        "round": up(max(rounds)),
        "tokens": f"{tokens:,}",
        "took": up(calibrated["seconds"]),
        "share": bare(up(100 * found["share_of_seconds"], 1)),
        "whole": f"{int(down(found['evaluation']['whole_seconds'])):,}",
        "most": up(100 * found["most_share_of_seconds"]),
    }


def calibration_of_shorter_responses() -> Figures:
    """With the budgets sampled together."""
    return calibration("calibration-cost-qwen3-1.7b-h200")


def load() -> Figures:
    found = results("vllm-load-h200", "vllm-acceptance")
    return {
        "requests": f"{found['load']['requests']:,}",
        "steps": f"{found['load']['steps']:,}",
        "preemptions": f"{found['load']['preemptions']:,}",
        "growth": up(found["growth since the second round"]["used_bytes"] / 2**10),
        "preempted": bare(up(found["preempted requests"]["engine"], 3)),
        "others": bare(up(found["requests left alone"]["engine"], 3)),
    }


def ceilings() -> Figures:
    found = [level["dense_ceiling_q05"] for level in results("vllm-training-h200", "vllm-acceptance").values()]
    return {"low": bare(down(min(map(min, found)), 2)), "high": bare(down(max(map(max, found)), 2))}


# -- training ------------------------------------------------------------------------------------------------------------


def sparse_training() -> Figures:
    layer = results("sparse-training-h200", "sparse-training")["layer"]
    ratios = [row["sparse_both_ms"] / row["dense_both_ms"] for row in layer]
    longest = [row for row in layer if row["tokens"] == 32_768]
    return {
        "least": up(min(ratios), 1),
        "most": up(max(ratios), 1),
        "generic": up(max(row["choose_generic_ms"] for row in longest)),
        "kernel": up(max(row["choose_ms"] for row in longest), 1),
        "dk_dv": up(max(row["parts"]["dk_dv_ms"] for row in longest)),
        "dk_dv_8_warps": down(max(row["parts"]["dk_dv_64_keys_8_warps_ms"] for row in longest)),
    }


def adapter_passes() -> Figures:
    """How the adapter's pass compares with the policy's, and what of it comes from where."""
    figures = {}
    for found in results("sparse-training-h200", "sparse-training")["model"]:
        length = f"at_{found['tokens'] // 1000}k"
        policy, dense, sparse = (found[name]["both_seconds"] for name in ("policy", "adapter_dense", "adapter"))
        figures |= {length: up(sparse / policy, 2), f"{length}_lora": up(dense / policy, 2)}
        figures[f"{length}_sparse"] = up(sparse / dense, 2)
    return figures


def training_step() -> Figures:
    found = {row["case"]: row["steps"][-1] for row in results("training-step-h200", "training-step")}
    dense, sparse, distill = (found[case] for case in ("dense", "sparse", "distill"))
    whole = dense["step_seconds"]
    return {
        "sparse": down(whole / sparse["step_seconds"], 2),
        "distill": down(whole / distill["step_seconds"], 2),
        "without_adapter": down(whole / (distill["step_seconds"] - distill["distill_seconds"]), 2),
        "rollouts": down(100 * dense["rollout_seconds"] / whole),
        "no_time": down(whole / (whole - dense["rollout_seconds"]), 1),
        "measuring": up(max(step["measure_seconds"] for step in found.values()), 1),
        "adapter": up(distill["distill_seconds"] / distill["update_seconds"], 2),
    }


def hf_generate() -> Figures:
    cpu, gpu = (results(name, "hf-decode")["generate"] for name in ("hf-decode-cpu", "hf-decode-h200"))
    return {"cpu": up(cpu["engine_over_generate"], 2), "gpu": up(gpu["engine_over_generate"], 2)}


def plans() -> Figures:
    return {
        f"s{size.replace('.', '')}": down(results(f"plan-qwen3-{size}", "plan")["speedup"], 2)
        for size in ("1.7b", "4b", "8b", "14b")
    }


def code_verdicts() -> Figures:
    found = results("verdicts-code-cpu", "code-verdicts")
    resident = found["resident_mib_after_each_batch"]
    return {"rate": down(found["verdicts_per_second"], 1), "least": f"{min(resident)}", "most": f"{max(resident)}"}


PAGES: Mapping[str, Claims] = {
    "docs/calibration.md": {
        "With responses of {tokens} tokens, the whole command took {took} s on an H200, which is {share} % of the {whole} s "
        "that sampling an evaluation would take there": calibration_of_shorter_responses,
        "Its five budgets took {budgets} s together, and each of two rounds of verification up to {round} s. With all four "
        "rounds it would be {most} %.": calibration_of_shorter_responses,
        "With responses of {tokens} tokens, each budget by itself, it took {took} s on an H100, {share} % of {whole} s by "
        "40 responses, and with all rounds {most} %": calibration,
    },
    "docs/own-model.md": {
        "With responses of {tokens} tokens a calibration of a model of Qwen3-1.7B's shape took {took} s of an H100, "
        "[{share} % of the seconds of an evaluation]": calibration,
        "and with {tokens} tokens {took} s of an H200": calibration_of_shorter_responses,
    },
    "README.md": {
        "- Rollouts in vLLM are {slowest} to {fastest} times as fast as with stock FlashAttention 3": speedups,
        "would be little faster: our kernels reach {least} to {most} % of its speed by one [estimate](#results), and "
        "{least_fitted} to {most_fitted} % by another.": speedups,
        "with responses of 12K tokens is {sparse} times as fast: rollouts are {rollouts} % of the dense "
        "step.": training_step,
    },
    "docs/results.md": {
        "are {slowest} to {fastest} times as fast with the published 0.86 schedules, which is {least} to {most} % of what "
        "is attainable, or {least_fitted} to {most_fitted} % of what is attainable by the fitted definition.": speedups,
        "of a 1.7B shape with responses of 12K tokens is {sparse} times as fast,": training_step,
        "copy bandwidth ({rate} TB/s)": copy_bandwidth,
        "which misses single ones by up to {error} %: FlashAttention takes {few_ms} ms for {few_requests} requests of "
        "{few_context}K tokens and {more_ms} ms for {more_requests} of {more_context}K.": fit_of_steps,
        "The index takes {share} % of the KV cache's capacity.": index_share,
        "up to 8 requests the sparse step costs {least} to {most} % more": short_steps,
        "in bf16 are off by {engine} on average from fp32 scoring under the same schedule. Scoring the same tokens in bf16 "
        "with transformers is off by {transformers}, and the dense policy is {dense} away. In fp16 it is {fp16} and "
        "{fp16_transformers}; with the V1 runner {v1} and {v1_transformers} over 200 steps.": acceptance,
        "log-probabilities differ by {mean} up to where the others part.": against_stock,
        "Sleep gives back {back} GiB of {of}.": sleep,
        "each with half of the heads (of size {head_dim}), 5,000 sampled tokens are off by {sparse} (transformers in bf16: "
        "{sparse_transformers}), dense ones by {dense} ({dense_transformers}). Both workers count the same, and greedy "
        "rollouts differ from one GPU's by {one} up to": two_gpus,
        "Under load, {requests} requests in six rounds took {steps} steps and {preemptions} preemptions.": load,
        "the device's memory grew by {growth} KiB after the second round. Rollouts that were preempted are off by "
        "{preempted} instead of {others}": load,
        "The dense ceiling stayed at {low} to {high},": ceilings,
        "A closed engine leaves up to {gib} GiB of handles": left_over,
        "Both ways, sparse attention takes {least} to {most} times as long as flash attention": sparse_training,
        "the choice of units takes {generic} ms in torch operations instead of the kernel's {kernel}. Gradients of keys "
        "and values take {dk_dv} ms where queries are random, and {dk_dv_8_warps} ms with eight warps": sparse_training,
        "It takes {at_12k} times the policy's at 12K tokens and {at_32k} times at 32K. Of that, {at_12k_lora} and "
        "{at_32k_lora} are for LoRA's small products, which outweigh the gradients that the adapter does not need, and "
        "{at_12k_sparse} and {at_32k_sparse} for sparse attention": adapter_passes,
        "A schedule of .86 makes the whole step {sparse} times as fast, and a schedule of .80 with an adapter {distill} "
        "times.": training_step,
        "A step also has up to {measuring} seconds of measuring the acceptance. Rollouts are {rollouts} % of the dense "
        "step, so even rollouts that take no time would make it {no_time} times as fast": training_step,
        "The adapter's update (KL over top-k lists) takes {adapter} times as long as the policy's": training_step,
        "So {distill}x is left of at most {without_adapter}x without it": training_step,
        "HFEngine's dense mode takes {cpu} of the time of `model.generate` on the CPU and {gpu} on the H200": hf_generate,
    },
    "docs/vllm.md": {
        "With 32 requests on an H100 they take {ours} us of a decode step without lists and {ours_listed} us with them, "
        "where vLLM's own takes {vllm} and {vllm_listed} us": row_scores,
        "log-probabilities of preempted rollouts were off by {preempted} on average where those of others were off by "
        "{others} (bf16)": load,
        "0.86 preset and {requests} requests of steady load, {share} % of them dense cost {cost} % of the tokens per "
        "second (`dense-requests-h200.json`": dense_requests,
    },
    "docs/plan.md": {
        "it was [less](vllm.md#dense-requests): {cost} % with Qwen3-1.7B's shape and {context} tokens of context on "
        "average.": dense_requests,
        "for the published 0.86 presets the plan gives {s17b} / {s4b} / {s8b} / {s14b} (1.7B / 4B / 8B / 14B": plans,
    },
    "docs/distill.md": {
        "at 12K tokens it took {adapter} times as long (KL over lists). Of the speed of a schedule of .80, which without "
        "the adapter would be at most {without_adapter}x, {distill}x was left": training_step,
        "At 12K tokens LoRA's small products make a pass {at_12k_lora} times the policy's": adapter_passes,
        "where hardly anything can be skipped, takes {at_12k_sparse} times that.": adapter_passes,
    },
    "docs/sandbox.md": {
        "each gave {rate} verdicts a second and took {least} to {most} MiB resident": code_verdicts,
    },
}
