"""From Python files to token ids: a tokenizer learned from the training files, and two long rows of ids.

    python recipes/code-lm/corpus.py --out runs/code-lm/corpus

train.bin and held-out.bin hold the ids of all files in the order of their names, each file followed by the end token, as
little-endian 16-bit numbers. corpus.json says what they were made of. `train_code.py` makes the folder where it is
missing; seeds share it. The order of the names matters: a package's files are neighbours, so a long context says more
about what follows than a short one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from sources import Source, collect, default_roots, digest_of  # noqa: E402

from sparroll import files, records  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.progress import OnProgress, Progress  # noqa: E402

FORMAT = 1
END = "<|end of file|>"
END_ID = 0
VOCABULARY = 16_384
MOST_TRAINING_BYTES = 300_000_000
LEARNED_FROM_BYTES = 48_000_000
"""Text that merges are learned from; more of it costs time and changes few of them."""
BATCH_FILES = 256
SPLITS = ("train", "held-out")


def build(
    out: Path,
    roots: list[Path],
    vocabulary: int = VOCABULARY,
    most_bytes: int = MOST_TRAINING_BYTES,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Make the corpus in `out`, or take the one that is there if it was asked for with the same settings; its
    description. The description is written last, so a folder without one was cut and is made anew."""
    asked = {
        "format": FORMAT,
        "roots": [str(root) for root in roots],
        "vocabulary": vocabulary,
        "most_bytes": most_bytes,
    }
    about = out / "corpus.json"
    if about.exists():
        known = files.read_table(about, "choose another folder for the corpus")
        if known["asked"] != asked:
            raise UserError(
                f"the corpus in {out} was made of {known['asked']}, not of {asked}", "choose another folder"
            )
        if on_progress is not None:
            on_progress(1, 1, "made before")
        return known
    began = time.time()
    sources = collect(roots, most_bytes)
    if any(not any(source.held_out is held_out for source in sources) for held_out in (False, True)):
        raise UserError(f"{len(sources)} files are too few to hold some of them out", "name more folders with --roots")
    tokenizer = learn([source for source in sources if not source.held_out], vocabulary)
    text = files.write_text(out / "tokenizer.json", tokenizer.to_str())
    described: dict[str, Any] = {
        "asked": asked,
        "digest": digest_of(sources),
        "tokenizer_digest": files.sha256(text),
        "vocabulary": tokenizer.get_vocab_size(),
        "packages": packages(sources),
        "splits": {},
    }
    done = 0
    for split in SPLITS:
        mine = [source for source in sources if source.held_out is (split == "held-out")]
        parts = []
        for begin in range(0, len(mine), BATCH_FILES):
            parts.append(encode(tokenizer, mine[begin : begin + BATCH_FILES]))
            done += len(mine[begin : begin + BATCH_FILES])
            if on_progress is not None:
                on_progress(done, len(sources), f"{done:,} of {len(sources):,} files")
        ids = np.concatenate(parts)
        path = files.write_bytes(out / f"{split}.bin", ids.tobytes())
        described["splits"][split] = {
            "files": len(mine),
            "bytes": sum(len(source.data) for source in mine),
            "tokens": len(ids),
            "digest": files.sha256(path),
        }
    described["seconds"] = round(time.time() - began, 1)
    files.write_json(about, described)
    return described


def learn(sources: list[Source], vocabulary: int) -> Tokenizer:
    """Byte-level BPE: any text has ids, and they give it back exactly. Learned from files spread evenly over the list."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    stride = -(-sum(len(source.data) for source in sources) // LEARNED_FROM_BYTES)
    tokenizer.train_from_iterator((source.data.decode() for source in sources[::stride]), trainer)
    assert tokenizer.token_to_id(END) == END_ID, "the end token has another id"
    return tokenizer


def encode(tokenizer: Tokenizer, sources: list[Source]) -> np.ndarray:
    """The ids of files, the end token after each of them."""
    rows = tokenizer.encode_batch_fast([source.data.decode() for source in sources])
    return np.concatenate([np.array([*row.ids, END_ID], dtype="<u2") for row in rows])


def packages(sources: list[Source]) -> dict[str, int]:
    """Bytes of each package or module, the largest first."""
    total: dict[str, int] = {}
    for source in sources:
        total[source.package] = total.get(source.package, 0) + len(source.data)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def read(folder: Path, split: str) -> np.ndarray:
    """The ids of a split, mapped from its file."""
    if not (folder / "corpus.json").exists():
        raise UserError(f"there is no corpus in {folder}", f"make it: python recipes/code-lm/corpus.py --out {folder}")
    return np.memmap(folder / f"{split}.bin", dtype="<u2", mode="r")


def summary(described: dict[str, Any]) -> dict[str, Any]:
    """What a record says of the corpus it was made with; paths are left out."""
    kept = {name: described[name] for name in ("digest", "tokenizer_digest", "vocabulary", "splits")}
    return kept | {"largest_packages": dict(list(described["packages"].items())[:20])}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--roots", type=Path, nargs="+", default=default_roots(), help="folders with Python files")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--most-bytes", type=int, default=MOST_TRAINING_BYTES, help="of training text")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    add_arguments(parser)
    args = parser.parse_args()
    try:
        with Progress() as progress:
            described = build(args.out, args.roots, args.vocabulary, args.most_bytes, progress.bar("corpus"))
    except UserError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(records.plain(summary(described)), indent=1))


if __name__ == "__main__":
    # The corpus is a matter of seconds on many cores, and of minutes on one.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    main()
