"""Compare `math`, Math-Verify and Hendrycks' is_equiv on the answer pairs of the tests.

Prints the table of docs/evidence/graders.md. Usage: `python bench/graders.py math_equivalence.py`; the file is
modeling/math_equivalence.py of github.com/hendrycks/math.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from math_verify import parse, verify

from grpocli.answers import math_worker
from grpocli.answers.final_answer import answer_expression

PAIRS = Path(__file__).parents[1] / "tests" / "answers" / "answer_pairs.jsonl"


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("is_equiv", metavar="FILE", help="math_equivalence.py")
    file = cli.parse_args().is_equiv
    graders = {"math": _math, "math_verify": _math_verify, "is_equiv": _is_equiv(file)}
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[str] = Counter()
    pairs = [json.loads(line) for line in PAIRS.read_text("utf-8").splitlines()]
    for pair in pairs:
        for family in (pair["family"], "all"):
            sizes[family] += 1
        for name, grader in graders.items():
            accepted = grader(pair["reference"], pair["completion"])
            for family in (pair["family"], "all"):
                counts[family, name] += accepted == pair["equal"]
                counts[family, f"{name} accepts"] += accepted and not pair["equal"]
    equal = sum(pair["equal"] for pair in pairs)
    print(f"{len(pairs)} pairs, {equal} equal and {len(pairs) - equal} not")
    columns = ("math", "math_verify", "math_verify accepts", "is_equiv", "is_equiv accepts")
    for family in sorted(sizes, key=lambda name: name == "all"):
        print(f"| {family} | {sizes[family]} | " + " | ".join(str(counts[family, one]) for one in columns) + " |")


def _math(reference: str, completion: str) -> bool:
    return math_worker.equal(reference, completion) == 1.0


def _math_verify(reference: str, completion: str) -> bool:
    gold = parse(reference if "$" in reference else f"${reference}$")
    return bool(verify(gold, parse(completion)))


def _is_equiv(path: str) -> Callable[[str, str], bool]:
    spec = importlib.util.spec_from_file_location("math_equivalence", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda reference, completion: bool(module.is_equiv(reference, answer_expression(completion)))


if __name__ == "__main__":
    main()
