"""Draw the flow from a call to a report for the documentation, light and dark.

python docs/make_pictures.py            writes docs/pictures/flow-light.svg and flow-dark.svg
"""

from __future__ import annotations

from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"

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


if __name__ == "__main__":
    for scheme in COLORS:
        (PICTURES / f"flow-{scheme}.svg").write_text(flow(scheme), encoding="utf-8")
