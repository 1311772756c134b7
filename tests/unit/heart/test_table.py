"""The table of requests, without actors."""

from __future__ import annotations

import re

import numpy as np
import pytest
from fakes import PlainMemory

from envactors.actor.change import ChangeLock
from envactors.actor.future import ReadyOutcome
from envactors.mailbox.info_codec import FAILED as FAILED_INFO
from envactors.mailbox.info_codec import OVERFLOW
from envactors.mailbox.pickling import loads
from envactors.mailbox.slab import BUFFER, NO_AUTORESET, PAYLOAD, PLAIN_REWARD, RESET, SEED, STREAMED, Layout
from envactors.mailbox.specs import ArraySpec
from envactors.options import Deadlines
from envactors.vector import table as table_module
from envactors.vector.episodes import NEEDS_RESET, RETIRING, SEEDED, Episodes
from envactors.vector.journals import Journals
from envactors.vector.options import VectorSettings
from envactors.vector.requests import EnvRequest, ResetAnswer
from envactors.vector.rows import Rows
from envactors.vector.selection import Selection
from envactors.vector.table import DONE, FAILED, IDLE, POSTED, QUEUED, EnvTable

COUNT = 3
ALL = Selection(list(range(COUNT)), slice(None), is_all=True)
LARGE_SEED = 1 << 70


def some(*ids):
    return Selection(list(ids), np.array(ids, np.int64))


@pytest.fixture(params=["next_step"])
def table(request):
    observation = ArraySpec((2,), np.dtype(np.float64))
    action = ArraySpec((), np.dtype(np.int64))
    slab, infos = PlainMemory().create(Layout(observation, action, PLAIN_REWARD, COUNT))
    episodes = Episodes(COUNT, VectorSettings(autoreset=request.param))
    rows = Rows(slab, infos)
    table = EnvTable(ChangeLock(), rows, episodes, Journals(rows, [range(COUNT)], VectorSettings()), Deadlines())
    for index in range(COUNT):
        episodes.record(index, ends=False, is_reset=True)
    yield table
    table.waiters.close()


def complete(table, *ids):
    for index in ids:
        table.slab.written_ids[index] = table.rows.posted_ids[index]


def test_plain_requests_of_all_envs(table):
    assert table.are_on_fast_path(ALL)
    assert table.write_requests(ALL, 5, False) == {}
    assert table.are_all(POSTED)
    assert table.rows.posted_ids.tolist() == table.slab.posted_ids.tolist() == [5] * COUNT
    assert list(table.rows.ops) == [BUFFER] * COUNT
    assert all(map(table.is_pending, ALL.ids))


def test_requests_of_some_envs(table):
    table.write_requests(some(2, 0), 5, True)
    assert list(table.status) == [POSTED, IDLE, POSTED]
    assert [op & STREAMED for op in table.rows.ops] == [STREAMED, 0, STREAMED]
    assert table.rows.any_streams()
    assert table.slab.posted_ids.tolist() == [5, 0, 5]


def test_the_buffers_alternate_with_complete_results(table):
    table.last_rows.ops[1] = BUFFER
    table.write_requests(ALL, 5, False)
    assert [op & BUFFER for op in table.rows.ops] == [1, 0, 1]


def test_each_transition_changes_the_version(table):
    seen = [table.version]
    for transition in (
        lambda: table.mark_queued([0]),
        lambda: table.write_requests(some(0), 5, True),
        lambda: table.record_outcome(0, None),
        lambda: table.set_idle([0]),
    ):
        transition()
        seen.append(table.version)
    assert seen == sorted(set(seen))


def test_a_row_is_complete_once_its_call_id_is_written(table):
    table.write_requests(ALL, 5, False)
    complete(table, 1)
    assert [table.rows.is_complete(index) for index in ALL.ids] == [False, True, False]
    assert [table.has_outcome(index) for index in ALL.ids] == [False, True, False]
    assert list(table.status) == [POSTED] * COUNT, "that alone changes no status"


def test_a_row_that_is_overdue_is_never_complete(table):
    table.write_requests(ALL, 5, False)
    complete(table, 1)
    table.rows.overdue.add(1)
    assert not table.rows.is_complete(1)
    assert table.is_pending(1)


