"""`sparroll data list | show | check`: what is in a set or a file, and whether training rows share text with eval
rows."""

from __future__ import annotations

import textwrap
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from sparroll.cli.shared import common, options
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.errors import UserError
from sparroll.types import Prompt

if TYPE_CHECKING:
    from sparroll.tasks.data.load import Loaded
    from sparroll.tasks.data.rows import Row

app = typer.Typer(help="Look at data for training and evaluation.", no_args_is_help=True)

_BINS, _BAR = 12, 40
_SAMPLE_CHARACTERS, _END_CHARACTERS = 600, 150


@app.command("list", cls=options.Verb)
def list_(json: options.Json = False) -> None:
    """List the known sets, where each is on the hub, and its splits."""
    from sparroll.tasks.data.catalog import SETS

    rows = [(each.name, each.repository, each.train, each.eval, each.note) for each in SETS.values()]
    if json:
        common.print_json(
            [dict(zip(("name", "repository", "train", "eval", "note"), row, strict=True)) for row in rows]
        )
        return
    table = _folded("name", "hub", "train split", "eval split", "note")
    for row in rows:
        table.add_row(*(cell or "-" for cell in row))
    Console().print(table)


@app.command(cls=options.Verb)
def show(
    source: Annotated[str, typer.Argument(metavar="NAME", help="A set (gsm8k, gsm8k:test) or a file.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Count tokens of this model's tokenizer instead of words.")
    ] = None,
    chat: options.Chat = False,
    thinking: options.Thinking = None,
    prompt_template: options.PromptTemplate = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="How many rows to print, spread evenly over the set.")
    ] = 3,
    mirror: options.Mirror = None,
    json: options.Json = False,
) -> None:
    """Print samples as the model sees them, a histogram of prompt lengths, and how many rows were skipped and why."""
    from sparroll.tasks.data.load import load
    from sparroll.tasks.data.templates import filled

    loaded = load(source, mirror=None if mirror is None else str(mirror))
    rows = [filled(row, prompt_template) for row in loaded.rows]
    if thinking is not None and not chat:
        raise UserError("--thinking and --no-thinking need --chat")
    encoder = _encoder(model, chat, thinking)
    lengths = [len(row.text.split() if encoder is None else encoder.ids([_prompt(row)])[0]) for row in rows]
    unit = "words" if model is None else "tokens"
    summary = {
        "source": loaded.source,
        "rows": len(rows),
        "skipped": dict(loaded.skipped),
        f"prompt_{unit}": {"min": min(lengths), "median": median(lengths), "max": max(lengths)},
    }
    shown = min(samples, len(rows))
    places = [place * (len(rows) - 1) // max(shown - 1, 1) for place in range(shown)]
    if json:
        common.print_json(
            summary | {"samples": [_sample(rows[place], _shown(encoder, rows[place])) for place in places]}
        )
        return
    console = Console(highlight=False)
    for place in places:
        _print_sample(console, rows[place], _shown(encoder, rows[place]))
    console.print(f"{len(rows):,} rows of {loaded.source}", markup=False)
    _print_skipped(loaded)
    console.print(f"prompt {unit}: {min(lengths):,} to {max(lengths):,}, median {median(lengths):,.0f}")
    console.print(_histogram(lengths, unit))


@app.command(cls=options.Verb)
def check(
    train: Annotated[str, typer.Option("--train", help="Set or file to train on.")],
    evaluation: Annotated[list[str], typer.Option("--eval", help="Set or file to evaluate on; repeatable.")],
    ngram_words: Annotated[
        int, typer.Option("--ngram-words", min=2, help="How many consecutive words count as shared.")
    ] = 13,
    mirror: options.Mirror = None,
    json: options.Json = False,
) -> None:
    """Find training rows that share a run of words with eval rows. The exit code is 1 if there are any."""
    from sparroll.tasks.data.contamination import overlaps
    from sparroll.tasks.data.load import load

    where = None if mirror is None else str(mirror)
    ours = load(train, "train", where)
    theirs = [load(name, "eval", where) for name in evaluation]
    found = overlaps(ours.rows, [row for each in theirs for row in each.rows], ngram_words)
    if json:
        common.print_json({
            "train": ours.source, "train_rows": len(ours.rows), "ngram_words": ngram_words,
            "eval_rows": {each.source: len(each.rows) for each in theirs},
            "skipped": {each.source: dict(each.skipped) for each in (ours, *theirs)},
            "overlaps": [{"train": o.train_id, "eval": o.eval_id, "words": " ".join(o.words)} for o in found],
        })  # fmt: skip
    else:
        _print_overlaps(found, len(ours.rows), ours.source, ngram_words)
        for each in (ours, *theirs):
            _print_skipped(each, of=f" of {each.source}")
    raise typer.Exit(1 if found else 0)


def _print_overlaps(found: list[Any], rows: int, source: str, ngram_words: int) -> None:
    console = Console(highlight=False)
    if found:
        table = _folded("training row", "eval row", "shared words")
        for each in found[:20]:
            rows_shown = (Text(common.harmless(name)) for name in (each.train_id, each.eval_id))
            table.add_row(*rows_shown, textwrap.shorten(" ".join(each.words), 100))
        console.print(table)
    if len(found) > 20:
        console.print(f"and {len(found) - 20:,} more; --json lists all of them")
    console.print(
        f"{len(found):,} of {rows:,} rows of {source} share {ngram_words} words in a row, or a whole shorter row, with "
        "an eval row",
        markup=False,
    )


def _print_skipped(loaded: Loaded, of: str = "") -> None:
    console = Console(highlight=False)
    for reason, count in loaded.skipped.most_common():
        console.print(f"skipped {count:,}{of}: {reason}", markup=False)


def _folded(*columns: str) -> Table:
    """A table whose cells go on in the next line where they are too wide, so that no name is cut."""
    return Table(*(Column(name, overflow="fold") for name in columns), box=None)


def _encoder(model: str | None, chat: bool, thinking: bool | None) -> PromptEncoder | None:
    if model is None:
        if chat:
            raise UserError("--chat needs --model, because the chat template belongs to the model's tokenizer")
        return None
    from sparroll.engines.load_model import load_tokenizer

    return PromptEncoder(load_tokenizer(model), chat, thinking)


def _prompt(row: Row) -> Prompt:
    return Prompt(row.row_id, row.text, "", messages=row.messages)


def _shown(encoder: PromptEncoder | None, row: Row) -> str:
    """The prompt as the model sees it: with a tokenizer, the chat template included."""
    return row.text if encoder is None else encoder.text(_prompt(row))


def _sample(row: Row, prompt: str) -> dict[str, Any]:
    cases = None if row.tests is None else len(row.tests.cases())
    return {"id": row.row_id, "prompt": prompt, "answer": row.answer, "tests": cases, "difficulty": row.difficulty}


def _print_sample(console: Console, row: Row, prompt: str) -> None:
    verdict = f"answer {row.answer}" if row.tests is None else f"{len(row.tests.cases())} {row.tests.style} tests"
    difficulty = f", difficulty {row.difficulty}" if row.difficulty else ""
    title = common.harmless(f"{row.row_id}: {verdict}{difficulty}")
    console.rule(title.replace("[", "\\["), align="left")
    # The end stays, because that is where a chat template asks for the answer.
    long = len(prompt) > _SAMPLE_CHARACTERS
    cut = f"{prompt[:-_END_CHARACTERS][: _SAMPLE_CHARACTERS - _END_CHARACTERS]} ... {prompt[-_END_CHARACTERS:]}"
    console.print(common.harmless(cut if long else prompt), markup=False, soft_wrap=True)


def _histogram(lengths: list[int], unit: str) -> Table:
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // _BINS))
    counts = [0] * ((high - low) // width + 1)
    for length in lengths:
        counts[(length - low) // width] += 1
    table = Table(unit, "rows", "", box=None)
    for place, count in enumerate(counts):
        start = low + place * width
        span = f"{start:,} to {start + width - 1:,}" if width > 1 else f"{start:,}"
        table.add_row(span, f"{count:,}", "█" * -(-count * _BAR // max(counts)) if count else "")
    return table
