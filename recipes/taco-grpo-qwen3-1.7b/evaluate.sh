#!/usr/bin/env bash
# bash recipes/taco-grpo-qwen3-1.7b/evaluate.sh MODEL OUT [options, which win over those below]
# Release: one sample at temperature 1 and top-p 0.7 on these three sets, of LiveCodeBench the contests from August to
# December 2024. Ours: dense and sparse, with the tail of the acceptance (--top-p 1 gives the one that targets are for).
set -euo pipefail
sparroll evaluate --model "$1" --out "$2" \
    --tasks livecodebench,humaneval_plus,mbpp_plus --contest-from 2024-08-01 --contest-before 2025-01-01 \
    --samples 1 --temperature 1.0 --top-p 0.7 --max-new-tokens 24576 --chat --thinking \
    --schedule qwen3-1.7b-0.86 --also-dense --engine vllm --dtype bf16 --max-batch 64 "${@:3}"
