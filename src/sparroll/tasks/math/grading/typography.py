r"""An answer without what is only looks: math delimiters, sizes, colours, spaces, boxes, unbalanced braces.

What stands in \text{...} comes out between double quotes, so that later steps know which letters were upright:
`5\text{ cm}` becomes `5 "cm"`. Nothing here knows what a number or a word means.
"""

from __future__ import annotations

import re

from sparroll.tasks.math.grading.splitting import without_doubles, words_in

_STYLE = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|[hH]uge|large|Large|LARGE|small|tiny|normalsize"
    r"|bf|rm|it|sf|tt"
    r"|bfseries|itshape|boldmath|noindent|nonumber|centering|checkmark|blacksquare|qed|left\.|right\.|null|relax|strut"
    r"|mathstrut|middle|hfill|par|newline|cr)(?![A-Za-z])"
)
_SIZED = re.compile(r"\\(?:left|right|mleft|mright|[bB]igg?[lrm]?)(?![A-Za-z])\s*")
_COLOR = re.compile(r"\\color\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}")
_SPACE = re.compile(
    r"\\(?:quad|qquad|thinspace|medspace|thickspace|enspace|hspace\*?\{[^{}]*\}|vspace\*?\{[^{}]*\})(?![A-Za-z])"
)
_DROPPED = re.compile(r"\\(?:tag\*?|label|phantom|hphantom|vphantom|rule|footnote)\s*\{[^{}]*\}")
_NAMES = {
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
    r"\dbinom": r"\binom",
    r"\tbinom": r"\binom",
    r"\leq": r"\le",
    r"\leqslant": r"\le",
    r"\leqq": r"\le",
    r"\geq": r"\ge",
    r"\geqslant": r"\ge",
    r"\geqq": r"\ge",
    r"\neq": r"\ne",
    r"\lt": "<",
    r"\gt": ">",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\lbrack": "[",
    r"\rbrack": "]",
    r"\lparen": "(",
    r"\rparen": ")",
    r"\lvert": "|",
    r"\rvert": "|",
    r"\vert": "|",
    r"\mid": "|",
    r"\colon": ":",
    r"\varnothing": r"\emptyset",
    r"\land": r"\wedge",
    r"\lor": r"\vee",
    r"\backslash": r"\setminus",
    r"\smallsetminus": r"\setminus",
    r"\R": r"\mathbb{R}",
    r"\Reals": r"\mathbb{R}",
    r"\iff": r"\Leftrightarrow",
    r"\dots": r"\ldots",
    r"\cdots": r"\ldots",
    r"\dotsc": r"\ldots",
    r"\dotsb": r"\ldots",
    r"\degree": r"^\circ ",
    r"\degrees": r"^\circ ",
    r"\textdegree": r"^\circ ",
    r"\textdollar": r"\$",
    r"\EUR": r"\euro",
    r"\texteuro": r"\euro",
    r"\textsterling": r"\pounds",
    r"\textyen": r"\yen",
    r"\simeq": r"\approx",
    r"\thickapprox": r"\approx",
    r"\ast": "*",
    r"\arcsinh": r"\operatorname{arsinh}",
    r"\cis": r"\operatorname{cis}",
    r"\exp": r"\exp",
    r"\And": r'"and"',
    r"\infin": r"\infty",
    r"\imath": "i",
    r"\tg": r"\tan",
    r"\ctg": r"\cot",
    r"\cotg": r"\cot",
    r"\arctg": r"\arctan",
    r"\cosec": r"\csc",
    r"\lg": r"\log_{10}",
    r"\jmath": "j",
    r"\textperiodcentered": r"\cdot",
}
_NAME = re.compile(r"\\[A-Za-z]+")
_KEEPS_ITS_ARGUMENT = (
    r"mathbf|boldsymbol|bm|mathit|underline|emph|uline|underbrace|ensuremath|mathop|mathsf|mathtt|mathnormal|smash"
    r"|boxed|fbox|framebox|mathclap|hbox|mathstrut|overbrace|mathord|mathrel|mathbin|hl"
)
_TEXT = (
    r"text|textbf|textit|textrm|textsf|texttt|textnormal|textsc|textup|mathrm|mbox|operatorname\*?|textmd|mathregular"
)
_WITH_ARGUMENT = re.compile(
    rf"\\(?P<kept>{_KEEPS_ITS_ARGUMENT})(?![A-Za-z])\s*\{{|\\(?P<text>{_TEXT})(?![A-Za-z])\s*\{{"
)
_TWO_ARGUMENTS = re.compile(r"\\(?:textcolor|colorbox)\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}(?=\s*\{)")
_FUNCTIONS = frozenset(
    words_in("sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln exp max min gcd lcm det arg")
)
_OTHER_FUNCTIONS = frozenset(words_in("tg ctg cotg arctg cosec"))
_FUNCTION_WORD = re.compile(
    r"(?<![\\A-Za-z\"])(?<!\d )"
    r"(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm)"
    r"(?=\s*[\d(\\^_{ a-zA-Z])(?![a-zA-Z]{2})"
)
_NATURAL_LOGARITHM = re.compile(r"\\log\s*_\s*(?:e|\{\s*e\s*\})")
_BASIS_VECTOR = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|hat|widehat|vec|mathbf\s*\{\s*\\hat|hat\s*\{\s*\\mathbf|hat\s*\{\s*\\boldsymbol)"
    r"\s*\{\s*\\?([ijk])(?:math)?\s*\}(?:(?<=\}\})|\})?(?!\s*=)"
)
_BINOMIAL = re.compile(r"\\binom\s*([^\W_])\s*([^\W_])(?![A-Za-z])")
_BARRED_TABLE = re.compile(
    r"\|\s*\\begin\{(matrix|array)\}(?:\{[lcr|\s]*\})?((?:(?!\\begin|\|).)*)\\end\{\1\}\s*\|", re.DOTALL
)
_SCRIPT = r"\s*(?:\{\s*([\w+-]+)\s*\}|(\w))\s*"
_CHOSEN = re.compile(
    rf"(?:(?<![\w}}])(?:\{{\s*\}}\s*)?[\^_]{_SCRIPT}(?P<before>[CP])\s*_{_SCRIPT}"
    rf"|(?<![\w\\}}])(?P<under>[CA])\s*_{_SCRIPT}\^{_SCRIPT}|(?<![\w\\}}])(?P<over>[CA])\s*\^{_SCRIPT}_{_SCRIPT})"
    r"(?![\w^_])"
)
_UPRIGHT_CHOICE = re.compile(
    r'([\^_]\s*(?:\{[^{}]*\}|\w)\s*)"\s*([CP])\s*"(?=\s*_)|"\s*([CA])\s*"(?=\s*[\^_]\s*(?:\{[^{}]*\}|\w)\s*[\^_])'
)
_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|sigma|omega|phi|rho|tau"
_BRACE = re.compile(r"\\\\|\\[{}]|[{}]")
_OUTER_MARKS = re.compile(r"^(?:\*\*|__|`+)(.*?)(?:\*\*|__|`+)([.,]?)$", re.DOTALL)
_END = re.compile(r"(?:\s|\\[,;:!> ]|~|[.,;:](?<!\\[;,:]))+$")
DEPTH = 40
"""Deeper nesting of commands is left as it is."""


def clean(latex: str) -> str:
    r"""The same answer without what is only looks; text stands between double quotes.

    >>> clean(r"\textcolor{red}{\dfrac{1}{2}\text{ cm}}.")
    '\\frac{1}{2} "cm"'
    """
    text = latex.strip()
    while (marked := _OUTER_MARKS.match(text)) is not None and marked.group(1).strip():
        text = marked.group(1) + marked.group(2)
    text = text.replace('"', "''").replace("''''", "''")
    text = _BASIS_VECTOR.sub(r"\\vec{\1}", text).replace("{:}", ":")
    text = re.sub(r"\.\.\.+", r"\\ldots ", text)
    text = re.sub(r"(?<![A-Za-z])(?:equals|is\s+equal\s+to)(?![A-Za-z])", "=", _without_delimiters(text))
    text = _TWO_ARGUMENTS.sub("", _COLOR.sub(" ", text))
    text = _DROPPED.sub(" ", text)
    text = text.replace(r"\left\lbrace", r"\{").replace(r"\right\rbrace", r"\}")
    text = _STYLE.sub(" ", text)
    text = _SIZED.sub("", text)
    text = _SPACE.sub(" ", text)
    text = _NAME.sub(lambda name: _NAMES.get(name.group(), name.group()), text)
    text = balanced(text)
    text = _unwrapped(text)
    text = re.sub(r"\\!(?<!\\\\.)\s*", "", text)
    text = re.sub(r"\\[,;:> ](?<!\\\\.)|(?<!\\)~", " ", text)
    text = re.sub(r"[\^_]?(?<!\\)\{\s*\}", " ", text)
    if r"\binom" in text:
        text = _BINOMIAL.sub(r"\\binom{\1}{\2}", text)
    if "|" in text:
        text = _BARRED_TABLE.sub(r"\\begin{vmatrix}\2\\end{vmatrix}", text)
    text = re.sub(r"(?<=\d)\s*\^\s*(?:o(?![A-Za-z])|\{\s*o\s*\})", r"^\\circ ", text)
    if "_" in text:
        text = _CHOSEN.sub(_chosen, _UPRIGHT_CHOICE.sub(r"\1\2\3", text))
    text = text.replace(r"\%", "%").replace(r"\#", "#").replace(r"\_", "_").replace(r"\&", "&")
    text = re.sub(r"\^\s*\{\s*((?:\\prime\s*)+)\}", lambda m: "'" * m[1].count("p"), text)
    text = re.sub(r"\^\s*\\prime|\\prime", "'", text)
    text = re.sub(r"\^\s*\{\s*('+)\s*\}", r"\1", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"^\\circ ", text)
    text = re.sub(
        r"\^\s*\{?\s*\"\s*(o|st|nd|rd|th)\s*\"\s*\}?",
        lambda m: r"^\circ " if m.group(1) == "o" else f'"{m.group(1)}"',
        text,
    )
    text = re.sub(
        r'(?<=[\d})])\s*(?:"\s*degrees?\s*"|degrees?\b)(?!\s*"?\s*(?:[CFcf]\b|[Cc]el|[Ff]ahr|[Cc]ent))',
        r"^\\circ ",
        text,
    )
    text = re.sub(r"<=(?!>)|=<", r"\\le ", text)
    text = re.sub(r">=|=>(?=\s*[-\d])", r"\\ge ", text)
    text = re.sub(r"!=", r"\\ne ", text)
    text = text.replace("**", "^")
    text = _powers(text)
    text = re.sub(r'"?(?<![A-Za-z])(?:negative|minus)\s*"?\s*(?=\d|\\frac|\\sqrt)', "-", text)
    text = re.sub(r'""|"\s+"(?=\s*$)', " ", text)
    text = " ".join(text.split())
    text = _END.sub("", text).removeprefix("=").lstrip()
    text = without_doubles(text)
    while text.startswith("{") and closing(text, 0) == len(text) - 1:
        text = _END.sub("", text[1:-1].strip())
    return text


def _chosen(found: re.Match[str]) -> str:
    r"""`C_n^k`, `{}^nC_k` and `A_n^k` as a binomial or a quotient of factorials; a constant such as C_1^2 stays."""
    scripts = [script for script in found.groups() if script is not None and script not in ("C", "P", "A")]
    if len(scripts) != 2:
        return found.group()
    first, second = scripts
    below, above = (second, first) if found["over"] else (first, second)
    if below.isdigit() and above.isdigit() and int(below) < int(above):
        return found.group()
    if (found["before"] or found["under"] or found["over"]) == "C":
        return rf" \binom{{{below}}}{{{above}}} "
    return rf" \frac{{({below})!}}{{({below}-{above})!}} "


def _without_delimiters(text: str) -> str:
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    signs = re.findall(r"(?<!\\)\$", text)
    # One dollar sign alone is money; pairs of them are delimiters.
    return re.sub(r"(?<!\\)\$", " ", text) if len(signs) % 2 == 0 else re.sub(r"(?<!\\)\$", r"\\$", text)


def closing(text: str, opening: int) -> int | None:
    """Where the brace at `opening` closes; None if it does not. Escaped braces do not count."""
    depth = 0
    for sign in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(sign.group(), 0)
        if depth == 0:
            return sign.start()
    return None


def balanced(text: str) -> str:
    r"""Braces in pairs, also escaped ones: `\{1,2` becomes `\{1,2\}`, `5\}` becomes 5, and `\frac{1}{2\}` is mended."""
    plain = [sign.group() for sign in _BRACE.finditer(text)]
    opened, closed = plain.count("{"), plain.count("}")
    set_opened, set_closed = plain.count(r"\{"), plain.count(r"\}")
    if opened > closed and set_closed > set_opened and opened - closed == set_closed - set_opened:
        return _pair_up(text)
    if closed > opened and set_opened > set_closed and closed - opened == set_opened - set_closed:
        return _pair_up(text)
    if opened == closed:
        if set_opened == set_closed + 1:
            return text + r"\}" if text.lstrip().startswith(r"\{") else _without_one(text, r"\{")
        if set_closed == set_opened + 1:
            start = re.match(r"\s*", text)
            one_value = "," not in text and ";" not in text
            return _without_one(text, r"\}") if one_value or start is None else r"\{" + text
    elif closed == opened + 1 and text.rstrip().endswith("}"):
        return text.rstrip()[:-1]
    elif opened == closed + 1:
        return text + "}"
    return text


def _pair_up(text: str) -> str:
    """Give each closing brace the form of the brace that it closes."""
    open_signs: list[tuple[str, int]] = []
    parts: list[str] = []
    last = 0
    for sign in _BRACE.finditer(text):
        parts.append(text[last : sign.start()])
        last = sign.end()
        form = sign.group()
        if form in ("{", r"\{"):
            open_signs.append((form, len(parts)))
        elif form in ("}", r"\}") and open_signs:
            opened, place = open_signs.pop()
            if opened == r"\{" or form == opened.replace("{", "}"):
                form = opened.replace("{", "}")
            elif "," in text[_place_of(parts, place) : sign.start()] and form == r"\}":
                parts[place] = r"\{"
            else:
                form = "}"
        parts.append(form)
    return "".join([*parts, text[last:]])


def _place_of(parts: list[str], place: int) -> int:
    return sum(map(len, parts[:place]))


def _without_one(text: str, brace: str) -> str:
    before, _, after = text.rpartition(brace)
    return before + after


def _unwrapped(text: str) -> str:
    """Commands that keep their argument are replaced by it, and text by text between quotes."""
    for _ in range(DEPTH):
        found = _WITH_ARGUMENT.search(text)
        if found is None:
            break
        opening = found.end() - 1
        end = closing(text, opening)
        if end is None:
            break
        inner = text[opening + 1 : end]
        if found.group("text"):
            name, inner = found.group("text"), _unwrapped(inner).replace('"', "")
            stripped = inner.strip()
            commanded = "\\" + stripped
            if stripped in _OTHER_FUNCTIONS:
                inner = f" {_NAMES[commanded]} "
            elif stripped in _FUNCTIONS and not _unit_like(stripped, text[: found.start()], text[end + 1 :]):
                inner = rf" \{stripped} "
            elif (name.startswith("operatorname") and stripped == "cis") or stripped == "cis":
                inner = r" \cis "
            elif name == "mathrm" and stripped in ("d", "e", "i"):
                inner = stripped
            elif stripped in ("sqrt", "pi"):
                inner = f" {stripped}"
            elif any(sign in stripped for sign in "\\^_{}=<>|") or not re.search(r"[^\W\d_]|%", stripped):
                inner = f" {inner} "
            else:
                inner = f' "{stripped}" '
        text = text[: found.start()] + inner + text[end + 1 :]
    return text


def _unit_like(word: str, before: str, behind: str) -> bool:
    """Whether `min` or `sec` is a unit, because a number stands before it or no argument behind it."""
    return word in ("min", "max", "sec", "arg") and (
        bool(re.search(r"\d\s*$", before)) or not re.match(r"\s*[\\({_^a-z\d]", behind)
    )


def _powers(text: str) -> str:
    r"""Functions, roots, pi and infinity that are written as words become commands; `\log_e` becomes `\ln`."""
    text = re.sub(r"(?<![\\A-Za-z])(?:pi|PI|Pi)(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(r'"\s*\\pi\s*"', r" \\pi ", text)
    text = re.sub(rf"(?<![\\A-Za-z\"])({_GREEK})(?![A-Za-z\"])", r"\\\1 ", text)
    text = re.sub(r"(?<![\\A-Za-z])abs\s*\(([^()]*)\)", r"|\1|", text)
    text = re.sub(
        r"^(?:\s|\\(?:therefore|because|implies|Rightarrow|Longrightarrow|rightarrow|to)(?![A-Za-z]))+", "", text
    )
    text = re.sub(r"(?<![\\A-Za-z])(?:infinity|Infinity|inf|oo)(?![A-Za-z])", r"\\infty ", text)
    text = re.sub(r'"\s*([+-]?)\s*\\infty\s*"', r" \1\\infty ", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\{", r"\\sqrt{", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*(\d+|[A-Za-z](?![A-Za-z]))", r"\\sqrt{\1}", text)
    place = 0
    while (root := re.compile(r"\\?(?<![A-Za-z])sqrt\s*\(").search(text, place)) is not None:
        end = _parenthesis(text, root.end() - 1)
        if end is None:
            break
        text = text[: root.start()] + r"\sqrt{" + text[root.end() : end] + "}" + text[end + 1 :]
        place = root.start() + 6
    return _NATURAL_LOGARITHM.sub(r"\\ln ", _FUNCTION_WORD.sub(r"\\\1 ", text))


def _parenthesis(text: str, opening: int) -> int | None:
    depth = 0
    for place in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None
