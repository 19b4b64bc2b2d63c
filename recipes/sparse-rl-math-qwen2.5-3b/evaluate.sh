#!/usr/bin/env bash
# bash recipes/sparse-rl-math-qwen2.5-3b/evaluate.sh MODEL OUT [options, which win over those below]
# Release: one sample at temperature 0.8 and top-p 0.95, 8,192 tokens, dense, on these four sets and Gaokao 2023,
# Minerva and OlympiadBench, which are not among ours. Ours: AMC is the set of 2022 and 2023.
set -euo pipefail
sparroll evaluate --model "$1" --out "$2" \
    --tasks gsm8k,math500,aime24,amc --samples 1 --temperature 0.8 --top-p 0.95 --max-new-tokens 8192 --chat --no-tail \
    --engine vllm --dtype bf16 --max-batch 256 "${@:3}"
