#!/usr/bin/env bash
# bash recipes/polaris-grpo-qwen3-1.7b/evaluate.sh MODEL OUT [options, which win over those below]
# Release: 16 samples at temperature 1 and top-p 0.7, on AIME 2025.
# Ours: AIME 2024 and 2026 beside it; dense and sparse, with the tail of the acceptance (--top-p 1 gives the one that
# targets are set for).
set -euo pipefail
sparroll evaluate --model "$1" --out "$2" \
    --tasks aime24,aime25,aime26 --samples 16 --temperature 1.0 --top-p 0.7 --max-new-tokens 37888 --chat --thinking \
    --schedule qwen3-1.7b-0.86 --also-dense --engine vllm --dtype bf16 --max-batch 64 "${@:3}"
