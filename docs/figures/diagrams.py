"""Draws the diagrams of the pages: ``python docs/figures/diagrams.py``. Needs nothing but Python."""

from __future__ import annotations

import html
from pathlib import Path

HERE = Path(__file__).parent
GREEN, RED, BLUE, GOLD, GREY = "#2a7f62", "#b02020", "#3b6ea5", "#b8862b", "#6b7680"
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">\n'
    '<rect width="100%" height="100%" rx="6" fill="#ffffff"/>\n'
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 L8 4 L0 8 z" fill="#444"/></marker></defs>\n'
)


class Drawing:
    """A picture made of boxes, texts, and arrows.

    Args:
        width: In pixels.
        height: In pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        self.parts = [HEAD.format(width=width, height=height)]

    def box(
        self, x: float, y: float, width: float, height: float, text: str, color: str, *, solid: bool = True
    ) -> None:
        """Draw a box with a text in its middle; an empty one has its text at the top."""
        fill, ink = (color, "#ffffff") if solid else ("none", color)
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{color}"/>\n'
        )
        self.text(x + width / 2, y + (height / 2 + 5 if solid else 18), text, ink, anchor="middle")

    def text(self, x: float, y: float, text: str, color: str = "#222222", *, anchor: str = "start") -> None:
        """Write a line of text."""
        self.parts.append(f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{html.escape(text)}</text>\n')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, text: str = "") -> None:
        """Draw an arrow with a text above its middle."""
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#444" marker-end="url(#arrow)"/>\n')
        if text:
            self.text((x1 + x2) / 2, min(y1, y2) + abs(y1 - y2) / 2 - 5, text, "#444444", anchor="middle")

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a dashed line."""
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#bbb" stroke-dasharray="4 3"/>\n')

    def write(self, name: str) -> None:
        """Write the picture."""
        (HERE / f"{name}.svg").write_text("".join(self.parts) + "</svg>\n")


def draw_on_failure() -> None:
    """What the three failure policies return after a crash in the fourth step."""
    drawing = Drawing(760, 190)
    drawing.text(130, 24, "an episode, step by step; the process crashes in step 4", GREY)
    rows = {
        '"raise"': ["step 4 raises", "reset by you", "step 1"],
        '"renew"': ["truncated", "reset", "step 1"],
        '"replay"': ["step 4", "step 5", "step 6"],
    }
    for row, (policy, after) in enumerate(rows.items()):
        y = 40 + 48 * row
        drawing.text(16, y + 21, f"on_failure={policy}"[11:])
        for step in range(3):
            drawing.box(130 + 72 * step, y, 66, 32, f"step {step + 1}", GREEN)
        drawing.text(357, y + 22, "✗", RED, anchor="middle")
        label = "new process" if row < 2 else "repeats 1-3"
        drawing.box(372, y, 92, 32, label, GREY)
        for place, text in enumerate(after):
            drawing.box(472 + 94 * place, y, 88, 32, text, RED if place == 0 and row < 2 else GREEN)
    drawing.write("on-failure")


def draw_rollout() -> None:
    """How often the caller and two workers wait for each other in steps and in a rollout."""
    drawing = Drawing(760, 240)
    for top, title in ((10, "step: the policy runs in your process"), (124, "rollout: the policy runs in the workers")):
        drawing.text(120, top + 14, title, GREY)
        for row, lane in enumerate(("your process", "worker 0", "worker 1")):
            drawing.text(12, top + 40 + 26 * row, lane)
    x = 120
    for turn in range(4):
        drawing.box(x, 36, 48, 20, "policy", BLUE)
        drawing.box(x + 54, 62, (70, 84, 60, 76)[turn], 20, "envs", GREEN)
        drawing.box(x + 54, 88, (84, 62, 84, 66)[turn], 20, "envs", GREEN)
        x += 54 + max((70, 84, 60, 76)[turn], (84, 62, 84, 66)[turn]) + 8
    drawing.box(120, 150, 380, 20, "learn from the previous rollout", GOLD)
    for row, widths in enumerate(((70, 84, 60, 76), (84, 62, 84, 66))):
        x = 120
        for width in widths:
            drawing.box(x, 176 + 26 * row, 26, 20, "π", BLUE)
            drawing.box(x + 28, 176 + 26 * row, width - 10, 20, "envs", GREEN)
            x += width + 20
    drawing.write("rollout")


def draw_nodes() -> None:
    """The processes of a program that uses two other machines."""
    drawing = Drawing(760, 220)
    drawing.box(10, 50, 200, 120, "your machine", GREY, solid=False)
    drawing.box(30, 90, 160, 50, "your program", BLUE)
    for node in range(2):
        y = 10 + 104 * node
        drawing.box(380, y, 370, 96, f"node {'ab'[node]}", GREY, solid=False)
        drawing.box(400, y + 32, 100, 44, "agent", GOLD)
        for worker in range(3):
            x = 540 + 68 * worker
            drawing.box(x, y + 32, 60, 44, "worker", GREEN)
        drawing.arrow(500, y + 54, 540, y + 54)
        drawing.arrow(190, 105 + 22 * node, 400, y + 54, "")
    drawing.text(228, 72, "a TCP connection", "#444444")
    drawing.write("nodes")


def draw_architecture() -> None:
    """The two halves, and what they share."""
    drawing = Drawing(760, 300)
    drawing.box(10, 10, 330, 280, "the caller's process", GREY, solid=False)
    drawing.box(550, 10, 200, 280, "a worker", GREY, solid=False)
    drawing.box(30, 44, 290, 32, "VectorEnv: batches, episodes, results", BLUE)
    drawing.box(30, 88, 290, 32, "Slots: one state per env", BLUE)
    drawing.box(30, 132, 290, 32, "actors: calls, rows, deadlines, restarts", BLUE)
    drawing.box(30, 176, 140, 32, "pure decisions", GOLD)
    drawing.box(180, 176, 140, 32, "journal (replay)", GOLD)
    drawing.box(30, 220, 140, 32, "reactor's thread", GREY)
    drawing.box(180, 220, 140, 32, "callbacks' threads", GREY)
    drawing.box(570, 44, 160, 32, "host: the envs", GREEN)
    drawing.box(570, 88, 160, 32, "step runner, policy", GREEN)
    drawing.box(570, 132, 160, 32, "main: waits and serves", GREEN)
    drawing.box(376, 60, 140, 40, "slab: rows of envs", RED)
    drawing.box(376, 120, 140, 40, "control page", RED)
    drawing.box(376, 180, 140, 40, "channel (socket)", RED)
    drawing.text(446, 248, "shared", GREY, anchor="middle")
    for y in (80, 140, 200):
        drawing.arrow(340, y, 376, y)
        drawing.arrow(516, y, 550, y)
    drawing.write("architecture")


def main() -> None:
    """Draw all of them."""
    draw_on_failure()
    draw_rollout()
    draw_nodes()
    draw_architecture()


if __name__ == "__main__":
    main()
