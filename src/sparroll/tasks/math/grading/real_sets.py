r"""Sets of real numbers in their notations: intervals (also `]2,5[`), inequalities and chains of them, set-builders,
unions, complements. All become sets of sympy. Works on cleaned text."""

from __future__ import annotations

import re

import sympy
from sympy import Basic, FiniteSet, Interval, Set, Symbol, oo

from sparroll.tasks.math.grading import algebra, magnitude
from sparroll.tasks.math.grading.algebra import Unreadable
from sparroll.tasks.math.grading.splitting import split, stripped

_RELATION = re.compile(r"\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|<|>|=")
_INEQUALITY = re.compile(r"\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|<|>")
_MEMBER = re.compile(r"^\s*(\\?[A-Za-z]+(?:_\{?\w+\}?)?)\s*\\(not)?\\?in(?![A-Za-z])\s*(.+)$", re.DOTALL)
_BUILDER = re.compile(
    r"^\s*(\\?[A-Za-z]+)\s*(?:\\in\s*(\\mathbb\s*\{?\s*[A-Z]\s*\}?|[^|:]+?))?\s*(?:\||:|\"such that\")\s*(.+)$",
    re.DOTALL,
)
_OR = re.compile(
    r'\s*,?\s*(?:"\s*(?:or|OR|Or)\s*,?\s*"|\\vee(?![A-Za-z])|\\cup(?![A-Za-z])|(?<![A-Za-z\\])or(?![A-Za-z]))\s*'
)
_AND = re.compile(
    r'\s*,?\s*(?:"\s*(?:and|AND|but)\s*,?\s*"|\\wedge(?![A-Za-z])|(?<![A-Za-z\\])(?:and|but)(?![A-Za-z])|,|;)\s*'
)
_EXCEPT = re.compile(
    r'^"?\s*(?:x\s*\\in\s*\\mathbb\{R\}|\\mathbb\{R\}|(?:all\s+)?(?:real\s+numbers?|reals?'
    r"|real\s+values?)(?:\s+(?:x|of\s+x))?|all\s+x|all\s+real\s+x)\s*,?\s*"
    r'(?:except|excluding|but|other\s+than|not\s+equal\s+to)(?:\s+for)?\s*"?\s*(.+?)\s*"?$'
)
_CONDITION = re.compile(
    r'^"?\s*(?:all|every|any|values?|numbers?|the)\b[^<>=\\]*?\b(?:with|such\s+that|where|satisfying'
    r'|for\s+which)\s*"?\s*(.+)$',
    re.DOTALL,
)
_NAMED = {
    "R": sympy.S.Reals,
    "N": sympy.S.Naturals,
    "Z": sympy.S.Integers,
    "Q": sympy.S.Rationals,
    "C": sympy.S.Complexes,
}
_BLACKBOARD = re.compile(r"\\math(?:bb|bf)\s*\{?\s*([RNZQC])\s*\}?")


def looks_like_set(text: str) -> bool:
    """Whether a text has the signs of a set of real numbers other than a plain list."""
    return bool(
        _INEQUALITY.search(text)
        or re.search(
            r"\\(?:cup|cap|setminus|in|mathbb|notin)(?![A-Za-z])|^\s*\][^\[\]]*[\[\]]$|^\s*\[[^\[\]]*\[$", text
        )
        or re.match(r"^\s*(?:\[[^\[\]]*\)|\([^\[\]]*\])\s*$", text)
        or _EXCEPT.match(text)
        or re.match(r"^\\\{.*(?:\||:).*\\\}$", text)
    )


def is_set(text: str) -> bool:
    """Whether a text is read as a set of real numbers."""
    try:
        real_set(text)
    except Unreadable:
        return False
    return True


