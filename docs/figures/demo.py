"""Records ``envactors demo`` as an animation: ``python docs/figures/demo.py``, with the extra ``demo``.

The demo runs in a terminal of fixed size; some of the pictures that it draws become the frames of ``docs/demo.svg``.
"""

from __future__ import annotations

import html
import os
import pty
import re
import struct
import subprocess
import sys
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "demo.svg"
COLUMNS, LINES = 118, 30
FRAMES = 18
FRAME_SECONDS = 0.6
LAST_FRAME_TICKS = 6
# Before each picture, Rich erases the lines of the one before.
ERASED = re.compile(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")
CHARACTER, LINE = 8.4, 18  # width and height, in pixels
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="monospace" font-size="14">
<style>
text {{ white-space: pre }}
.f {{ visibility: hidden; animation: f {seconds:.1f}s step-end infinite }}
.last {{ visibility: hidden; animation: l {seconds:.1f}s step-end infinite }}
@keyframes f {{ 0% {{ visibility: visible }} {share:.3f}% {{ visibility: hidden }} }}
@keyframes l {{ 0% {{ visibility: visible }} {last:.3f}% {{ visibility: hidden }} }}
@media (prefers-reduced-motion: reduce) {{ .f {{ animation: none }} .last {{ animation: none; visibility: visible }} }}
</style>
<rect width="100%" height="100%" rx="8" fill="#292929"/>
"""


def record() -> str:
    """Return everything that the demo writes to a terminal."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command = [sys.executable, "-m", "envactors.cli", "demo"]
    demo = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)  # noqa: S603
    os.close(theirs)
    written = bytearray()
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the demo has ended
            break
        if not part:
            break
        written += part
    demo.wait()
    return written.decode()


def choose(pictures: list[str]) -> list[str]:
    """Return evenly spaced pictures, and the last one with the summary."""
    whole = [picture for picture in pictures if "faults injected" in picture]
    step = max(1, len(whole) // (FRAMES - 1))
    return [*whole[::step][: FRAMES - 1], whole[-1]]


def draw_line(spans: list[tuple[str, Style]], y: float) -> str:
    """Return one line of a terminal as SVG; each span has its own position, so that columns stay aligned."""
    parts, column = [], 0
    for text, style in spans:
        if text.strip():
            color = style.color.get_truecolor(MONOKAI).hex if style.color else "#d9d9d9"
            weight = ' font-weight="bold"' if style.bold else ""
            fade = ' opacity=".6"' if style.dim else ""
            x = 10 + column * CHARACTER
            length = len(text) * CHARACTER
            parts.append(
                f'<text x="{x:.1f}" y="{y:.0f}" textLength="{length:.1f}" fill="{color}"{weight}{fade}>'
                f"{html.escape(text)}</text>"
            )
        column += len(text)
    return "".join(parts)


def draw(frames: list[str]) -> str:
    """Return the animation."""
    console = Console(width=COLUMNS, force_terminal=True, color_system="truecolor", file=None)
    ticks = len(frames) - 1 + LAST_FRAME_TICKS
    seconds = ticks * FRAME_SECONDS
    lines = max(frame.count("\n") for frame in frames) + 1
    text = HEAD.format(
        width=COLUMNS * CHARACTER + 20,
        height=lines * LINE + 24,
        seconds=seconds,
        share=100 / ticks,
        last=100 * LAST_FRAME_TICKS / ticks,
    )
    for number, frame in enumerate(frames):
        name = "last" if number == len(frames) - 1 else "f"
        text += f'<g class="{name}" style="animation-delay:{number * FRAME_SECONDS - seconds:.1f}s">\n'
        rendered = console.render_lines(Text.from_ansi(frame), pad=False)
        for row, segments in enumerate(rendered):
            spans = [(segment.text, segment.style or Style()) for segment in segments if not segment.control]
            if line := draw_line(spans, 24 + row * LINE):
                text += line + "\n"
        text += "</g>\n"
    return text + "</svg>\n"


def main() -> None:
    """Record the demo, and write the picture."""
    pictures = ERASED.split(record())
    frames = [picture.replace("\r\n", "\n").rstrip() for picture in choose(pictures)]
    PICTURE.write_text(draw(frames))
    print(f"{PICTURE}: {len(frames)} frames, {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
