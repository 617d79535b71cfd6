"""Known causes of runs that part, by the operation in which they do, and the trials that may cure them."""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache

from .operations import OUTSIDE, UNWRITTEN, OperationDifference

# From the list at torch.use_deterministic_algorithms: operations whose CUDA kernels add with atomics.
_ATOMICS = re.compile(
    r"index_add|scatter|index_put|index_copy|put_|histc|bincount|cumsum|embedding.*backward|grid_sample|upsample"
    r"|interpolate|adaptive_.*backward|max_pool.*backward|max_unpool|reflection_pad|replication_pad|ctc_loss"
    r"|nll_loss2d|kthvalue|median|segment_reduce|repeat_interleave"
)
_TUNED = re.compile(r"conv|mm|matmul|linear|baddbmm|attention|rnn|lstm|gru")
# Calls in the source of a function whose results differ from run to run, and the trials that hold them still.
_SUSPECTS = {
    r"\btime\.\w+\(|\b(?:perf_counter|monotonic)(?:_ns)?\(|datetime\.\w*now\(": "clock",
    r"\b(?:urandom|uuid4|SystemRandom)\(|\bsecrets\.\w+\(|(?:default_rng|\bRandom|\.seed)\(\s*\)": "entropy",
    r"(?<![\w.])hash\(|(?<![\w.])(?:frozen)?set\(|\{[^:{}]+ for ": "hash",
    r"(?<![\w.])id\(": "",
    r"\bas_completed\(|\bThread\(|\.submit\(|imap_unordered\(": "",
    r"\blistdir\(|\bscandir\(|\biglob\(|(?<![\w])glob\(": "",
}


def explain(found: OperationDifference) -> tuple[str, list[str]]:
    """Return the cause of a difference in one sentence, and the names of the trials to make first."""
    one = found.a
    operand = found.operand
    calls, trials = _suspects(one.source)
    if found.how == "results" and one.is_random:
        return _of_random(one.has_generator, one.in_loader), [
            "seeds",
            *trials,
            "kept",
            "loader",
            "entropy",
            "clock",
        ]
    if found.how == "results":
        return _of_results(one.name, calls), ["deterministic", "threads", *trials]
    if found.how == "operands" and operand.origin == UNWRITTEN:
        return f"it reads memory that was allocated at {operand.allocated} and that no operation wrote", [
            "deterministic"
        ]
    ahead = ["loader"] if one.in_loader else []
    everything = [*ahead, *trials, "kept", "entropy", "clock", "hash", "seeds"]
    if found.how == "path":
        other = "nothing" if found.b is None else f"{found.b.name} at {found.b.source}"
        return f"the other run does {other} here: Python takes another branch{calls}", everything
    if found.how == "numbers":
        theirs = "" if found.b is None else f" against {found.b.numbers}"
        return f"Python gives it another number, {one.numbers}{theirs}{calls}", everything
    if operand.origin == OUTSIDE:
        return (
            "what it was given comes from outside the recorded operations: Python, numpy, another thread or process,"
            f" or an earlier batch{calls}",
            everything,
        )
    return f"what it was given was written past PyTorch's dispatcher{calls}", everything


def _of_random(has_generator: bool, in_loader: bool) -> str:
    if in_loader:
        return "a data loader draws its order from a generator that is not seeded alike in both runs"
    if has_generator:
        return "it draws from a torch.Generator of its own, which is not in the same state in both runs"
    return "it draws from PyTorch's global generator, which is not in the same state in both runs"


def _of_results(name: str, calls: str) -> str:
    base = name.removeprefix("aten.")
    if not name.startswith("aten."):
        return f"{name} makes other bits of equal operands; its kernel is not PyTorch's{calls}"
    if _ATOMICS.search(base):
        return f"{name} adds with atomics on CUDA, in an order that differs from run to run"
    if _TUNED.search(base):
        return f"{name} may be computed by another algorithm or split over threads in another way in each run"
    return f"{name} makes other bits of equal operands"


def _suspects(source: str) -> tuple[str, list[str]]:
    """Return, for a sentence, the calls in the function at `source` that may differ, and the trials for them."""
    file, _, number = source.rpartition(":")
    found, trials = [], []
    for at in _lines_of_function(file, int(number or 0)):
        code = linecache.getline(file, at).partition("#")[0]
        for pattern, trial in _SUSPECTS.items():
            if match := re.search(pattern, code):
                words = re.sub(r"\($", "()", match.group().strip())
                found.append(f"{words} in line {at}")
                trials += [trial] if trial else []
    return (f"; look at {', '.join(found[:3])}" if found else ""), list(dict.fromkeys(trials))


@lru_cache(maxsize=64)
def _lines_of_function(file: str, line: int) -> tuple[int, ...]:
    """Return the lines of the innermost function around a line, or of the file without one."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return (line,) if line else ()
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    around = [span for span in spans if span[0] <= line <= span[1]]
    # The last that begins before the line is the innermost. Outside any, the 20 lines before it are enough.
    first, last = max(around, default=(max(line - 20, 1), line))
    return tuple(range(first, last + 1))