@pytest.mark.parametrize("encoding", [OVERFLOW, FAILED_INFO])
def test_a_row_with_an_overflow_is_complete_once_that_has_come(table, encoding):
    table.write_requests(ALL, 5, False)
    complete(table, 1)
    table.rows.infos.encodings[1] = encoding
    assert not table.rows.is_complete(1)
    table.rows.overflow[1] = memoryview(b"content")
    assert table.rows.is_complete(1)
    assert table.has_failed(1) == (encoding == FAILED_INFO)


@pytest.mark.parametrize("encoding", [OVERFLOW, OVERFLOW + 1, 255])
def test_a_row_that_env_code_overwrites_while_it_is_delivered_has_no_content(table, encoding):
    complete(table, 0)
    table.rows.infos.encodings[0] = encoding
    assert table.rows.content(0) is None


def test_the_next_post_forgets_the_overflow(table):
    table.write_requests(ALL, 5, False)
    table.rows.overflow[1] = memoryview(b"content")
    table.write_requests(some(1), 6, False)
    assert table.rows.overflow == {}


def test_outcomes_set_the_status_and_the_time(table):
    table.write_requests(some(0, 1), 5, True)
    table.write_requests(some(2), 6, False)
    table.slab.when[:] = 1.5
    table.record_outcome(0, None)
    table.record_outcome(1, ReadyOutcome("value"))
    table.record_outcome(2, ReadyOutcome(None, ValueError()))
    assert list(table.status) == [DONE, DONE, FAILED]
    assert (table.slab.when == 1.5).tolist() == [True, True, False]
    assert sorted(table.outcomes) == [1, 2]
    assert [table.has_failed(index) for index in ALL.ids] == [False, False, True]


def test_delivery_forgets_requests_and_outcomes(table):
    table.requests[1] = EnvRequest("step")
    table.write_requests(ALL, 5, False)
    table.record_outcome(1, ReadyOutcome("value"))
    table.set_idle(ALL.ids, is_all=True)
    assert table.are_all(IDLE)
    assert (table.requests, table.outcomes) == ({}, {})


@pytest.mark.parametrize("envs", [ALL, some(1)], ids=["all", "one"])
def test_no_env_without_its_request_looks_like_a_finished_bare_step(table, envs):
    seen = []

    class Requests(dict):
        def pop(self, index, default=None):
            request = super().pop(index, default)
            seen.append(table.has_outcome(index))  # as a thread without the lock sees it
            return request

    table.requests = Requests({index: EnvRequest("step") for index in envs.ids})
    table.write_requests(envs, 5, False)
    complete(table, *envs.ids)
    table.set_idle(envs.ids, is_all=envs.is_all)
    assert seen == [False] * len(envs.ids)


def test_queued_envs_are_pending(table):
    table.mark_queued([1])
    assert table.status[1] == QUEUED
    assert table.is_pending(1)


def test_a_request_that_waits_for_its_first_post_has_no_operation_of_an_earlier_one(table):
    table.requests[1] = EnvRequest("reset")
    table.write_requests(some(1), 5, False)
    table.set_idle([1])
    table.mark_queued([1], is_new=True)
    assert not table.posted_request(1).is_reset
    assert (table.activity(1).method, table.activity(1).call_id) == ("step", 0)


def test_only_a_result_becomes_the_last_one(table):
    for request, call_id in ((EnvRequest("reset"), 5), (EnvRequest("step"), 6)):
        table.requests[1] = request
        table.write_requests(some(1), call_id, False)
        table.record_outcome(1, ReadyOutcome(None, ValueError()))
        table.set_idle([1])
        assert (table.last_rows.are_first(1), table.last_rows.buffers(1)) == (False, 0)
    table.requests[1] = EnvRequest("reset")
    table.write_requests(some(1), 7, False)
    complete(table, 1)
    table.record_outcome(1, None)
    assert not table.last_rows.are_first(1)
    table.set_idle([1])
    assert (table.last_rows.are_first(1), table.last_rows.buffers(1)) == (True, BUFFER)


@pytest.mark.parametrize("table", ["same_step"], indirect=True)
def test_an_episode_that_ends_leaves_the_first_observation_of_the_next_one(table):
    table.write_requests(ALL, 5, False)
    complete(table, *ALL.ids)
    table.slab.truncated[1, 2] = True
    table.deliver_rows(ALL, table.slab.terminated[1], table.slab.truncated[1], have_contents=False)
    assert table.last_rows.are_first(ALL.array_index).tolist() == [False, False, True]


