"""Draws what `cache_replay --json` has measured, as an SVG that suits light and dark pages.

    python -m benchmarks.cache_picture points.json docs/cache-replay.svg

One panel for each part that no constant was chosen on, with overlapping requests: bars by capacity where policies were
compared, the ceiling as a line.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

BARS = {
    "prompt": "one state per prompt",
    "lru": "least recently used",
    "fixed 0.25": "fixed split, 1/4 for states",
    "ours": "ours",
}
MODE = "overlapping"
PANEL_W, PANEL_H, GAP, LEFT, TOP, BOTTOM = 268, 170, 34, 40, 58, 46
GRID = (0, 25, 50, 75, 100)

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #3d444d }
  .title { font-weight: 600 } .small { font-size: 10.5px }
  .grid { stroke: #8b949e; stroke-opacity: .3 } .ceiling { stroke: #cf5c00; stroke-width: 1.5; stroke-dasharray: 5 3 }
  .prompt { fill: #c3c9d0 } .lru { fill: #8b949e } .fixed { fill: #7fb0e6 } .ours { fill: #0b62c4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #d1d7e0 } .ceiling { stroke: #ff9d4d }
    .prompt { fill: #4b535d } .lru { fill: #7d8590 } .fixed { fill: #2f5f96 } .ours { fill: #58a6ff }
  }
"""


def css(name: str) -> str:
    return name.split()[0]


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{words}</text>'


def legend() -> Iterator[str]:
    x = LEFT
    for name, words in BARS.items():
        yield f'<rect x="{x}" y="12" width="11" height="11" class="{css(name)}"/>'
        yield text(x + 16, 22, words)
        x += 34 + 7 * len(words)
    yield f'<line x1="{x}" x2="{x + 22}" y1="18" y2="18" class="ceiling"/>'
    yield text(x + 28, 22, "forgets nothing")


def panel(part: str, points: list[dict], left: float) -> Iterator[str]:
    """Bars of one part. `points` ascend in capacity."""
    base = TOP + PANEL_H

    def y(percent: float) -> float:
        return base - PANEL_H * percent / 100

    yield text(left, TOP - 12, part, kind="title")
    for percent in GRID:
        yield f'<line x1="{left}" x2="{left + PANEL_W}" y1="{y(percent)}" y2="{y(percent)}" class="grid"/>'
        yield text(left - 5, y(percent) + 4, f"{percent}", "end", "small")
    group = PANEL_W / len(points)
    for k, point in enumerate(points):
        shown = [name for name in BARS if name in point["shares"]]
        width = 0.8 * group / len(BARS)
        at = left + group * (k + 0.5) - width * len(shown) / 2
        for name in shown:
            share = point["shares"][name]
            yield (
                f'<rect x="{at:.1f}" y="{y(share):.1f}" width="{width - 1:.1f}" height="{base - y(share):.1f}" '
                f'class="{css(name)}"><title>{part}, {point["gib"]:,} GiB, {BARS[name]}: {share:.2f} %</title></rect>'
            )
            at += width
        ours, most = point["shares"]["ours"], point["ceiling"]
        above = most if 0 <= most - ours < 10 else ours  # not across the line
        yield text(at - width / 2, y(above) - 4, f"{ours:.1f}", "middle", "small")
        yield text(left + group * (k + 0.5), base + 16, f"{point['gib']:,}", "middle")
    most = points[0]["ceiling"]
    yield f'<line x1="{left}" x2="{left + PANEL_W}" y1="{y(most):.1f}" y2="{y(most):.1f}" class="ceiling"/>'


def draw(points: list[dict]) -> str:
    """Raises ValueError if no point is there to be shown."""
    shown = [p for p in points if p["mode"] == MODE and not p["tuned"] and len(p["shares"].keys() & BARS.keys()) > 1]
    if not shown:
        raise ValueError(f"none of the {len(points)} points is held out, has the mode {MODE!r} and anything to compare")
    parts = list(dict.fromkeys(p["part"] for p in shown))
    width = LEFT + len(parts) * (PANEL_W + GAP)
    height = TOP + PANEL_H + BOTTOM
    body = list(legend())
    for k, part in enumerate(parts):
        chosen = sorted((p for p in shown if p["part"] == part), key=lambda p: p["gib"])
        body += panel(part, chosen, LEFT + k * (PANEL_W + GAP))
    body.append(text(LEFT, height - 10, "per cent of prompt tokens that needed no computing, by capacity in GiB"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="Cache replay: tokens saved by policy and capacity">\n<style>{STYLE}</style>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path, help="written by cache_replay --json")
    parser.add_argument("svg", type=Path)
    args = parser.parse_args()
    args.svg.write_text(draw(json.loads(args.points.read_text())))


if __name__ == "__main__":
    main()
