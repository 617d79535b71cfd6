"""Make the pictures of the documentation, light and dark: the pages of a report, a diff, a merge and a run; the flow.

    python docs/make_pictures.py            all of them, into docs/pictures
    python docs/make_pictures.py flow       only those named

The pages are of real runs of the tutorials' scripts. Screenshots need Chromium (`apt-get install chromium`) and
`pip install jinja2 pyarrow`; pngquant and optipng make them smaller where they are installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")
SCHEMES = {"light": 1, "dark": 0}  # the numbers are Blink's
NANWATCH = [sys.executable, "-m", "nanwatch"]

# Boxes of the flow: place, text, and whether it is a result. Arrows: from, to, words above.
BOXES = {
    "call": (20, 40, "module(x)", False),
    "wrapper": (180, 40, "call wrapper", False),
    "range": (340, 40, "range of each new tensor", False),
    "ring": (560, 40, "ring of frames", False),
    "curves": (740, 40, "forecast, log, trace", True),
    "rerun": (340, 150, "re-run of the batch", False),
    "cures": (560, 150, "tried cures", False),
    "report": (740, 150, "report, capsule, error", True),
}
ARROWS = [
    ("call", "wrapper"),
    ("wrapper", "range"),
    ("range", "ring"),
    ("ring", "curves"),
    ("rerun", "cures"),
    ("cures", "report"),
]
COLORS = {
    "light": {"text": "#1f2933", "line": "#64748b", "box": "#eef2f6", "result": "#d7f0ec", "bad": "#c0392b"},
    "dark": {"text": "#e6eaf0", "line": "#94a3b8", "box": "#2b3340", "result": "#1e4b47", "bad": "#ff8a80"},
}


def script(page: str) -> str:
    """Return the train.py of a tutorial."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(r'^```python title="train.py"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no train.py"
    return found[1]


def run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)


def report(folder: Path) -> Path:
    (folder / "train.py").write_text(script("getting-started.md"), encoding="utf-8")
    run(folder, *NANWATCH, "run", "--output-dir", "out", "train.py")
    return folder / "out" / "batch-2" / "report.html"


def diff(folder: Path) -> Path:
    (folder / "train.py").write_text(script("tutorials/two-runs.md"), encoding="utf-8")
    for name in ("before", "after"):
        run(folder, sys.executable, "train.py", name)
    run(folder, *NANWATCH, "diff", "before.parquet", "after.parquet", "--html", "diff.html")
    return folder / "diff.html"


def whole_run(folder: Path) -> Path:
    (folder / "train.py").write_text(script("tutorials/slow-divergence.md"), encoding="utf-8")
    run(folder, *NANWATCH, "run", "--trace", "run.parquet", "train.py")
    run(folder, *NANWATCH, "show", "run.parquet", "--html", "run.html")
    return folder / "run.html"


PAGES = {
    "report": (report, 1100, 1250),
    "diff": (diff, 1100, 1000),
    "run": (whole_run, 1100, 760),
}


def shoot(page: Path, picture: Path, scheme: int, width: int, height: int) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed; try apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]
        options += [f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=20000"]
        options += [f"--window-size={width},{height}", f"--screenshot={picture}"]
        subprocess.run([browser, *options, page.as_uri()], check=True, timeout=300, capture_output=True)
    if shutil.which("pngquant"):
        subprocess.run(["pngquant", "--force", "--ext", ".png", "--speed", "1", "96", picture], check=True)
    if shutil.which("optipng"):
        subprocess.run(["optipng", "-quiet", "-o5", picture], check=True)


def flow(scheme: str) -> str:
    """Return the flow from a call to a report as SVG."""
    color = COLORS[scheme]
    ink, line = color["text"], color["line"]
    width = {name: 20 + 7.4 * len(text) for name, (_, _, text, _) in BOXES.items()}
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 930 210" font-family="system-ui, sans-serif" '
        'font-size="14">',
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{line}"/></marker></defs>',
    ]

    def arrow(points: str, stroke: str = line, extra: str = "") -> str:
        return f'<path d="{points}" fill="none" stroke="{stroke}" stroke-width="1.5" marker-end="url(#head)"{extra}/>'

    for a, b in ARROWS:
        parts.append(arrow(f"M{BOXES[a][0] + width[a]} {BOXES[a][1] + 20}H{BOXES[b][0] - 2}"))
    middle = BOXES["range"][0] + width["range"] / 2
    parts.append(arrow(f"M{middle} 80V148", color["bad"], ' stroke-dasharray="5 4"'))
    parts.append(f'<text x="{middle + 10}" y="118" fill="{color["bad"]}">nan or inf</text>')
    for name, (x, y, text, is_result) in BOXES.items():
        fill, long = color["result" if is_result else "box"], width[name]
        parts.append(
            f'<rect x="{x}" y="{y}" width="{long:.0f}" height="40" rx="8" fill="{fill}" stroke="{line}"/>'
        )
        parts.append(
            f'<text x="{x + long / 2:.0f}" y="{y + 25}" text-anchor="middle" fill="{ink}">{text}</text>'
        )
    for y, words in ((28, "every call"), (140, "only after a failure")):
        parts.append(
            f'<text x="20" y="{y if y < 100 else y + 35}" fill="{color["line"]}" font-size="12">{words}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main(names: list[str]) -> None:
    wanted = names or ["flow", *PAGES]
    PICTURES.mkdir(exist_ok=True)
    for name in wanted:
        if name == "flow":
            for scheme in SCHEMES:
                (PICTURES / f"flow-{scheme}.svg").write_text(flow(scheme), encoding="utf-8")
            continue
        make, width, height = PAGES[name]
        with tempfile.TemporaryDirectory() as folder:
            page = make(Path(folder))
            for scheme, number in SCHEMES.items():
                shoot(page, PICTURES / f"{name}-{scheme}.png", number, width, height)


if __name__ == "__main__":
    main(sys.argv[1:])
