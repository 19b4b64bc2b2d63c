"""Chinese words around an answer, in English: `x=1或x=2`, `5厘米`, `答案：5`. A small table of the words that decide what
an answer says; any other one stays as it is, as upright text. Nothing here does mathematics."""

from __future__ import annotations

import re

_MYRIADS = {"万亿": 12, "亿": 8, "千万": 7, "百万": 6, "万": 4}
_MYRIAD = re.compile(rf"(?<=\d)\s*({'|'.join(_MYRIADS)})")
_RUN = re.compile("[\u3400-\u9fff]+")
_WORDS = {
    **dict.fromkeys(("或者", "或"), "or"),
    **dict.fromkeys(("以及", "并且", "和", "与", "且"), "and"),
    **dict.fromkeys(("不是", "不等于", "不能", "不为"), "not"),
    **dict.fromkeys(("至少", "不小于", "不少于"), "at least"),
    **dict.fromkeys(("至多", "最多", "不大于", "不超过"), "at most"),
    **dict.fromkeys(("大于", "超过", "多于"), "greater than"),
    **dict.fromkeys(("小于", "少于", "不到"), "less than"),
    **dict.fromkeys(("大约", "约为", "约"), "about"),
    **dict.fromkeys(("的值", "的"), ""),
    **dict.fromkeys(("答案是", "答案为", "答案"), "the answer is"),
    **dict.fromkeys(("等于", "为", "是"), "is"),
    **dict.fromkeys(("无解", "没有解"), "no solution"),
    "不存在": "does not exist",
    **dict.fromkeys(("千米", "公里"), "km"),
    **dict.fromkeys(("千克", "公斤"), "kg"),
    "厘米": "cm",
    "毫米": "mm",
    "米": "m",
    "克": "g",
    "毫升": "ml",
    "升": "litres",
    "平方": "square",
    "立方": "cubic",
    "小时": "hours",
    "分钟": "minutes",
    "秒": "seconds",
    "天": "days",
    "美元": "dollars",
    "元": "yuan",
    "度": "degrees",
    "每": "per",
}
_LONGEST = max(map(len, _WORDS))


def in_english(text: str) -> str:
    r"""The text with its Chinese words as upright text, in English where they are known.

    >>> in_english("1或2")
    '1\\text{ or }2'
    """
    text = _MYRIAD.sub(lambda found: rf" \times 10^{{{_MYRIADS[found[1]]}}} ", text)
    return _RUN.sub(lambda run: rf"\text{{ {' '.join(_translated(run.group()))} }}", text)


def _translated(run: str) -> list[str]:
    words, other, place = [], "", 0
    while place < len(run):
        size = next((n for n in range(_LONGEST, 0, -1) if run[place : place + n] in _WORDS), 0)
        if size:
            words += [other, _WORDS[run[place : place + size]]]
            other = ""
        else:
            other += run[place]
        place += size or 1
    return [word for word in (*words, other) if word]
