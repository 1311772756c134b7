"""`ea.trace`: what actors and callers did, as a file that trace viewers open."""

from __future__ import annotations

import collections
import io
import json
import math
import mmap
import os
import signal
import threading
import time

import pytest
from helpers import SOON, Counter, wait_until
from hypothesis import given
from hypothesis import strategies as st

import envactors as ea
from envactors.actor import recording
from envactors.mailbox.durations import METHOD_RESET, METHOD_STEP, summarize
from envactors.mailbox.spans import SPANS_KEPT, SpanRing, measured_size
from envactors.observe import trace as trace_module
from envactors.observe.trace_file import CallerSpan, Notice, Span, write_trace
from envactors.remote import LocalNodes
from envactors.testing import EchoEnv, FaultyEnv


class Track(list):
    """The spans of one track: (name, begin, end, details), in nanoseconds."""


def check(text):
    """Check a trace as trace viewers read it; return its tracks, and its instants as (track, text), by name."""
    events = json.loads(text)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks, instants = {tid: Track() for tid in names}, []
    for event in events:
        assert event["pid"] == 1
        if event["ph"] == "X":
            assert math.isfinite(event["ts"])
            assert event["dur"] >= 0
            begin = round(event["ts"] * 1000)
            tracks[event["tid"]].append((event["name"], begin, begin + round(event["dur"] * 1000), event["args"]))
        elif event["ph"] == "i":
            assert event["s"] in ("t", "g")
            assert event["ts"] >= 0
            instants.append((names[event["tid"]], event["name"]))
        else:
            assert event["ph"] == "M"
    for track in tracks.values():
        open_ends = []
        for _, begin, end, _ in sorted(track, key=lambda span: (span[1], -span[2])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "spans are nested or apart"
            open_ends.append(end)
    by_name = collections.defaultdict(Track)
    for tid, track in tracks.items():
        by_name[names[tid]] += track
    return by_name, instants


def counts(track):
    return collections.Counter(name for name, *_ in track)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.json"


BACKENDS = {
    "process": {},
    "thread": {"backend": "thread"},
    "inline": {"backend": "inline"},
}


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_every_step_reset_call_and_wait_is_in_it(options, path):
    with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(3)], envs_per_actor=2, **options) as envs:
        envs.reset(seed=0)
        with ea.trace(path):
            envs.reset(seed=1)
            for _ in range(20):
                envs.step([0, 1, 2])
                time.sleep(0.0005)
            envs.send([0, 1, 2])
            envs.recv()
            assert envs.get_attr("env_id") == [0, 1, 2]
        envs.step([0, 1, 2])
        assert envs.stats().steps == [22] * 3
    tracks, _ = check(path.read_text())
    steps = [details["env"] for name, _, _, details in tracks["envs-0-1"] if name == "step"]
    assert collections.Counter(steps) == {0: 21, 1: 21}
    assert counts(tracks["envs-2-2"]) == {"step": 21, "reset": 1, "get('env_id')": 1}
    caller = counts(tracks["caller of vector 0"])
    assert (caller["wait in reset"], caller["wait in step"], caller["wait in recv"]) == (1, 20, 1)
    assert caller["policy"] >= 20
    waits = [(begin, end) for name, begin, end, _ in tracks["caller of vector 0"] if name != "policy"]
    if options.get("backend") != "inline":  # there `send` runs what it starts
        for _, begin, end, _ in tracks["envs-2-2"][:21]:
            slack = 300_000_000
            assert any(first - slack <= begin <= end <= last + slack for first, last in waits)


def test_starts_losses_and_renewals_are_in_it(path):
    with ea.trace(path):
        factories = [lambda: FaultyEnv(EchoEnv())] * 2
        with ea.VectorEnv(factories, on_failure="renew", deadlines=ea.Deadlines(step=0.5)) as envs:
            envs.reset(seed=0)
            envs[1].arm("crash").result(SOON)
            envs.step([1, 1])
            envs.step([1, 1])
            envs[0].arm("hang_in_c").result(SOON)
            envs.step([1, 1])
            envs.step([1, 1])
    tracks, instants = check(path.read_text())
    for env in (0, 1):
        names = counts(tracks[f"env-{env}"])
        assert (names["start"], names["renewal"], names["step (lost)"]) == (2, 1, 1)
        (renewal,) = [span for span in tracks[f"env-{env}"] if span[0] == "renewal"]
        assert any(
            name == "start" and begin >= renewal[1] and end <= renewal[2]
            for name, begin, end, _ in tracks[f"env-{env}"]
        )
    lost = next(end - begin for name, begin, end, _ in tracks["env-0"] if name == "step (lost)")
    assert 0.4e9 < lost < SOON * 1e9
    told = collections.Counter((track, "has started" in text) for track, text in instants)
    # The loss, and the restart after a pause.
    assert told == {("env-0", True): 2, ("env-1", True): 2, ("env-0", False): 2, ("env-1", False): 2}


