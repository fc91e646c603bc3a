"""Draws loss.csv, as train.py wrote it: `python -m tools.train_tiny.plot loss.csv loss.png` (needs matplotlib)."""

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CURVES = {
    "train_loss": ("training mix (with dropout)", "0.7", 1.0),
    "held_out_books_loss": ("held-out books", "tab:blue", 2.0),
    "held_out_chats_loss": ("held-out chats, assistant tokens", "tab:orange", 2.0),
}


def draw(source: Path, target: Path) -> None:
    with source.open(newline="") as f:
        rows = list(csv.DictReader(f))
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=110)
    for column, (label, color, width) in CURVES.items():
        points = [(int(r["tokens"]) / 1e6, float(r[column])) for r in rows if r[column]]
        axes.plot(*zip(*points, strict=True), label=label, color=color, linewidth=width)
    axes.set(xlabel="million tokens seen", ylabel="loss, nats a token", title="twinflow-tiny", ylim=(0.0, 5.0))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
