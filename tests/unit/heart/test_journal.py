"""Journals: what they record, and when they can be replayed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from envactors.mailbox.messages import Attach, Kind, RecordedSteps, Set
from envactors.mailbox.pickling import Sealed, dumps, loads
from envactors.mailbox.slab import RESET
from envactors.mailbox.step_buffer import StepBuffer
from envactors.replay import Journal, PostedRequest

ATTACH = Attach(SimpleNamespace(action=None), resets_within_step=False)


def steps(count):
    return [np.arange(count).tobytes()], bytes(count)


def test_a_journal_begins_with_a_seeded_reset():
    journal = Journal(0, 100)
    journal.record_steps(*steps(3), checksum=1)
    assert not journal.can_replay
    assert journal.replay_message(ATTACH) is None
    journal.begin(7, checksum=2)
    journal.record_steps(*steps(3), checksum=3)
    replay = journal.replay_message(ATTACH)
    assert [type(entry) for entry in replay.entries] == [tuple, RecordedSteps]
    assert replay.checksum == 3


def test_consecutive_steps_share_an_entry_and_calls_stand_between():
    journal = Journal(0, 100)
    journal.begin(7, checksum=0)
    journal.record_steps(*steps(2), checksum=1)
    journal.record_steps(*steps(1), checksum=2)
    journal.record_call(Kind.CALL, b"call", failed=False)
    journal.record_steps(*steps(1), checksum=3)
    entries = journal.replay_message(ATTACH).entries
    assert [len(entry.resets) if isinstance(entry, RecordedSteps) else entry[0] for entry in entries] == [
        Kind.RESET,
        3,
        Kind.CALL,
        1,
    ]


def test_a_journal_over_its_limit_is_forgotten():
    journal = Journal(0, 3)
    journal.begin(7, checksum=0)
    journal.record_steps(*steps(3), checksum=1)
    assert journal.can_replay
    journal.record_steps(*steps(1), checksum=2)
    assert not journal.can_replay


def test_attributes_survive_what_is_forgotten():
    journal = Journal(0, 100)
    payload = bytes(dumps(tuple(Set(0, "speed", Sealed(2)))))
    journal.record_call(Kind.SET, payload, failed=False)
    journal.begin(7, checksum=0)
    journal.record_call(Kind.SET, payload, failed=False)
    journal.record_call(Kind.SET, payload, failed=True)
    assert len(journal.replay_message(ATTACH).entries) == 2
    journal.forget()
    assert journal.replay_message(ATTACH).attributes == [payload]
    assert journal.replay_message(ATTACH).entries == []


def test_the_same_inputs_are_not_tried_a_third_time():
    journal = Journal(0, 100)
    step = PostedRequest(0, None, None, resets_within_step=False, actions=())
    assert not journal.can_retry(step)
    journal.begin(7, checksum=0)
    assert journal.can_retry(step)
    journal.count_crash()
    assert not journal.can_retry(step)
    journal.record_steps(*steps(1), checksum=1)
    assert journal.can_retry(step)


def test_a_journal_whose_replay_ends_two_processes_in_a_row_is_forgotten():
    journal = Journal(0, 100)
    journal.begin(7, checksum=0)
    journal.record_replay(crashed=True)
    journal.record_replay(crashed=False)
    journal.record_replay(crashed=True)
    assert journal.can_replay
    journal.record_replay(crashed=True)
    assert not journal.can_replay
    journal.begin(7, checksum=0)
    journal.record_replay(crashed=True)
    assert journal.can_replay


def test_a_journal_begins_anew_with_a_saved_state():
    journal = Journal(0, 100)
    journal.record_steps(*steps(3), checksum=1)
    journal.begin_with_state(5, b"state")
    assert journal.can_replay
    assert journal.age == 0
    journal.record_steps(*steps(2), checksum=6)
    (kind, payload), recorded = journal.replay_message(ATTACH).entries
    assert (kind, loads(payload)) == (Kind.RESTORE, (0, 5, b"state"))
    assert len(recorded.resets) == 2


def test_saves_are_due_after_so_many_steps_also_of_an_env_that_cannot_be_replayed():
    due = []
    journal = Journal(0, 100, save_every=4, on_save_due=lambda: due.append(journal.age))
    journal.record_steps(*steps(3), checksum=1)
    assert due == []
    journal.record_steps(*steps(6), checksum=1)
    assert due == [9]
    journal.begin_with_state(1, b"state")
    journal.record_steps(*steps(3), checksum=1)
    journal.record_call(Kind.CALL, b"call", failed=False)
    assert due == [9, 4]


def test_saves_are_due_although_the_steps_do_not_fit():
    due = []
    journal = Journal(0, 3, save_every=4, on_save_due=lambda: due.append(True))
    journal.begin(7, checksum=0)
    journal.record_steps(*steps(4), checksum=1)
    assert due == [True]
    assert not journal.can_replay


class StepList:
    """Keeps the steps that a journal is given."""

    def __init__(self):
        self.actions, self.resets = b"", b""

    def record_steps(self, actions, resets, checksum):
        self.actions += actions[0]
        self.resets += resets


def test_more_steps_than_a_buffer_holds_reach_the_journals_in_order():
    slab = SimpleNamespace(actions=[np.zeros(2, np.int64)], checksums=np.zeros((2, 2), np.uint32))
    ops = np.zeros(2, np.uint8)
    journals = [StepList(), StepList()]
    steps = StepBuffer(slab, ops, journals, size=64)
    count = 2 * 64 + 10
    for number in range(count):
        slab.actions[0][:] = number, -number
        ops[0] = RESET * (number % 3 == 0)
        steps.record([0, 1], is_all=True)
    steps.record([1], is_all=False)
    first, second = steps.flush()
    assert np.frombuffer(first.actions, np.int64).tolist() == list(range(count))
    assert np.frombuffer(second.actions, np.int64).tolist() == [*range(0, -count, -1), 1 - count]
    assert list(first.resets) == [number % 3 == 0 for number in range(count)]