def test_nodes_and_their_envs_are_in_it(path):
    launcher = LocalNodes(2)
    backend = ea.RemoteBackend(launcher, heartbeat=0.1, lease=1.0)
    with (
        ea.trace(path),
        ea.VectorEnv(
            [lambda i=i: EchoEnv(i) for i in range(4)], envs_per_actor=2, backend=backend, on_failure="renew"
        ) as envs,
    ):
        envs.reset(seed=0)
        for _ in range(5):
            envs.step([0] * 4)
        wait_until(lambda: [one.count for one in envs.stats().step_seconds] == [5] * 4)
        time.sleep(0.2)  # the trace collects what heartbeats have brought
        launcher.agents["local-0"].kill()
        for _ in range(5):
            envs.step([0] * 4)
    tracks, instants = check(path.read_text())
    steps = [span for name in ("envs-0-1", "envs-2-3") for span in tracks[name] if span[0] == "step"]
    assert len(steps) >= 4 * 5
    assert max(begin for _, begin, _, _ in steps) < SOON * 1e9
    told = [text for track, text in instants if track == "nodes"]
    assert sum("has joined" in text for text in told) == 2
    assert sum("is lost" in text for text in told) == 1


def test_calls_of_an_actor_and_its_closing(path):
    with ea.trace(path), ea.spawn(Counter, name="one") as actor:
        for _ in range(3):
            actor.add(1).result(SOON)
    tracks, _ = check(path.read_text())
    assert counts(tracks["one"])["add"] == 3


def test_one_trace_at_a_time(path, tmp_path):
    with ea.trace(path):
        with pytest.raises(RuntimeError, match="is being recorded already"), ea.trace(tmp_path / "other.json"):
            pass
        with ea.spawn(Counter, name="first") as actor:
            actor.add(1).result(SOON)
    assert not (tmp_path / "other.json").exists()
    with ea.trace(path):
        pass
    assert "first" not in check(path.read_text())[0]


def test_a_file_that_cannot_be_written_is_reported_immediately(tmp_path):
    with pytest.raises(FileNotFoundError), ea.trace(tmp_path / "nowhere" / "run.json"):
        pass
    assert not recording.is_recording()


@pytest.mark.parametrize("where", ["thread", "first look", "writing"])
def test_a_trace_that_fails_leaves_nothing_behind(path, monkeypatch, where):
    def interrupt(*_):
        raise KeyboardInterrupt

    path.write_text("an older trace")
    name = {"thread": "collecting", "first look": "begin", "writing": "content"}[where]
    with monkeypatch.context() as patch:
        patch.setattr(trace_module.TraceRecorder, name, interrupt)
        with pytest.raises(KeyboardInterrupt), ea.trace(path):
            pass
    assert not recording.is_recording()
    assert (path.read_text() == "an older trace") == (where != "writing")
    assert "envactors-trace" not in [thread.name for thread in threading.enumerate()]
    with ea.trace(path), ea.spawn(Counter, name="next") as actor:
        actor.add(1).result(SOON)
    assert "next" in check(path.read_text())[0]


def test_a_forked_process_that_leaves_the_block_writes_no_trace(path, run_warm):
    done = run_warm(
        """
        import os, sys, warnings
        import envactors as ea

        warnings.simplefilter("ignore")  # of forks of processes with threads
        actor = ea.spawn(lambda: "text", name="one")
        with ea.trace(sys.argv[1]):
            actor.upper().result()
            if not (child := os.fork()):
                sys.exit()
            os.waitpid(child, 0)
        """,
        str(path),
    )
    assert done.returncode == 0, done.stderr
    assert counts(check(path.read_text())[0]["one"])["upper"] == 1


