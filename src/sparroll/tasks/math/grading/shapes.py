r"""Whether two answers of any shape are equal: values, lists, sets, tuples, matrices, named values, equations, sets of
real numbers. Single values are compared in quantities.py, sets of real numbers in real_sets.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from sparroll.tasks.math.grading import algebra, real_sets, units
from sparroll.tasks.math.grading.algebra import Unreadable
from sparroll.tasks.math.grading.quantities import same_value
from sparroll.tasks.math.grading.relations import (
    NAMED,
    RATIO,
    congruence,
    consistent,
    function_name,
    plain_name,
    rounds_to,
    same_chains,
    same_classes,
    same_ratio,
    statement,
    variables,
    with_variable_of,
)
from sparroll.tasks.math.grading.sentences import value_of
from sparroll.tasks.math.grading.splitting import environment, has_top, split, whole_group

Kind = Literal["one", "list", "set", "tuple", "closed", "matrix", "named"]

MAX_ITEMS = 200
_INNER_JOIN = re.compile(r"\b(?:and|or)\b")


@dataclass(frozen=True)
class Shape:
    """What an answer is made of, at its top level.

    >>> Shape("tuple", ("1", "2"))
    """

    kind: Kind
    items: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Of named values."""
    rows: int = 0
    """Of a matrix."""


def same(gold: str, answer: str) -> bool:
    """Whether two cleaned answers are equal. Raises Unreadable if the gold one cannot be read."""
    gold, answer = gold.strip(), answer.strip()
    if not answer or r"\ldots" in (gold, answer):
        return gold == answer
    if (classes := (congruence(gold), congruence(answer)))[0] is not None:
        return same_classes(*classes)
    if real_sets.looks_like_set(gold) or real_sets.looks_like_set(answer):
        found = _same_real_sets(gold, answer)
        if found is not None:
            return found
    one, other = shape(gold), shape(answer)
    if one.kind == "one" and other.kind == "one":
        return _same_single(gold, answer)
    if other.kind == "matrix" or one.kind == "matrix":
        return _same_matrices(one, other)
    if "one" in (one.kind, other.kind):
        one, other = (
            (_all_named(text) or found) if found.kind == "one" else found
            for text, found in ((gold, one), (answer, other))
        )
    if "named" in (one.kind, other.kind):
        return _same_named(one, other)
    return _same_groups(one, other, gold, answer)


def shape(text: str) -> Shape:
    """The shape of a cleaned answer."""
    text = text.strip()
    table = environment(text)
    if table is not None:
        name, cells = table
        if name == "vmatrix":
            return Shape("one", (text,))
        equations = all("=" in "".join(row) for row in cells)
        if "matrix" in name or (name == "array" and not equations):
            return Shape("matrix", tuple(cell for row in cells for cell in row), rows=len(cells))
        return shape(",".join(" ".join(row).strip(" ,;") for row in cells))
    text = _without_lone_braces(text)
    if text == r"\emptyset":
        return Shape("set", ())
    compound = units.quantity(text, glued_letters=False) if '"' in text or re.search("[A-Za-z]{2}", text) else None
    if compound is not None and len(compound) > 1:
        return Shape("one", (text,))
    parts = _items(text)
    if len(parts) > 1:
        return _list_shape(parts)
    group = whole_group(text)
    if group is not None:
        inner = _items(group[1])
        if (group[0], group[2]) == (r"\{", r"\}"):
            if environment(group[1]) is not None:
                return shape(group[1])
            if (nested := whole_group(group[1])) is not None and nested[0] == "{":
                inner = _items(nested[1])
            if len(inner) > 1 and (named_values := _list_shape(inner)).kind == "named":
                return named_values
            return Shape("set", tuple(_spread(inner)) if group[1] else ())
        if len(inner) > 1:
            kind: Kind = "closed" if (group[0], group[2]) == ("[", "]") else "tuple"
            return Shape(kind, tuple(inner))
        if (group[0], group[2]) in (("(", ")"), ("[", "]"), ("{", "}")) and group[1]:
            return shape(group[1])
    if r"\vec{" in text and (vector := _of_basis_vectors(text)) is not None:
        return vector
    members = re.match(r"^\\?[A-Za-z]\s*\\in\s*(\\\{.+\\\})$", text)
    if members:
        return shape(members[1])
    named = NAMED.match(text)
    if named and not has_top(named[2], ("=",)):
        values = shape(named[2])
        if values.kind != "one":
            return values
        if len(spread := _spread([named[2]])) > 1:
            return Shape("list", tuple(spread))
    tuple_of_names = re.match(r"^\(\s*([^()=]+)\)\s*=\s*(\(.+\))$", text, re.DOTALL)
    if tuple_of_names:
        return _tuple_of_names(tuple_of_names[1], tuple_of_names[2])
    if len(spread := _spread([text])) > 1:
        return Shape("list", tuple(spread))
    return Shape("one", (text,))


