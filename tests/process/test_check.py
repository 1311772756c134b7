"""`envactors check`: it finds each defect of the sample envs, and nothing in a sound one."""

from __future__ import annotations

import json
import re
import sys
import types

import pytest

from envactors.cli import main
from envactors.cli.check import examiner
from envactors.cli.check.examiner import Examiner, Looks, Trajectory
from envactors.cli.check.findings import judge_looks, judge_repeat, judge_resets, suggest

ENVS = """
import os, signal, threading, time
from envactors.testing import FAULTS, EchoEnv

class Hangs(EchoEnv):
    def step(self, action):
        FAULTS["hang_in_c"]()

class Crashes(EchoEnv):
    def step(self, action):
        os.kill(os.getpid(), signal.SIGSEGV)

class Balloons(EchoEnv):
    kept = []
    def step(self, action):
        for _ in range(200):  # ends by itself, in case nothing stops it
            self.kept.append(b"\1" * (20 << 20))
            time.sleep(0.02)
        return super().step(action)

class BalloonsElsewhere(EchoEnv):
    def step(self, action):
        if not os.fork():
            Balloons().step(action)
            os._exit(0)
        time.sleep(9)
        return super().step(action)

class Raises(EchoEnv):
    def step(self, action):
        raise ZeroDivisionError("no more rooms")

class TellsTooLittle(EchoEnv):
    def step(self, action):
        return super().step(action)[:4]

class Paints(EchoEnv):
    def step(self, action):
        raise ZeroDivisionError("no \x1b[31mred\a rooms")

class Exits(EchoEnv):
    def step(self, action):
        raise SystemExit(3)

class Interrupts(EchoEnv):
    def step(self, action):
        raise KeyboardInterrupt

class TellsLocks(EchoEnv):
    def reset(self, **arguments):
        return super().reset(**arguments)[0], {"lock": threading.Lock()}

class NoActions(EchoEnv):
    action_space = None

class StartsThreads(EchoEnv):
    def reset(self, **arguments):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().reset(**arguments)

class RaisesAtEnd(EchoEnv):
    def close(self):
        raise ZeroDivisionError("no more rooms")

class HangsAtEnd(EchoEnv):
    def close(self):
        FAULTS["hang_in_c"]()

class HangsInFinalizer(EchoEnv):
    def __del__(self):
        FAULTS["hang_in_c"]()

class Greets(EchoEnv):
    def __init__(self):
        super().__init__(episode_length=20)
        print("hello from the env")

class HangsAtStart(EchoEnv):
    def __init__(self):
        FAULTS["hang_in_c"]()

class Factory:
    def __init__(self):
        self.lock = threading.Lock()
    def __call__(self):
        return EchoEnv()

factory = Factory()

def unmade():
    raise LookupError("no level 7")
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Checks an env, and returns the exit status and what was written as JSON."""
    (tmp_path / "rooms.py").write_text(ENVS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "rooms", raising=False)

    def check(env, *arguments):
        path = tmp_path / "found.json"
        status = main(["check", env, "--seconds", "0.2", "--json", str(path), *arguments])
        return status, json.loads(path.read_text())

    return check


def kinds(record):
    return [finding["kind"] for finding in record["findings"]]


def test_nothing_is_found_in_cartpole(check, capsys):
    pytest.importorskip("gymnasium")
    status, record = check("CartPole-v1")
    assert (status, record["findings"]) == (0, [])
    assert record["settings"]["on_failure"] == "replay"
    assert 0 < record["seconds"]["step_median"] <= record["seconds"]["step"]
    shown = capsys.readouterr().out
    assert "CartPole-v1: nothing was found" in shown
    assert record["line"] in shown


