"""Judge `nanwatch.compare` on planted faults and on pairs that compute the same.

    python benchmarks/judge_compare.py [--half tuned|held] [--seed 0] [--only WORD] [--wrong] [--json FILE]

A fault counts as named when the models are not equal and the first module is one of the right ones. A pair that
computes the same counts as silent when it is called equal. The checksum of a case's name says whether the product was
tuned on it or it was held back meanwhile. Faults between whole implementations come from
`_engine_faults.py`. The tests hold them in float32, and here they are judged in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _compare_models
import _engine_faults
import torch
from _compare_equals import EQUALS, Equal
from _compare_faults import FAULTS, Fault
from _compare_models import build, inputs_of
from _engine_models import GPT2, Llama
from torch.utils._pytree import tree_map_only

import nanwatch
from nanwatch.equivalence.comparison import Comparison

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Faults whose size is that of rounding in bfloat16 itself, which the engine has in any dtype.
_ROUNDING = ("norm in bf16", "softmax in bf16", "accumulation in bf16")


class Case(NamedTuple):
    """Pair of models in a dtype. `right` are the modules of A that may be named, or () where both compute the same."""

    name: str
    dtype: str
    right: tuple[str, ...]
    compare: Callable[[], Comparison]

    @property
    def half(self) -> str:
        return "tuned" if zlib.crc32(self.name.encode()) % 2 == 0 else "held"


def _compared(one: Fault | Equal, dtype: str) -> Comparison:
    """Compare a model with a changed copy, both cast after the change."""
    a = build(one.model)
    b = copy.deepcopy(a)
    if isinstance(one, Fault):
        one.plant(b)
    else:
        b = one.make(b) or b
    is_autocast = "autocast" in one.name
    kind = torch.float32 if is_autocast else DTYPES[dtype]
    inputs: Any = inputs_of(one.model)
    inputs = tree_map_only(torch.Tensor, lambda x: x.to(kind) if x.is_floating_point() else x, inputs)
    calls = {"call_b": one.call, **({"call_a": one.call} if is_autocast else {})} if one.call else {}
    return nanwatch.compare(a.to(kind), b.to(kind), inputs, **calls)


def _of_engines(planted: Any, dtype: str) -> Comparison:
    name, model = _engine_faults.engine(planted)
    kind = DTYPES[dtype]
    other = copy.deepcopy(_engine_faults.reference(name))
    return nanwatch.compare(other.to(kind), model.to(kind), _engine_faults.inputs_of(name))


def _equal_engines(name: str, dtypes: str) -> Comparison:
    a = _engine_faults.reference(name)
    b = (Llama if name == "llama" else GPT2)(a).eval()
    kinds = [DTYPES[one] for one in dtypes.split("/")]
    return nanwatch.compare(copy.deepcopy(a).to(kinds[0]), b.to(kinds[-1]), _engine_faults.inputs_of(name))


def cases() -> Iterator[Case]:
    """Yield all cases. Every third is judged in float16 too."""
    for planted, pairs in ((True, FAULTS), (False, EQUALS)):
        for number, one in enumerate(pairs):
            name = f"{one.model}: {one.name}"
            for dtype in ("float32", "bfloat16", *(["float16"] if number % 3 == 0 else [])):
                if "autocast" in name and dtype != "bfloat16":
                    continue
                right = one.right if planted else ()
                yield Case(name, dtype, right, partial(_compared, one, dtype))
    for fault in _engine_faults.PLANTED:
        if fault.engine in ("llama", "gpt2") and fault.name not in _ROUNDING:
            name = f"{fault.engine} by others: {fault.name}"
            yield Case(name, "bfloat16", (fault.right,), partial(_of_engines, fault, "bfloat16"))
    for name in ("llama", "gpt2"):
        for dtypes in ("float32", "bfloat16", "float16", "float32/bfloat16", "bfloat16/float32"):
            yield Case(f"{name} by others", dtypes, (), partial(_equal_engines, name, dtypes))


def judge(case: Case) -> tuple[bool, str]:
    """Return whether a case comes out right, and the first line of what is said."""
    found = case.compare()
    if not case.right:
        return found.equal is True, found.to_text().splitlines()[0]
    is_named = found.equal is False and found.first is not None and found.first.module_a in case.right
    return is_named, found.to_text().splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=["tuned", "held"])
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--dtypes", nargs="+", default=[])
    parser.add_argument("--wrong", action="store_true", help="print the lines of wrong cases alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and inputs")
    options = parser.parse_args()
    _compare_models.SEED = options.seed
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for case in cases():
        if options.half not in (None, case.half) or options.only not in f"{case.name} {case.dtype}":
            continue
        if options.dtypes and case.dtype not in options.dtypes:
            continue
        is_right, said = judge(case)
        kind = "planted" if case.right else "equal"
        rows.append(
            {
                "case": case.name,
                "dtype": case.dtype,
                "kind": kind,
                "half": case.half,
                "right": is_right,
                "said": said,
            }
        )
        if not (options.wrong and is_right):
            print(
                f"{'right' if is_right else 'WRONG'}  {kind:<7} {case.dtype:<9} {case.name}: {said}",
                flush=True,
            )
    print(f"\n{len(rows)} cases in {time.perf_counter() - start:.0f} s")
    for kind, words in (("planted", "named"), ("equal", "silent")):
        for dtype in dict.fromkeys(row["dtype"] for row in rows if row["kind"] == kind):
            for half in ("tuned", "held"):
                of = [
                    row["right"]
                    for row in rows
                    if (row["kind"], row["dtype"], row["half"]) == (kind, dtype, half)
                ]
                if of:
                    print(f"{kind:<8} {dtype:<17} {half:<6} {sum(of)} of {len(of)} {words}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