def _of_basis_vectors(text: str) -> Shape | None:
    r"""`3\vec{i} - \vec{j}` as the tuple of its coordinates."""
    letters = "ijk" if r"\vec{k}" in text else "ij"
    if not re.search(r"\\vec\{[ij]\}", text) or re.search(r"[=<>,;]", text):
        return None
    coordinates = algebra.coefficients(text, [f"vec{{{letter}}}" for letter in letters])
    return None if coordinates is None else Shape("tuple", tuple(coordinates))


def _without_lone_braces(text: str) -> str:
    group = whole_group(text)
    while group is not None and (group[0], group[2]) == ("{", "}"):
        # \boxed{{1,2}} means the set.
        text = rf"\{{{group[1]}\}}" if has_top(group[1], (",",)) else group[1]
        group = whole_group(text)
    return text


def _items(text: str) -> list[str]:
    parts = [part for part in split(text, (",", ";", "\\\\")) if part]
    found: list[str] = []
    for part in parts:
        found += _split_joins(part)
    return [item for item in found if item.strip(' "')]


def _split_joins(part: str) -> list[str]:
    """Split at `and` and `or` outside brackets, also inside upright text."""
    if not _INNER_JOIN.search(part) and r"\vee" not in part and r"\wedge" not in part:
        return [part]
    pieces = units.pieces(part)
    depth, last, parts = 0, 0, []
    for piece in pieces:
        depth += {"{": 1, "(": 1, "[": 1, r"\{": 1, "}": -1, ")": -1, "]": -1, r"\}": -1}.get(piece.text, 0)
        if depth == 0 and piece.text.casefold() in ("and", "or", r"\vee", r"\wedge"):
            parts.append(part[last : piece.start])
            last = piece.end
    parts.append(part[last:])
    return [_even_quotes(one) for one in parts if one.strip(' "')]


def _even_quotes(text: str) -> str:
    text = text.strip()
    if text.count('"') % 2:
        text = text[:-1] if text.endswith('"') else text[1:] if text.startswith('"') else text.replace('"', " ", 1)
    return text.replace('""', " ").strip()


def _spread(items: list[str]) -> list[str]:
    r"""Each \pm as its two values."""
    found: list[str] = []
    for item in items:
        if re.search(r"\\(?:pm|mp)(?![A-Za-z])", item):
            for plus, minus in (("+", "-"), ("-", "+")):
                one = re.sub(r"\\pm(?![A-Za-z])", plus, re.sub(r"\\mp(?![A-Za-z])", minus, item))
                found.append(re.sub(r"(^|[=(,{])\s*\+", r"\1", one))
        else:
            found.append(item)
    return found


def _list_shape(parts: list[str]) -> Shape:
    if len(parts) > MAX_ITEMS:
        raise Unreadable("a list of too many items")
    parts = [part if NAMED.match(part) else value_of(part) or part for part in _spread(parts)]
    named = [NAMED.match(part) for part in parts]
    if all(named):
        pairs = [(plain_name(found[1]), found[2].strip()) for found in named if found]
        if len({name for name, _ in pairs}) == 1:
            return Shape("list", tuple(value for _, value in pairs))
        if len({name for name, _ in pairs}) == len(pairs):
            return Shape("named", tuple(value for _, value in pairs), tuple(name for name, _ in pairs))
    # x = 1, 2 lists values of x.
    if named[0] and not any("=" in part for part in parts[1:]):
        return Shape("list", tuple(_spread([named[0][2], *parts[1:]])))
    return Shape("list", tuple(parts))


