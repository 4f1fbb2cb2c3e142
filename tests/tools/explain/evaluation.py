"""Evaluates printed formulas, to compare them with the code.

Symbols such as π_θ or ε_low are valid Python names; a space between two factors is a product.
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

NAMES = {
    "min": min,
    "max": max,
    "exp": math.exp,
    "log": math.log,
    "clip": lambda x, low, high: min(max(x, low), high),
    "σ": lambda x: 1 / (1 + math.exp(-x)),
    "sg": lambda x: x,
    "mean_G": lambda xs: sum(xs) / len(xs),
    "Σ_G": sum,
    "sqrt": math.sqrt,
    "sign": lambda x: (x > 0) - (x < 0),
}


def python_of(formula: str) -> str:
    """A formula's right side as a Python expression."""
    text = formula.replace("−", "-").replace("≤", "<=").replace("≥", ">=")
    text = re.sub(r"sg\[(.*)\]", r"sg(\1)", text)
    text = re.sub(r"\( Π_t (.*) \)\^\(1 / \|o_i\|\)", r"product(lambda o_it: \1)**(1 / length)", text)
    text = text.replace("Σ_j∈U |o_j|", "tokens_U").replace("Σ_G |o_j|", "tokens_G").replace("|o_i|", "length")
    text = re.sub(r"log (π_\w+\(o_it\)|r_it)", r"log(\1)", text)
    text = re.sub(r"√\( (.*) \)", r"sqrt(\1)", text)
    text = re.sub(r"mean_G \|s - mean_G s\|", "mean_G([abs(s - mean_G(all_s)) for s in all_s])", text)
    text = re.sub(r"Σ_G \(s - mean_G s\)²", "Σ_G([(s - mean_G(all_s))**2 for s in all_s])", text)
    text = re.sub(r"(mean|std|MAD)_G s\b", lambda m: "mean_G(all_s)" if m[1] == "mean" else f"{m[1]}_G", text)
    text = text.replace("²", "**2")
    text = re.sub(r"(.*) where (.*?), else (.*)", r"(\1) if \2 else (\3)", text)
    text = re.sub(r"(.*) where (.*?),  (.*) where .*", r"(\1) if \2 else (\3)", text)
    words = r"(?!(?:if|else|for|in|lambda|and)\b)"
    return re.sub(
        rf"(?<!\bif)(?<!\belse)(?<!\bfor)(?<!\band)(?<!\bin)(?<!lambda)(?<=[\w)]) {words}(?=[\w(])", " * ", text
    )


def computed(lines: tuple[str, ...], wanted: str, values: dict[str, Any]) -> float:
    """The value of a symbol that one of the lines defines, from the symbols on the right sides."""
    definitions = {}
    for line in lines:
        for piece in line.split(";  "):
            name, equals, right = piece.partition(" = ")
            if equals and " " not in name.replace("_G s", ""):
                definitions[name.replace("_G s", "_G")] = right.split(",  n scores")[0].strip()
    scope: dict[str, Any] = {identifier(name): value for name, value in (NAMES | values).items()}
    definitions = {identifier(name): identifier(python_of(right)) for name, right in definitions.items()}
    wanted = identifier(wanted)
    while wanted not in scope:
        ready = [name for name in definitions if name not in scope and not _unknown(definitions[name], scope)]
        assert ready, f"{wanted} cannot be computed from {definitions}"
        for name in ready:
            scope[name] = eval(definitions[name], scope)
    return float(scope[wanted])


def identifier(text: str) -> str:
    """Python normalises identifiers: ℓ becomes l."""
    return unicodedata.normalize("NFKC", text)


def _unknown(expression: str, scope: dict[str, Any]) -> set[str]:
    names = set(re.findall(r"(?<![\w.])[^\W\d]\w*", expression))
    bound = {"if", "else", "for", "in", "lambda", "and", "abs"} | ({"o_it"} if "lambda" in expression else set())
    bound |= {"s"} if "for s in" in expression else set()
    return names - bound - set(scope)
