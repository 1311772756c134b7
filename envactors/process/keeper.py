"""The keeper: a second reaper, so that nothing is left behind while the caller replaces one of the two.

It runs the code of `envactors.process.reaper` under another name, so that people and tools can tell the two apart.
"""

from __future__ import annotations

import importlib
import os
import sys

if __name__ == "__main__":
    # It runs without the caller's path, so that it starts quickly and imports none of the caller's modules.
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 # importing pathlib takes time
    importlib.import_module("reaper").main()