def real_set(text: str) -> tuple[Set, str | None]:
    """The set, and the variable that it is about if the text names one freely. Raises Unreadable."""
    text = stripped(text)
    condition = _CONDITION.match(text)
    if condition and _RELATION.search(condition[1]):
        text = condition[1].strip()
    excepted = _EXCEPT.match(text)
    if excepted:
        values = [_number(part) for part in _values(excepted[1])]
        return sympy.Complement(sympy.S.Reals, FiniteSet(*values)), None
    twice = re.fullmatch(r"(\\?[A-Za-z]+)\s*\\ne\s*([^,;=<>]*\\pm[^,;=<>]*)", text)
    if twice:
        values = [_number(part) for part in _values(twice[2])]
        return sympy.Complement(sympy.S.Reals, FiniteSet(*values)), twice[1]
    conditions = _split_by(_AND, text)
    if len(conditions) > 1 and _MEMBER.match(conditions[0]) and all(_RELATION.search(part) for part in conditions[1:]):
        return _joined([real_set(part) for part in conditions], sympy.Intersection)
    member = _MEMBER.match(text)
    if member and not _INEQUALITY.search(member[1]):
        inner, _ = real_set(member[3])
        variable = member[1]
        return (sympy.Complement(sympy.S.Reals, inner) if member[2] else inner), variable
    unions = _split_by(_OR, text)
    if len(unions) > 1:
        return _joined([real_set(part) for part in unions], sympy.Union)
    for sign, operation in ((r"\cap", sympy.Intersection), (r"\setminus", sympy.Complement)):
        parts = split(text, (sign,))
        if len(parts) > 1:
            sets = [real_set(part)[0] for part in parts]
            found = sets[0]
            for one in sets[1:]:
                found = operation(found, one)
            return found, None
    minus = re.match(r"^(\\mathbb\s*\{?R\}?)\s*(?:-|/)\s*(\\\{.+\\\})$", text)
    if minus:
        return sympy.Complement(sympy.S.Reals, real_set(minus[2])[0]), None
    signed = re.fullmatch(r"\\mathbb\s*\{?\s*R\s*\}?\s*(?:\^|_)\s*\{?\s*(\+|-|>\s*0|<\s*0|\\ge\s*0|\*)\s*\}?", text)
    if signed:
        positive, negative = Interval.open(0, oo), Interval.open(-oo, 0)
        return {
            "+": positive,
            ">": positive,
            "-": negative,
            "<": negative,
            "\\": Interval(0, oo),
            "*": sympy.Union(negative, positive),
        }[signed[1][0]], None
    board = _BLACKBOARD.fullmatch(text)
    if board:
        return _NAMED[board[1]], None
    if re.fullmatch(r"\\emptyset|\\\{\s*\\\}", text):
        return sympy.S.EmptySet, None
    if (interval := _interval(text)) is not None:
        return interval, None
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return _braces(text[2:-2]), None
    if _INEQUALITY.search(text):
        parts = _split_by(_AND, text)
        if len(parts) > 1:
            parts = _with_subjects(parts)
            if any(not _RELATION.search(part) for part in parts):
                raise Unreadable(text)
            both = _joined([real_set(part) for part in parts], sympy.Intersection)
            if both[0] is sympy.S.EmptySet and not re.search(r"and|but|\\wedge", text):
                # x < -1, x > 3 lists two parts of one set.
                return _joined([real_set(part) for part in parts], sympy.Union)
            return both
        return _chain(text)
    single = re.fullmatch(r"(\\?[A-Za-z]+)\s*=\s*(.+)", text, re.DOTALL)
    if single:
        return FiniteSet(*[_number(part) for part in _values(single[2])]), single[1]
    raise Unreadable(text)


def _split_by(pattern: re.Pattern[str], text: str) -> list[str]:
    """Split at matches that stand outside all brackets. Brackets of intervals come in any combination, so a split at
    every match counts if all its parts have brackets in pairs."""
    everywhere = [part.strip() for part in pattern.split(text)]
    if len(everywhere) > 1 and all(part and _paired(part) for part in everywhere):
        return everywhere
    parts, last, place = [], 0, 0
    depths = _depths(text)
    while (found := pattern.search(text, place)) is not None:
        place = max(found.end(), found.start() + 1)
        if depths[found.start()] == 0:
            parts.append(text[last : found.start()])
            last = found.end()
    parts.append(text[last:])
    return [part.strip() for part in parts if part.strip()]