def _tuple_of_names(names: str, values: str) -> Shape:
    found = shape(values)
    given = [plain_name(name) for name in split(names, (",",))]
    if found.kind == "tuple" and len(found.items) == len(given) and len(set(given)) == len(given):
        return Shape("named", found.items, tuple(given))
    return found


def _same_real_sets(gold: str, answer: str) -> bool | None:
    """The verdict if both sides are sets of real numbers; None to try other shapes. Raises Unreadable if the gold one
    has to be a set and cannot be read."""
    try:
        one, variable = real_sets.real_set(gold)
    except Unreadable:
        return None
    try:
        other, other_variable = real_sets.real_set(answer)
    except Unreadable:
        if not real_sets.looks_like_set(gold):
            return None
        return None if shape(answer).kind in ("list", "set") and not one.is_Interval else False
    if variable and other_variable and plain_name(variable) != plain_name(other_variable):
        return False
    return real_sets.same_sets(one, other)


def _same_groups(one: Shape, other: Shape, gold: str, answer: str) -> bool:
    ordered = {"tuple", "closed"}
    if one.kind == "one":
        return bool(other.items) and other.kind in ("set", "list") and all(same(gold, item) for item in other.items)
    if other.kind == "one":
        return bool(one.items) and one.kind in ("set", "list") and all(same(item, answer) for item in one.items)
    if one.kind == "set" and len(one.items) == 1 and other.kind in ordered:
        return same(one.items[0], answer)
    if other.kind == "set" and len(other.items) == 1 and one.kind in ordered:
        return same(gold, other.items[0])
    if one.kind in ordered or other.kind in ordered:
        if "set" in (one.kind, other.kind) or len(one.items) != len(other.items):
            return False
        if "closed" in (one.kind, other.kind) and one.kind != other.kind and len(one.items) == 2:
            return False
        return all(same(a, b) for a, b in zip(one.items, other.items, strict=True))
    if _progress_alike(one.items, other.items):
        return True
    return _same_members(_counted_out(one.items), _counted_out(other.items))


def _counted_out(items: tuple[str, ...]) -> tuple[str, ...]:
    r"""`1, 2, \ldots, 10` with all its members, if those before the dots are equally far apart and reach the last."""
    found = algebra.progression(items)
    if found is None or found[2] > MAX_ITEMS:
        return items
    first, step, count = found
    return tuple(str(first + n * step) for n in range(count))