def test_a_trace_that_is_interrupted_at_its_end_ends_all_the_same(path, monkeypatch):
    release, calls = trace_module._release, []

    def interrupted(recorder):
        calls.append(recorder)
        if len(calls) == 1:
            raise KeyboardInterrupt
        release(recorder)

    monkeypatch.setattr(trace_module, "_release", interrupted)
    with pytest.raises(KeyboardInterrupt), ea.trace(path):
        pass
    assert not recording.is_recording()


def test_a_trace_that_is_interrupted_while_its_thread_starts_ends_the_thread(path, monkeypatch):
    class InterruptedThread(trace_module.LibraryThread):
        def start(self):
            super().start()
            raise KeyboardInterrupt

    monkeypatch.setattr(trace_module, "LibraryThread", InterruptedThread)
    with pytest.raises(KeyboardInterrupt), ea.trace(path):
        pass
    assert "envactors-trace" not in [thread.name for thread in threading.enumerate()]


def test_memory_is_bounded_and_the_last_is_kept(path, monkeypatch):
    monkeypatch.setattr(trace_module, "MOST_STEPS", 500)
    monkeypatch.setattr(trace_module, "MOST_WAITS", 50)
    with ea.VectorEnv([EchoEnv]) as envs:
        envs.reset(seed=0)
        with ea.trace(path):
            running = recording.recorder
            for _ in range(SPANS_KEPT):
                envs.step([0])
            assert running.row_count <= 500 + SPANS_KEPT
            wait_until(lambda: running.row_count <= 500)
            envs.step([0])
            last = envs.actors[0]._actor.lock.last_call_id
    tracks, _ = check(path.read_text())
    steps = [details["call"] for name, _, _, details in tracks["env-0"] if name == "step"]
    assert 400 < len(steps) <= 500
    assert max(steps) == last
    assert counts(tracks["caller of vector 0"])["wait in step"] == 50


def test_a_vector_that_was_closed_before_is_not_in_it(path):
    with ea.VectorEnv([EchoEnv]) as closed:
        closed.reset()
    with ea.VectorEnv([EchoEnv]) as envs:
        envs.reset()
        with ea.trace(path):
            envs.step([0])
    tracks, _ = check(path.read_text())
    assert [name for name in tracks if name.startswith("caller of vector")] == ["caller of vector 0"]
    assert counts(tracks["caller of vector 0"])["wait in step"] == 1


def test_the_environment_starts_one(path, monkeypatch, run_warm):
    monkeypatch.setenv("ENVACTORS_TRACE", str(path))
    done = run_warm(
        """
        import os

        import envactors as ea
        from envactors.testing import EchoEnv

        with ea.VectorEnv([EchoEnv] * 2) as envs:
            envs.reset(seed=0)
            envs.step([0, 1])
            assert "ENVACTORS_TRACE" not in os.environ
        """
    )
    assert (done.stdout, done.stderr) == ("", "")
    tracks, _ = check(path.read_text())
    assert counts(tracks["env-1"])["step"] == 1


def test_a_trace_by_environment_gives_way_to_the_programs_own(path, tmp_path, monkeypatch, run_warm):
    monkeypatch.setenv("ENVACTORS_TRACE", str(path))
    own = tmp_path / "own.json"
    done = run_warm(
        f"""
        import envactors as ea
        from envactors.testing import EchoEnv

        with ea.trace({str(own)!r}), ea.spawn(EchoEnv, backend="inline") as actor:
            actor.reset(seed=0).result()
        """
    )
    assert "ENVACTORS_TRACE is set, and nothing is recorded" in done.stderr
    assert not path.exists()
    tracks, _ = check(own.read_text())
    assert counts(tracks["actor-0"])["reset"] == 1


def test_threads_that_use_actors_while_traces_begin_and_end(path):
    stop = threading.Event()

    def use():
        while not stop.is_set():
            with ea.VectorEnv([EchoEnv] * 2, backend="thread") as envs:
                envs.reset(seed=0)
                envs.step([0, 1])

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            with ea.trace(path):
                time.sleep(0.02)
            check(path.read_text())
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def ring_of(envs):
    return SpanRing(memoryview(bytearray(measured_size(envs))))


