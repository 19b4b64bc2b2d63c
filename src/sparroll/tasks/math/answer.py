r"""The answer in a response: the content of its last box, found in linear time, in characters that a LaTeX parser
knows. Nothing here does mathematics.

`last_boxed` reads `\boxed{...}`, `\boxed 5` and `\fbox{...}` behind the thinking part. `plain_signs` replaces
characters that look like ASCII or have a LaTeX name (full-width digits, other minus signs, superscripts, fractions in
one character) and drops invisible ones.
"""

from __future__ import annotations

import re
import unicodedata

from sparroll.tasks.math.chinese import in_english
from sparroll.tasks.math.grading.splitting import words_in
from sparroll.tasks.thinking import after_thinking

SCAN_CHARS = 1_000_000
"""Only this much at the end of a response is searched for a box."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LAST_SET = re.compile(r"\{(\s*(?:\\left\s*)?\\\{.{0,1000}\\\})\s*(?:\\[\])])?[$.\s]*\Z", re.DOTALL)
"""A box that a set's own brace closes, at the end of the response."""
_BARE = re.compile(r"\s*(?!\\boxed|\\fbox)(\\[A-Za-z]+|[^\s{}$\\.,;]+(?:[.,][^\s{}$\\.,;]+)*)")

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_SIGNS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"),
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": r"\div ",
    "±": r"\pm ",
    "π": r"\pi ",
    "θ": r"\theta ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "°": r"^\circ ",
    "⁄": "/",
    "∕": "/",
    "′": "'",
    "…": r"\ldots ",
    "″": "''",
    "€": r"\euro ",
    "£": r"\pounds ",
    "¥": r"\yen ",
    "₹": r"\rupee ",
    "¢": r"\text{cents}",
    "。": ".",
    "、": ",",
    "【": "[",
    "】": "]",
}
_GREEK = frozenset(
    words_in(
        "alpha beta gamma delta epsilon zeta eta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega"
    )
)
_THIN_SPACE = re.compile(r"(?<=\d)\\[,!](?=\d{3}(?!\d))")
_BARRED = re.compile("(?:\\d[\u0304\u0305])+")
_DOTTED = re.compile("(\\d)\u0307")
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z]|\((?:[^()]*)\))")
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")


def last_boxed(response_text: str) -> str | None:
    r"""The content of the last box that is not empty; None if there is none.

    A box inside a box belongs to the outer one. If the last box never closes, there is no answer, not even that of a
    box before it, because the response was cut while it gave its answer. Boxes inside the thinking part do not count.

    >>> last_boxed(r"so \boxed{3}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    text = after_thinking(response_text)[-SCAN_CHARS:]
    found: str | None = None
    place = 0
    while (box := _BOX.search(text, place)) is not None:
        rest = box.end()
        while rest < len(text) and text[rest].isspace():
            rest += 1
        if text[rest : rest + 1] == "{":
            end = _closing_brace(text, rest)
            if end is None:
                end = _closing_brace(text, rest, escaped=True)
            if end is None and (last := _LAST_SET.match(text, rest)) is not None and _in_pairs(last[1]):
                end = last.end(1)
            if end is None:
                return None
            content, place = text[rest + 1 : end], end + 1
        else:
            bare = _BARE.match(text, box.end())
            content, place = (bare.group(1), bare.end()) if bare else ("", box.end())
        if content.strip():
            found = _unboxed(content)
    return found


def _closing_brace(text: str, opening: int, escaped: bool = False) -> int | None:
    """Where the brace closes. `escaped` also counts braces behind a backslash, for answers that mix them up."""
    depth = 0
    for sign in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(sign.group()[-1] if escaped else sign.group(), 0)
        if depth == 0:
            return sign.end() - 1
    return None


def _in_pairs(text: str) -> bool:
    """Whether the braces without a backslash are balanced, and so are those with one."""
    signs = [sign.group() for sign in _BRACE.finditer(text)]
    return all(signs.count(opening) == signs.count(closing) for opening, closing in (("{", "}"), (r"\{", r"\}")))


def _unboxed(content: str) -> str:
    r"""Take off all boxes around a box, if nothing else is in the outer one: `\boxed{\boxed{5}}` means 5."""
    closing = _closing_braces(content)
    begin, end = _stripped(content, 0, len(content))
    while (box := _BOX.match(content, begin)) is not None:
        brace, _ = _stripped(content, box.end(), end)
        if content[brace : brace + 1] != "{" or closing.get(brace) != end - 1:
            break
        begin, end = _stripped(content, brace + 1, end - 1)
    return content[begin:end]


def _closing_braces(text: str) -> dict[int, int]:
    """Where each brace closes, by where it opens."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for sign in _BRACE.finditer(text):
        if sign.group() == "{":
            opened.append(sign.start())
        elif sign.group() == "}" and opened:
            found[opened.pop()] = sign.start()
    return found


def _stripped(text: str, begin: int, end: int) -> tuple[int, int]:
    """The part of a text without white space at its ends."""
    while begin < end and text[begin].isspace():
        begin += 1
    while begin < end and text[end - 1].isspace():
        end -= 1
    return begin, end


def plain_signs(text: str) -> str:
    """The same answer in ASCII and LaTeX commands. Characters that may mean several things stay as they are."""
    if not (text.isascii() and text.isprintable()):
        text = _BARRED.sub(lambda run: r"\overline{" + re.sub(r"\D", "", run.group()) + "}", text)
        text = _DOTTED.sub(r"\\dot{\1}", text)
        text = _RAISED.sub(lambda run: "^{" + "".join(_SUPERSCRIPTS[sign] for sign in run.group()) + "}", text)
        text = _LOWERED.sub(lambda run: "_{" + "".join(_SUBSCRIPTS[sign] for sign in run.group()) + "}", text)
        text = _ROOT.sub(lambda root: r"\sqrt{" + root.group(1).removeprefix("(").removesuffix(")") + "}", text)
        text = in_english("".join(map(_plain_sign, text)))
    text = _THIN_SPACE.sub("", text).replace(r"\varnothing", r"\emptyset")
    # The space of `5\ ` at the end leaves its backslash.
    return re.sub(r"(?<!\\)\\$", "", " ".join(text.split())).rstrip()


def _plain_sign(sign: str) -> str:
    if sign.isascii():
        return sign if sign.isprintable() else " " if sign.isspace() else ""
    if sign in _SIGNS:
        return _SIGNS[sign]
    category = unicodedata.category(sign)
    # Unicode spells lambda without its b.
    greek = unicodedata.name(sign, "").removeprefix("GREEK SMALL LETTER ").casefold().replace("lamda", "lambda")
    if greek in _GREEK:
        return rf"\{greek} "
    if category in ("Cf", "Cc", "Mn"):
        return ""
    if category.startswith("Z"):
        return " "
    if category == "Nd":
        return str(unicodedata.decimal(sign))
    if category == "No" and "VULGAR" in unicodedata.name(sign, ""):
        top, _, bottom = unicodedata.normalize("NFKC", sign).partition("⁄")
        return rf"\frac{{{top}}}{{{bottom}}}" if top and bottom else sign
    if 0xFF01 <= ord(sign) <= 0xFF5E:
        return chr(ord(sign) - 0xFEE0)
    return sign