def _paired(text: str) -> bool:
    braces = text.count("{") == text.count("}")
    return braces and sum(map(text.count, "()[]")) % 2 == 0


def _depths(text: str) -> list[int]:
    depths, depth = [], 0
    place = 0
    while place < len(text):
        sign = text[place]
        if sign == "\\" and place + 1 < len(text):
            if text[place + 1] == "}":
                depth -= 1
            depths += [depth, depth]
            if text[place + 1] == "{":
                depth += 1
            place += 2
            continue
        if sign in ")}":
            depth -= 1
        depths.append(depth)
        if sign in "({":
            depth += 1
        place += 1
    # Intervals such as [1,2) do not balance by kind.
    return [max(0, number) for number in depths] if depth == 0 else _interval_depths(text)


def _interval_depths(text: str) -> list[int]:
    depths, depth = [], 0
    for sign in text:
        if depth and sign in ")]":
            depth -= 1
            depths.append(depth)
        else:
            depths.append(depth)
            if sign in "([":
                depth += 1
    return depths


def _joined(parts: list[tuple[Set, str | None]], operation: type) -> tuple[Set, str | None]:
    names = {name for _, name in parts if name}
    if len(names) > 1:
        raise Unreadable("a set in several variables")
    return operation(*[one for one, _ in parts]), next(iter(names), None)


def _with_subjects(parts: list[str]) -> list[str]:
    """`x > 2, \\ne 3` is about x throughout."""
    first = re.match(r"\s*(\\?[A-Za-z]+)", parts[0])
    name = first[1] if first else "x"
    excluded = re.fullmatch(r"\s*\\?[A-Za-z]+\s*\\ne\s*[^<>=]+", parts[0]) is not None
    found = []
    for part in parts:
        if _INEQUALITY.match(part):
            part = f"{name} {part}"
        elif excluded and not _RELATION.search(part):
            part = rf"{name} \ne {part}"
        found.append(part)
    return found


def _values(text: str) -> list[str]:
    text = text.replace('"', " ")
    text = re.sub(r"^\s*\\?[A-Za-z]\s*=\s*", "", text)
    parts = [part for part in re.split(r",|;|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", text) if part.strip()]
    found: list[str] = []
    for part in parts:
        part = re.sub(r"^\s*\\?[A-Za-z]\s*=\s*", "", part)
        if r"\pm" in part:
            found += [part.replace(r"\pm", "+", 1), part.replace(r"\pm", "-", 1)]
        else:
            found.append(part)
    return found


def _number(latex: str) -> Basic:
    found = algebra.parse(stripped(latex))
    if not isinstance(found, sympy.Expr):
        raise Unreadable(latex)
    if magnitude.too_large(found):
        raise Unreadable(latex)
    return found.doit()


def _interval(text: str) -> Set | None:
    found = re.fullmatch(r"([\[\](])\s*(.+?)\s*([\[\])])", text, re.DOTALL)
    if found is None:
        return None
    ends = split(found[2], (",", ";"))
    if len(ends) != 2 or ((found[1], found[3]) in (("]", ")"), ("(", "[")) and "]" not in text):
        return None
    low, high = (_number(end) for end in ends)
    return Interval(low, high, left_open=found[1] in "(]", right_open=found[3] in ")[")


def _braces(inner: str) -> Set:
    built = _BUILDER.match(inner)
    if built and not re.fullmatch(r"[^|:]*\|[^|:]*\|[^|:]*", inner[: built.start(3)]):
        found, name = real_set(built[3])
        if name is not None and name != built[1]:
            raise Unreadable(inner)
        domain = real_set(built[2])[0] if built[2] else sympy.S.Reals
        return sympy.Intersection(found, domain) if domain != sympy.S.Reals else found
    if _INEQUALITY.search(inner):
        return real_set(inner)[0]
    return FiniteSet(*[_number(part) for part in _values(inner)])


