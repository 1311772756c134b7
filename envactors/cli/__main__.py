"""``python -m envactors.cli``: the same as the command ``envactors``."""

from __future__ import annotations

import sys

from envactors.cli import main

sys.exit(main())
