"""The signals that workers are sent."""

from __future__ import annotations

import signal

# Asks a worker for the stacks of its threads. A real-time signal, so that SIGUSR1 and SIGUSR2 stay the env's own.
STACKS_SIGNAL = signal.SIGRTMIN + 9

SIGKILL = signal.SIGKILL