@pytest.mark.parametrize(
    ("env", "found", "on_failure"),
    [
        ("UnpicklableEnv", ["unpicklable state"], "replay"),
        ("NondeterministicEnv", ["nondeterministic"], "renew"),
        ("ProcessBoundEnv", ["not replayable"], "renew"),
        ("SlowResetEnv", ["slow reset"], "replay"),
        ("LeakyEnv", ["leak", "leak"], "replay"),
        ("OutOfSpaceEnv", ["observation outside its space"], "replay"),
    ],
)
def test_each_defect_of_the_sample_envs_is_found_and_no_other(check, env, found, on_failure):
    status, record = check(f"troubled:{env}")
    assert (status, kinds(record)) == (1, found)
    assert record["settings"]["on_failure"] == on_failure
    assert ("recycle" in record["settings"]) == (env == "LeakyEnv")
    assert all(finding["message"].endswith(".") and finding["remedy"] for finding in record["findings"])


@pytest.mark.parametrize(
    ("env", "kind", "text"),
    [
        ("Hangs", "hang", "in step"),
        ("HangsAtStart", "hang", "in __init__"),
        ("Crashes", "crash", "SIGSEGV"),
        ("Raises", "exception", "ZeroDivisionError: no more rooms (File"),
        ("TellsTooLittle", "exception", "TypeError: step returned a tuple of 4: expected (obs, reward, terminated, "),
        ("Paints", "exception", "red"),
        ("Exits", "exception", "SystemExit: 3 (File"),
        ("Interrupts", "exception", "KeyboardInterrupt"),
        ("NoActions", "no actions", "without an action_space"),
        ("unmade", "start", "LookupError: no level 7"),
    ],
)
def test_an_env_that_cannot_be_used_is_a_finding(check, env, kind, text, capsys):
    status, record = check(f"rooms:{env}", "--deadline", "2" if env.startswith("Hangs") else "30")
    assert (status, kinds(record), record["settings"]) == (1, [kind], None)
    assert text in record["findings"][0]["message"]
    printed = capsys.readouterr().out
    assert "The checks after this were not run." in printed
    assert all(c.isprintable() or c == "\n" for c in printed)


def test_a_hang_ends_within_the_deadline_after_the_time_for_its_check(check):
    _, record = check("rooms:Hangs", "--seconds", "2", "--deadline", "1")
    # The first trajectory has a fifth of the time.
    assert record["findings"][0]["message"].startswith("The env did not return within 1.4 s")


@pytest.mark.parametrize("env", ["Balloons", "BalloonsElsewhere"])
def test_an_env_that_leaks_too_much_is_killed_in_time(check, env):
    status, record = check(f"rooms:{env}", "--max-rss", str(300 << 20))
    (found,) = record["findings"]
    assert (status, found["kind"], record["settings"]) == (1, "leak", None)
    held, limit = re.fullmatch(
        r"The env was killed, since it held (\d+) MB of memory: more than (\d+) MB\.", found["message"]
    ).groups()
    assert int(limit) == 315 <= int(held) < 2000
    assert "--max-rss" in found["remedy"]


def test_an_env_may_double_its_memory_and_take_a_gigabyte_by_default(check):
    _, record = check("rooms:Balloons", "--deadline", "90")
    (found,) = record["findings"]
    limit = re.fullmatch(r"The env was killed, .* more than (\d\.\d) GB\.", found["message"]).group(1)
    assert 1.0 < float(limit) < 1.5


@pytest.mark.parametrize(
    ("env", "kind", "text"),
    [
        ("TellsLocks", "unpicklable info", "lock"),
        ("factory", "unpicklable state", "The factory cannot be pickled: its attribute 'lock'"),
        ("StartsThreads", "leak", "more threads after"),
        ("RaisesAtEnd", "exception", "in close"),
        ("HangsAtEnd", "hang", "in close"),
        ("HangsInFinalizer", "hang", "in __del__"),
    ],
)
def test_what_does_not_stop_the_env_is_found_beside_the_settings(check, env, kind, text):
    status, record = check(f"rooms:{env}", "--deadline", "2" if env.startswith("Hangs") else "30")
    assert (status, {*kinds(record)}) == (1, {kind})
    assert text in record["findings"][-1]["message"]
    assert record["line"].startswith("envs = ea.VectorEnv(")