def _chain(text: str) -> tuple[Set, str | None]:
    """`a < x \\le b`, `x \\ge 3`, `|x| < 3`, `x^2 > 4`."""
    signs = [found.group() for found in _RELATION.finditer(text)]
    sides = [side.strip() for side in _RELATION.split(text)]
    if len(sides) < 2 or any(not side for side in sides) or len(sides) > 6:
        raise Unreadable(text)
    parsed = [algebra.parse(side) for side in sides]
    symbols = {symbol for side in parsed for symbol in side.free_symbols}
    subjects = [side for side in parsed if isinstance(side, Symbol)]
    between = len(parsed) == 3 and isinstance(parsed[1], Symbol)
    if len(symbols) != 1 and len(subjects) != 1 and not between:
        raise Unreadable(text)
    variable = parsed[1] if between else subjects[0] if subjects else next(iter(symbols))
    found: Set = sympy.S.Reals
    for sign, left, right in zip(signs, parsed[:-1], parsed[1:], strict=True):
        found = sympy.Intersection(found, _solutions(sign, left, right, variable))
    name = next((side for side, one in zip(sides, parsed, strict=True) if one == variable), str(variable))
    return found, name


def _solutions(sign: str, left: Basic, right: Basic, variable: Basic) -> Set:
    if magnitude.too_large(left) or magnitude.too_large(right):
        raise Unreadable("too large")
    if right == variable and variable not in left.free_symbols:
        left, right = right, left
        sign = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}.get(sign, sign)
    if left == variable and variable not in right.free_symbols:
        end = right.doit()
        return {
            "<": lambda: Interval.open(-oo, end),
            r"\le": lambda: Interval(-oo, end),
            ">": lambda: Interval.open(end, oo),
            r"\ge": lambda: Interval(end, oo),
            r"\ne": lambda: sympy.Complement(sympy.S.Reals, FiniteSet(end)),
            "=": lambda: FiniteSet(end),
        }[sign]()
    relation = {"<": sympy.Lt, r"\le": sympy.Le, ">": sympy.Gt, r"\ge": sympy.Ge, r"\ne": sympy.Ne, "=": sympy.Eq}[sign]
    plain = Symbol("x", real=True)
    try:
        difference = (left - right).doit().xreplace({variable: plain})
        if difference.free_symbols != {plain} or not _tame(difference, plain):
            raise Unreadable("not an inequality in one variable")
        return relation(difference, 0).as_set()
    except (Unreadable, MemoryError):
        raise
    except Exception as error:
        raise Unreadable("an inequality that is not solved") from error


def _tame(expr: sympy.Expr, variable: Symbol) -> bool:
    """Whether an inequality is solved quickly: polynomials and fractions of low degree, and absolute values of them."""
    plain = expr.replace(sympy.Abs, lambda inner: inner)

    def low_degree() -> bool:
        top, bottom = sympy.fraction(sympy.together(plain))
        return all(sympy.Poly(part, variable).degree() <= 4 for part in (top, bottom))

    return magnitude.attempted(low_degree, False)


def same_sets(one: Set, other: Set) -> bool:
    """Whether two sets have the same members."""
    if one == other:
        return True
    if isinstance(one, Interval) and isinstance(other, Interval):
        return (
            (one.left_open, one.right_open) == (other.left_open, other.right_open)
            and algebra.same(one.start, other.start)
            and algebra.same(one.end, other.end)
        )
    if isinstance(one, FiniteSet) and isinstance(other, FiniteSet):
        return len(one) == len(other) and all(any(algebra.same(a, b) for b in other) for a in one)
    if isinstance(one, sympy.Union) and isinstance(other, sympy.Union) and len(one.args) == len(other.args):
        return all(any(same_sets(a, b) for b in other.args) for a in one.args)
    return magnitude.attempted(lambda: bool(one.symmetric_difference(other).is_empty), False)
