"""Makes report.png: what `Report.to_html()` shows of an fp16 training that overflows.

    python docs/pictures/make_report_png.py

A small residual network with its weights in float16 learns random numbers from random words, with a learning rate
that is too high, until a value passes 65504; nothing is planted. Needs Chromium, and `pip install jinja2 plotly`.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import nanwatch

WORDS, WIDTH, LAYERS, SENTENCES, LENGTH = 100, 32, 6, 8, 16
PICTURE = Path(__file__).with_name("report.png")


class Block(nn.Module):
    """A feed-forward block with a residual sum and no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.wi = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.wo = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wo(self.act(self.wi(x)))


class Network(nn.Module):
    """Words in, a score for each word out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def overflow() -> nanwatch.Report:
    """Trains until a value is not finite; the report of that batch."""
    torch.manual_seed(0)
    model = Network().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.1)
    with nanwatch.watch(model, max_frames=21):
        for _ in range(1000):
            words = torch.randint(WORDS, (SENTENCES, LENGTH))
            try:
                loss = nn.functional.cross_entropy(model(words).float().flatten(0, 1), words.flatten())
            except nanwatch.NonFiniteError as error:
                return error.report
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    raise SystemExit("nothing overflowed; try a higher learning rate")


def main() -> None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        raise SystemExit(f"none of {', '.join(names)} is installed; try apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(overflow().to_html(), encoding="utf-8")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=20000"]
        options += ["--window-size=1200,1280", f"--screenshot={PICTURE}"]
        subprocess.run([chromium, *options, page.as_uri()], check=True, timeout=300, capture_output=True)


if __name__ == "__main__":
    main()
