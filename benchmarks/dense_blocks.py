"""Whether dense decoding depends on vLLM's blocks: steps of the steady request set in blocks of 16 tokens, vLLM's own
choice, and of 64, which sparse engines take. Both in one process, one after the other.

    python benchmarks/dense_blocks.py --model qwen3-1.7b --out benchmarks/results/dense-blocks-qwen3-1.7b-h200.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import request_sets
import vllm_engines
from vllm_engines import Engine

from sparroll import records

BLOCKS = (16, 64)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(vllm_engines.QWEN3))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8, help="half as many moments are timed, and at least 4")
    parser.add_argument("--steps", type=int, default=8, help="decode steps that are timed as one")
    parser.add_argument("--repeats", type=int, default=5, help="how often they are timed at each moment")
    parser.add_argument("--max-seqs", type=int, default=128)
    parser.add_argument("--folder", default="/tmp/sparroll-bench", help="where the model configs go")
    parser.add_argument("--shrink", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    began, found, moments = time.time(), [], None
    slack = request_sets.slack_tokens(options.steps, options.repeats)
    for block in BLOCKS:
        settings = {"max_num_seqs": options.max_seqs}
        if vllm_engines.on_gpu():
            settings["block_size"] = block
        with Engine(options.model, Path(options.folder), None, **settings) as engine:
            if moments is None:
                # A little less than this cache holds, since the other one is cut into larger blocks.
                held = engine.capacity_tokens - max(BLOCKS) * options.max_seqs
                sets = request_sets.windows_of_sets(
                    ["steady"], options.windows, held, options.max_seqs, slack, options.shrink
                )
                moments = sets["steady"]
            rows = []
            for moment in moments:
                seconds = engine.step_seconds(moment["contexts"], options.steps, options.repeats)
                rows.append(seconds)
                about = f"{len(moment['contexts'])} requests of {sum(moment['contexts'])} tokens"
                print(f"blocks of {engine.block_tokens}, {about}: {1000 * min(seconds):.2f} ms", flush=True)
            found.append({"block_tokens": engine.block_tokens, "engine": engine.settings(), "step_seconds": rows})
    medians = [[vllm_engines.median(seconds) for seconds in its["step_seconds"]] for its in found]
    result = {
        "model": options.model,
        "moments": [{"batch": len(m["contexts"]), "context_tokens": sum(m["contexts"])} for m in moments or ()],
        "blocks": found,
        "larger_over_smaller": [large / small for small, large in zip(*medians, strict=True)],
    }
    config = {key: getattr(options, key) for key in ("model", "windows", "steps", "repeats", "max_seqs", "shrink")}
    records.write(options.out, "dense-blocks", result, config=config, seed=0, wall_seconds=time.time() - began)
    print("steps in larger blocks take", " ".join(f"{ratio:.3f}" for ratio in result["larger_over_smaller"]))


if __name__ == "__main__":
    main()