@pytest.mark.parametrize("command", ["check", "tune"])
def test_with_json_on_stdout_nothing_else_is_printed(check, command, run_warm):
    code = "import sys; from envactors.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = [command, "rooms:Greets", "--seconds", "0.2", "--json", "-"]
    ended = run_warm(code, *arguments)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["line"].startswith("envs = ea.VectorEnv(")
    assert "hello from the env" in ended.stderr


def test_neither_rich_nor_psutil_is_needed(run_warm):
    hide = "import sys; sys.modules['rich'] = sys.modules['psutil'] = None; "
    code = f"{hide}from envactors.cli import main; sys.exit(main(sys.argv[1:]))"
    for arguments in (["check", "troubled:UnpicklableEnv", "--seconds", "0.2"], ["doctor"], ["stacks", "999999999"]):
        ended = run_warm(code, *arguments)
        assert (ended.returncode, "Traceback" in ended.stderr) == (int(arguments[0] != "doctor"), False)


def test_an_env_of_gymnasium_needs_gymnasium(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert main(["check", "CartPole-v1"]) == 2
    assert "pip install 'envactors[gymnasium]'" in capsys.readouterr().err


# What is concluded ---------------------------------------------------------------------------------------


def looks(**held):
    return Looks(2, 100.0, {name.replace("_", " "): values for name, values in held.items()}, [])


def test_memory_that_grows_only_at_first_is_not_a_leak():
    settled = [50_000_000 + 10_000_000 * min(look, 3) for look in range(12)]
    up_and_down = [50_000_000 + 3_000_000 * (look % 2) for look in range(12)]
    for memory in (settled, up_and_down):
        assert judge_looks(looks(bytes_of_memory=memory, threads=[3] * 12)) == ([], {})


class OneStep:
    action_space = types.SimpleNamespace(sample=lambda: 0)

    def reset(self):
        return 0, {}

    def step(self, action):
        return 0, 0.0, True, False, {}


def test_the_durations_of_resets_are_no_leak(monkeypatch):
    monkeypatch.setattr(examiner, "_MOST_RESETS", 3)
    assert len(Examiner(OneStep).look(0.01).reset_seconds) == 3


def test_a_leak_is_reported_per_episode_and_limits_the_steps_of_a_process():
    (leak,), lost = judge_looks(looks(file_descriptors=[10 + 4 * look for look in range(12)]))
    assert leak.message == "The process holds 28 more file descriptors after 14 episodes."
    assert lost == {"file descriptors": 4 / 100}
    times = {"start": 1.0, "reset": 0.1, "step": 1e-5, "step_median": 1e-5}
    settings, line = suggest(times, [leak], lost, 10_000_000)
    assert settings["recycle"] == {"max_steps": 5000}
    assert "envs_per_actor" not in settings
    assert line.endswith("recycle=ea.RecyclePolicy(max_steps=5000))")


def test_deadlines_are_far_above_what_was_measured():
    times = {"start": 31.0, "reset": 4.0, "step": 0.26, "step_median": 0.2}
    settings, line = suggest(times, [], {}, 10_000_000)
    assert settings == {
        "deadlines": {"start": 700.0, "reset": 80.0, "step": 6.0},
        "on_failure": "replay",
    }
    assert line == (
        "envs = ea.VectorEnv([make_env] * num_envs, deadlines=ea.Deadlines(start=700.0, reset=80.0, step=6.0), "
        "on_failure='replay')"
    )


def test_a_reset_that_is_no_slower_than_steps_is_not_slow():
    assert judge_resets([0.5, 0.5, 0.6], [0.1]) == []
    assert [one.kind for one in judge_resets([0.5, 0.5, 0.6], [0.01])] == ["slow reset"]


@pytest.mark.parametrize(("at", "what"), [(0, "The first reset"), (2, "Step 2")])
def test_the_first_difference_is_named(at, what):
    events = [("reset", 1), ("step", 2), ("step", 3)]
    other = [*events[:at], ("step", 99), *events[at + 1 :]]
    one, another = (Trajectory(one, [], [], None, None) for one in (events, other))
    (found,) = judge_repeat(one, another, is_fresh=True)
    assert found.message.startswith(f"{what} after reset(seed=0) gives another result")
    assert judge_repeat(one, one, is_fresh=True) == []
