"""The units that are known: their names, dimensions and factors. Reads and compares nothing."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

Dimension = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Unit:
    """A unit as a product of base units.

    >>> Unit("km", (("length", 1),), Fraction(1000))
    """

    name: str
    dimension: Dimension
    factor: Fraction
    """How many base units one of it is. An angle's base unit is the degree."""
    offset: Fraction = Fraction(0)
    """What is added to a temperature in kelvin before it is multiplied."""


def _u(dimension: str, factor: str | int | Fraction, names: str, offset: str = "0") -> None:
    parsed = []
    for part in dimension.split():
        base, _, power = part.partition("^")
        parsed.append((base, int(power or 1)))
    made = Unit(names.split("|")[0], tuple(sorted(parsed)), Fraction(factor), Fraction(offset))
    for name in names.split("|"):
        UNITS.setdefault(name, []).append(made)


UNITS: dict[str, list[Unit]] = {}
"""Every name of a unit. Names of several units, such as minute, have several readings."""

_METRIC: dict[str, int | Fraction] = {
    "k": 10**3,
    "c": Fraction(1, 100),
    "m": Fraction(1, 1000),
    "d": Fraction(1, 10),
    "n": Fraction(1, 10**9),
}
_METRIC_WORDS: dict[str, int | Fraction] = {
    "kilo": 10**3,
    "centi": Fraction(1, 100),
    "milli": Fraction(1, 1000),
    "deci": Fraction(1, 10),
    "micro": Fraction(1, 10**6),
    "nano": Fraction(1, 10**9),
    "mega": 10**6,
}


def _metric(dimension: str, factor: str | int | Fraction, short: str, words: str, prefixes: str) -> None:
    base = Fraction(factor)
    for name in short.split("|"):
        _u(dimension, base, name)
    for word in words.split("|"):
        _u(dimension, base, word)
    for prefix in prefixes.split():
        if prefix in _METRIC:
            for name in short.split("|"):
                _u(dimension, base * _METRIC[prefix], prefix + name)
        else:
            for word in words.split("|"):
                _u(dimension, base * _METRIC_WORDS[prefix], prefix + word)


_metric("length", 1, "m", "meter|metre", "k c m d n kilo centi milli deci micro nano")
_u("length", Fraction(254, 10000), "in|inch|inche|''")
_u("length", Fraction(3048, 10000), "ft|foot|feet|'")
_u("length", Fraction(9144, 10000), "yd|yard")
_u("length", Fraction(1609344, 1000), "mi|mile")
_u("length", 1852, "nmi|nautical mile")
_metric("mass", Fraction(1, 1000), "g", "gram|gramme", "k m kilo milli micro")
_u("mass", Fraction(1, 1000), "gm")
_u("mass", 1, "kilo|kgs")
_u("mass", 1000, "t|ton|tonne|metric ton")
_u("mass", Fraction(45359237, 10**8), "lb|pound")
_u("mass", Fraction(45359237, 16 * 10**8), "oz|ounce")
_metric("time", 1, "s", "second", "m n milli micro nano")
_u("time", 1, "sec")
_u("time", 60, "min|minute")
_u("time", 3600, "h|hr|hour")
_u("time", 86400, "d|day")
_u("time", 604800, "wk|week")
_u("time", 2629746, "month|mo")
_u("time", 31556952, "yr|year")
_u("time", 315569520, "decade")
_u("time", 3155695200, "century|centurie")
_metric("length^3", Fraction(1, 1000), "L|l", "liter|litre", "c m d milli centi deci")
_u("length^3", Fraction(1, 10**6), "cc")
_u("length^3", Fraction(3785411784, 10**12), "gal|gallon")
_u("length^3", Fraction(946352946, 10**12), "qt|quart")
_u("length^3", Fraction(473176473, 10**12), "pt|pint")
_u("length^3", Fraction(2365882365, 10**13), "cup")
_u("length^2", 10000, "ha|hectare")
_u("length^2", Fraction(40468564224, 10**7), "acre")
_u("angle", 1, "°|deg|degree")
_u("angle", Fraction(1, 60), "arcmin|arcminute|'|minute|min")
_u("angle", Fraction(1, 3600), "arcsec|arcsecond|''|second|sec")
_u("angle", 360, "revolution|rev|full turn")
_u("radian", 1, "rad|radian")
_u("temperature", 1, "°C|celsius|centigrade|C", "273.15")
_u("temperature", Fraction(5, 9), "°F|fahrenheit|F", "459.67")
_u("temperature", 1, "K|kelvin")
_u("length time^-1", Fraction(1609344, 3600000), "mph")
_u("length time^-1", Fraction(1000, 3600), "kph|kmph|kmh")
_u("length time^-1", Fraction(1852, 3600), "knot")
_metric("mass length time^-2", 1, "N", "newton", "k kilo")
_metric("mass length^2 time^-2", 1, "J", "joule", "k kilo mega")
_metric("mass length^2 time^-3", 1, "W", "watt", "k m kilo milli mega")
_metric("mass length^-1 time^-2", 1, "Pa", "pascal", "k kilo mega")
_metric("time^-1", 1, "Hz", "hertz", "k kilo mega")
_metric("current", 1, "A", "amp|ampere", "m milli")
_metric("mass length^2 time^-3 current^-1", 1, "V", "volt", "k m kilo milli")
_metric("mass length^2 time^-3 current^-2", 1, "\\Omega|Ω", "ohm", "k kilo mega")
_metric("current time", 1, "coulomb", "coulomb", "milli micro")
_metric("amount", 1, "mol", "mole", "m milli")
_metric("mass length^2 time^-2", Fraction(4184, 1000), "cal", "calorie", "k kilo")
_u("time^-1 angle", 6, "rpm")
_u("data", 1, "bit")
_u("data", 8, "byte|B")
_u("data", 8 * 10**6, "MB|megabyte")
_u("data", 8 * 10**9, "GB|gigabyte")
_u("data", 8 * 10**3, "KB|kB|kilobyte")
_u("USD", 1, "\\$|dollar|usd|USD|us dollar|buck")
_u("USD", Fraction(1, 100), "cent|\\textcent|¢")
_u("USD", Fraction(1, 20), "nickel")
_u("USD", Fraction(1, 10), "dime")
_u("EUR", 1, "\\euro|euro|eur|EUR")
_u("EUR", Fraction(1, 100), "eurocent|euro cent")
_u("GBP", 1, "\\pounds|pound|gbp|GBP|quid|pound sterling")
_u("GBP", Fraction(1, 100), "penny|pence|pennie")
_u("JPY", 1, "\\yen|yen|JPY|jpy")
_u("CNY", 1, "yuan|rmb|RMB|CNY")
_u("INR", 1, "\\rupee|rupee|rs|Rs|INR|inr")
_u("INR", Fraction(1, 100), "paise|paisa")
_u("CHF", 1, "franc|CHF")
_u("KRW", 1, "won|KRW")
_u("RUB", 1, "ruble|rouble|RUB")
_u("BRL", 1, "real|reai|BRL")
_u("MXN", 1, "peso|MXN")
_u("any", 1, "unit|u")
_u("percent", 1, "%|percent|percentage|pct|per cent|percentage point")