def _progress_alike(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    r"""Whether `1, 2, \ldots, n` and `1, 2, 3, \ldots, n` go from the same member to the same one in equal steps."""
    starts = []
    for items in (gold, answer):
        if items.count(r"\ldots") != 1 or items[-2:-1] != (r"\ldots",):
            return False
        values = [algebra.exact_number(item) for item in items[:-2]]
        known = [value for value in values if value is not None]
        if len(known) < max(2, len(values)):
            return False
        steps = {after - before for before, after in zip(known[:-1], known[1:], strict=True)}
        starts.append((known[0], steps))
    return starts[0] == starts[1] and len(starts[0][1]) == 1 and same(gold[-1], answer[-1])


def _same_members(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """Whether two lists have the same members in any order. A member may be named twice."""
    if len(set(gold)) > len(answer) and len(gold) != len(answer):
        gold = tuple(_distinct(gold))
    matches = [[same(a, b) for b in answer] for a in gold]
    covered = all(any(row) for row in matches) and all(any(row[n] for row in matches) for n in range(len(answer)))
    return covered and bool(gold) == bool(answer)


def _distinct(items: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for item in items:
        if not any(same(item, other) for other in found):
            found.append(item)
    return found


def _all_named(text: str) -> Shape | None:
    """`a = b = 2` as named values; None for anything else."""
    *names, value = split(text, ("=",))
    if len(names) < 2 or len(set(names)) < len(names) or not all(NAMED.match(f"{name} = 0") for name in names):
        return None
    return Shape("named", (value,) * len(names), tuple(map(plain_name, names)))


def _same_named(one: Shape, other: Shape) -> bool:
    if one.kind == other.kind == "named":
        given = dict(zip(other.names, other.items, strict=True))
        wanted = dict(zip(one.names, one.items, strict=True))
        if wanted.keys() != given.keys():
            wanted = {name.casefold(): value for name, value in wanted.items()}
            given = {name.casefold(): value for name, value in given.items()}
        return wanted.keys() == given.keys() and all(same(wanted[name], given[name]) for name in wanted)
    named, plain = (one, other) if one.kind == "named" else (other, one)
    if plain.kind not in ("tuple", "list") or len(plain.items) != len(named.items):
        return False
    by_name = tuple(value for _, value in sorted(zip(named.names, named.items, strict=True)))
    gold_first = named is one
    orders = [by_name, named.items] if plain.kind == "list" else [by_name]
    return any(
        all(same(a, b) if gold_first else same(b, a) for a, b in zip(order, plain.items, strict=True))
        for order in orders
    )


def _same_matrices(one: Shape, other: Shape) -> bool:
    if one.kind == other.kind == "matrix":
        alike = one.rows == other.rows and len(one.items) == len(other.items)
        return alike and all(same(a, b) for a, b in zip(one.items, other.items, strict=True))
    table, plain = (one, other) if one.kind == "matrix" else (other, one)
    if plain.kind in ("closed", "list", "set", "tuple") and table.rows > 1:
        rows = [_row(item) for item in plain.items]
        if all(row and len(row) == len(rows[0]) for row in rows):
            written = Shape("matrix", tuple(cell for row in rows for cell in row), rows=len(rows))
            return _same_matrices(one, written) if table is one else _same_matrices(written, other)
    vector = table.rows in (1, len(table.items))
    if (vector and plain.kind in ("tuple", "list")) or (vector and plain.kind == "closed" and len(plain.items) > 2):
        alike = len(one.items) == len(other.items)
        return alike and all(same(a, b) for a, b in zip(one.items, other.items, strict=True))
    if plain.kind == "one":
        return _whole_matrices(one, other)
    return False


def _row(text: str) -> tuple[str, ...]:
    """The cells of a row in brackets; none if the text is no such row."""
    found = shape(text)
    group = whole_group(text)
    return found.items if found.kind in ("closed", "tuple") or (group and group[0] == "[") else ()


def _whole_matrices(one: Shape, other: Shape) -> bool:
    """Expressions with matrices, such as 2 times one, are left to math-verify."""

    def latex(given: Shape) -> str:
        if given.kind == "one":
            return given.items[0]
        width = len(given.items) // given.rows
        rows = [" & ".join(given.items[n : n + width]) for n in range(0, len(given.items), width)]
        return r"\begin{pmatrix}" + r" \\ ".join(rows) + r"\end{pmatrix}"

    return algebra.equal(latex(one), latex(other))


def _same_single(gold: str, answer: str) -> bool:
    if RATIO.match(gold) or RATIO.match(answer):
        found = same_ratio(gold, answer)
        if found is not None:
            return found
    if (chains := same_chains(gold, answer)) is not None:
        return chains
    one, other = statement(gold), with_variable_of(statement(gold), statement(answer))
    if one.name and other.name and function_name(one.name) != function_name(other.name):
        assert one.sides is None or len(one.sides) == 2
        return bool(one.sides and other.sides) and _equations(one.sides, other.sides)
    if one.sides and not one.name and variables(*one.sides):
        return bool(other.sides) and _equations(one.sides, other.sides)
    if not consistent(other):
        return False
    if one.name and other.sides and not other.name and variables(other.sides[0]):
        return _equations(one.sides, other.sides) if one.sides else False
    if other.sides and algebra.unsolved(other.sides):
        return False
    wanted, given = one.values[-1], other.values[-1]
    if one.approximate:
        return rounds_to(wanted, given)
    if _group_again(wanted, given):
        return same(wanted, given)
    if not one.name and other.approximate:
        return same_value(wanted, given)
    return same_value(wanted, given)


def _group_again(wanted: str, given: str) -> bool:
    return shape(wanted).kind != "one" or shape(given).kind != "one"


def _equations(gold: tuple[str, str] | None, answer: tuple[str, str] | None) -> bool:
    return gold is not None and answer is not None and algebra.same_equation(gold, answer)
