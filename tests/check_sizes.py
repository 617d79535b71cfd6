"""Check that no room is larger than docs/architecture.md allows; imports neither torch nor nanwatch.

    python tests/check_sizes.py            # exit status 1 where one is
    python tests/check_sizes.py --lower    # write the lines of now into the table, where they are fewer

A room is a folder of `python/nanwatch/` with all that git knows in it; its lines are what `wc -l` counts.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
ROW = re.compile(r"^\| `([\w/]+)` \| ([\d,]+) \|$", re.MULTILINE)
CODE = {".py", ".cpp", ".h", ".cu", ".sh"}  # of tests and benchmarks: golden files and results are no code
PRODUCT = "product"  # the rooms, what lies beside them, and csrc/


def sizes() -> Counter[str]:
    """Return the lines of each room, of `csrc`, `tests` and `benchmarks`, and of the product."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines: Counter[str] = Counter()
    for path in map(Path, listed.stdout.splitlines()):
        parts = path.parts
        is_room = parts[:2] == ("python", "nanwatch") and len(parts) > 3
        room = parts[2] if is_room else parts[0]
        if room in ("docs", "examples", ".ci") or len(parts) == 1 or not (ROOT / path).is_file():
            continue
        if room in ("tests", "benchmarks") and path.suffix not in CODE:
            continue
        count = (ROOT / path).read_bytes().count(b"\n")
        lines[room] += count
        lines[PRODUCT] += count * (parts[0] in ("python", "csrc"))
    return lines


def faults(lines: Counter[str], limits: dict[str, int]) -> list[str]:
    """Return a line for each room that is too large, has no limit, or is gone."""
    found = [
        f"{room}: {lines[room]:,} lines, at most {most:,}: take something out, or move it to where it belongs"
        for room, most in limits.items()
        if lines[room] > most
    ]
    found += [f"{room}: has no limit in {PAGE.name}" for room in sorted(lines.keys() - limits.keys())]
    return found + [f"{room}: is gone, take its row out of {PAGE.name}" for room in limits if not lines[room]]


def main() -> int:
    """Print what is wrong, or lower the limits."""
    text, lines = PAGE.read_text(encoding="utf-8"), sizes()
    limits = {room: int(most.replace(",", "")) for room, most in ROW.findall(text)}
    if sys.argv[1:] == ["--lower"]:
        limits = {room: min(most, lines[room]) for room, most in limits.items()}
        text = ROW.sub(lambda row: f"| `{row[1]}` | {limits[row[1]]:,} |", text)
        PAGE.write_text(text, encoding="utf-8")
    found = faults(lines, limits)
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
