"""Bugs of pools of sessions; see `simulation.mutants`."""

from __future__ import annotations

from simulation.mutants import HANGS, MIXES, Mutant

ONCE = "a session ends exactly once"
PLACES_LOST = "no place of a pool is lost"
KINDS = "a failure never looks like a result"
SIZE = "no more sessions run than may"

POOL = "sessions.pool:SessionPool."
PLACES = "sessions.places:Places."
SESSION = "sessions.session:Session."
LEASE = "sessions.lease:Lease."
IDLE = "sessions.idle_watch:IdleWatch."

SESSION_MUTANTS = [
    Mutant(POOL + "_queue", "self._serve()", "pass", HANGS),
    Mutant(POOL + "_withdraw", "self._places.forget(request)", "pass", PLACES_LOST),
    Mutant(POOL + "_withdraw", "self._finish(session", "(session", PLACES_LOST),
    Mutant(POOL + "_finish", "outcome = session.finish(outcome)", "session.finish(outcome)", ONCE),
    Mutant(POOL + "_finish", "if place is None:\n            return\n        ", "", ONCE),
    Mutant(POOL + "_finish", "place.actor.kill(restart=True)", "pass", MIXES),
    Mutant(POOL + "_finish", "place.actor.renew)", "functools.partial(_readiness, place.actor))", MIXES),
    Mutant(POOL + "_finish", 'self._fresh == "reset" and', "", MIXES),
    Mutant(POOL + "_finish", "    self._serve()", "    pass", HANGS),
    Mutant(POOL + "_on_prepared", "    self._serve()", "    pass", HANGS),
    Mutant(POOL + "_serve", "self._places.take_broken()", "[]", HANGS),
    Mutant(POOL + "_end_idle", "time.monotonic() - since >= limit", "True", "a session with calls is not idle"),
    Mutant(PLACES + "match", "self.count(Phase.LEASED) >= self._size", "False", SIZE),
    Mutant(PLACES + "match", "ready.phase = Phase.LEASED", "pass", MIXES),
    Mutant(PLACES + "take_back", "place.session = None", "pass", PLACES_LOST),
    Mutant(
        SESSION + "finish",
        "self._ended.setdefault(None, outcome)",
        "self._ended.update({None: outcome}) or outcome",
        ONCE,
    ),
    Mutant(SESSION + "note_end", "self._calls.pop(future, None)", "pass", HANGS),
    Mutant(SESSION + "note_end", "self._fatal = error", "pass", KINDS),
    Mutant(LEASE + "__enter__", "self._pool.give_up(request, error)", "pass", PLACES_LOST),
    Mutant(LEASE + "__aenter__", "self._pool.give_up(request, error)", "pass", PLACES_LOST),
    Mutant(IDLE + "begin", "reactor.watch_timers(self)", "pass", HANGS),
    Mutant(IDLE + "on_timer", "limits_at.append(limit_at)", "pass", HANGS),
    Mutant(IDLE + "on_timer", "now + self._limit if since is None else", "", "a session with calls is not idle"),
    Mutant("sessions.runs:Trial.outcome", "if isinstance(ended, Failed):", "if False:", KINDS),
    Mutant("sessions.runs:Run._is_final", "attempt < self._retries", "attempt <= self._retries", "retries are limited"),
]
