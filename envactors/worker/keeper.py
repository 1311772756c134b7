"""The keeper: a second reaper, so that nothing is left behind while the caller replaces one of the two.

It runs the code of the reaper (`envactors.worker.reaper`), and is a program of its own so that people and tools can
tell the two apart.
"""

from __future__ import annotations

import importlib
import os
import sys

if __name__ == "__main__":
    # It is started without the caller's path, so that it starts quickly and no module of the caller is imported.
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 # importing pathlib takes time
    importlib.import_module("reaper").main()