@given(st.lists(st.one_of(st.integers(1, 3 * SPANS_KEPT), st.none()), max_size=8))
def test_a_ring_yields_the_last_spans_in_order_and_counts_all(script):
    """So many numbers are written at a time; None reads."""
    ring, written, seen, last = ring_of(7), 0, 0, -1
    for count in [*script, None]:
        if count is None:
            spans, seen = ring.read(seen)
            assert seen == ring.written == written
            assert spans["call_id"].tolist() == list(range(max(last + 1, written - SPANS_KEPT + 1), written))
            assert (spans["begin"] == spans["call_id"]).all()
            last = written - 1
            counted = [one for pair in summarize(ring.histograms) for one in pair]
            assert sum(one.count for one in counted) == written
            assert math.isclose(sum(one.total for one in counted), 0.5 * written)
        else:
            for number in range(written, written + count):
                ring.add(float(number), number + 0.5, number, number % 7, (METHOD_STEP, METHOD_RESET)[number % 2])
            written += count


def test_a_copy_of_a_ring_has_the_same_spans():
    ring, copy, seen = ring_of(2), ring_of(3), 0
    for number in range(3 * SPANS_KEPT):
        ring.add(float(number), float(number), number, 1, METHOD_STEP)
        if number % 1000 == 999:
            spans, seen = ring.read(seen)
            copy.extend(spans)
    mine, _ = copy.read(copy.written - 2000)
    assert mine["call_id"].tolist() == list(range(seen - 2000, seen))


def test_a_reader_never_finds_a_torn_span_or_counts_that_decrease():
    with mmap.mmap(-1, measured_size(3)) as memory:
        view = memoryview(memory)
        ring = SpanRing(view)
        writer = os.fork()
        if writer == 0:
            number = 0
            while True:
                ring.add(float(number), number + 0.25, number, number % 3, METHOD_STEP)
                number += 1
        try:
            seen, spans, before = 0, [], 0
            while ring.written < 32 * SPANS_KEPT:
                new, seen = ring.read(seen)
                spans.append(new)
                written = ring.written
                copied = ring.histograms.copy()
                meanwhile = ring.written - written + 2  # the writer counts on while a reader copies
                counted = [steps for steps, _ in summarize(copied)]
                counts = [one.count for one in counted]
                assert sum(counts) >= before
                before = sum(counts)
                assert max(counts) - min(counts) <= meanwhile
                assert all(abs(one.total - 0.25 * one.count) <= meanwhile for one in counted)
        finally:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
        counted = sum(steps.count for steps, _ in summarize(ring.histograms))
        assert counted in (ring.written, ring.written - 1), "it may have ended between the two"
        assert counted > 3 * SPANS_KEPT
        for new in spans:
            assert (new["begin"] == new["call_id"]).all()
            assert (new["end"] == new["call_id"] + 0.25).all()
            assert (new["position"] == new["call_id"] % 3).all()
        del ring, view, new, spans


spans_of_any_kind = st.builds(
    lambda track, begin, length: Span(track, "step", begin, begin + length),
    st.integers(0, 2),
    st.floats(0, 10),
    st.floats(0, 3),
)


@given(st.lists(spans_of_any_kind, max_size=30), st.lists(st.floats(-1, 10), max_size=5))
def test_spans_in_the_file_are_nested(spans, instants):
    file = io.StringIO()
    notices = [Notice(None if at < 0 else 1, "something\nhappens", at) for at in instants]
    write_trace(file, 1.0, ["a", "b", "c"], spans, notices, [[CallerSpan("policy", 0.0, 1.5)]])
    tracks, found = check(file.getvalue())
    assert sum(map(len, tracks.values())) == len(spans) + 1
    assert len(found) == len(instants)


def test_perfetto_reads_it(path):
    processor = pytest.importorskip("perfetto.trace_processor")
    with ea.VectorEnv([EchoEnv] * 2) as envs, ea.trace(path):
        envs.reset(seed=0)
        for _ in range(10):
            envs.step([0, 1])
    try:
        reader = processor.TraceProcessor(trace=str(path))
    except Exception as error:
        pytest.skip(f"Perfetto has to load a program of its own first: {error!r}")
    with reader:
        steps = next(iter(reader.query("select count(*) as count from slice where name = 'step'"))).count
        assert steps == 20
        assert not list(reader.query("select name from stats where severity = 'error' and value > 0"))