# The encoding of requests --------------------------------------------------------------------------------


def post_one(table, request=None, index=1):
    if request is not None:
        table.requests[index] = request
    payloads = table.write_requests(some(index), 5, False)
    return int(table.rows.ops[index]), payloads.get(index)


def test_a_request_that_streams_wants_the_time_of_its_result(table):
    table.write_requests(some(1), 5, True)
    assert table.rows.ops[1] == BUFFER | STREAMED


def test_a_reset_without_a_seed(table):
    assert post_one(table, EnvRequest("reset")) == (BUFFER | RESET, None)
    assert table.posted_request(1).seed is None


def test_a_reset_with_a_seed(table):
    assert post_one(table, EnvRequest("reset", seed=9)) == (BUFFER | RESET | SEED, None)
    assert table.slab.seeds[1] == 9
    assert table.posted_request(1).seed == 9


def test_a_reset_with_a_large_seed_travels_as_a_payload(table):
    op, payload = post_one(table, EnvRequest("reset", seed=LARGE_SEED))
    assert op == BUFFER | RESET | PAYLOAD
    assert loads(payload) == (LARGE_SEED, None)
    assert table.posted_request(1).seed == LARGE_SEED


def test_options_of_a_reset_travel_as_a_payload(table):
    op, payload = post_one(table, EnvRequest("reset", seed=9, payload=b"pickled"))
    assert op == BUFFER | RESET | SEED | PAYLOAD
    assert loads(payload)[0] is None
    assert loads(payload)[1].content == b"pickled"


def test_an_action_that_does_not_fit_travels_as_a_payload(table):
    assert post_one(table, EnvRequest("step", payload=b"action")) == (BUFFER | PAYLOAD, b"action")


def test_a_step_after_the_end_of_an_episode_resets_and_ignores_the_action(table):
    table.episodes.awaits_autoreset[1] = True
    assert post_one(table, EnvRequest("step", payload=b"action")) == (BUFFER | RESET, None)


def test_seeded_episodes_post_the_next_seed_with_each_step(table):
    table.episodes.flags[1] |= SEEDED
    table.episodes.next_seeds[1] = 77
    assert post_one(table) == (BUFFER | SEED, None)
    assert table.posted_request(1).seed == 77


@pytest.mark.parametrize("table", ["same_step"], indirect=True)
def test_a_retiring_process_does_no_reset_within_the_step(table):
    table.episodes.flags[1] |= RETIRING
    assert post_one(table) == (BUFFER | NO_AUTORESET, None)


# Facts ---------------------------------------------------------------------------------------------------


def test_plain_envs(table):
    table.episodes.flags[1] |= NEEDS_RESET
    assert not table.are_on_fast_path(ALL)
    assert table.are_on_fast_path(some(0, 2))
    assert not table.are_on_fast_path(some(0, 1))
    table.requests[0] = EnvRequest("step")
    assert not table.are_on_fast_path(some(0, 2))


@pytest.mark.parametrize(
    ("request_", "awaits_autoreset", "expected"),
    [
        (None, False, True),
        (None, True, False),
        (EnvRequest("step"), False, True),
        (EnvRequest("reset"), False, False),
        (EnvRequest("step", partial_answer=ResetAnswer(truncates=True)), False, False),
    ],
)
def test_which_requests_need_the_episode(table, request_, awaits_autoreset, expected):
    if request_ is not None:
        table.requests[1] = request_
    table.episodes.awaits_autoreset[1] = awaits_autoreset
    assert table.reports_lost_episode(1) is expected


# The documentation ---------------------------------------------------------------------------------------


def test_the_table_of_changes_has_each_method_that_changes_something():
    listed = re.findall(r"^    ([a-z]+_[a-z_]+|withdraw|restore|clear)\b", table_module.__doc__, re.MULTILINE)
    methods = {name: getattr(EnvTable, name) for name in vars(EnvTable) if not name.startswith("_")}
    changing = [name for name, method in methods.items() if method.__annotations__["return"] == "None"]
    assert sorted(listed) == sorted([*changing, "write_requests"])
