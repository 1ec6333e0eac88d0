"""Rounds between threads: what is matched, refused, given up, and what is left afterwards.

Each rank is a thread with a negotiator of its own; they meet in memory. Operations record what they
were given and in which order, so that "the same on all ranks" can be asked of the records.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from unidist import negotiation
from unidist.backends.base import Completed, Group, Patience, Work
from unidist.backends.errors import HorovodInternalError, StallError
from unidist.backends.serial import SerialBackend
from unidist.handles import Peers, Proposal, Task
from unidist.negotiation import JOIN, Negotiator

PATIENCE = 30.0

#: no warnings, and errors only where something hangs
LONG = Patience(0, PATIENCE)
#: warnings and errors in a time that a test can wait for
SHORT = Patience(0.1, 0.4)


class Meeting:
    """Where the ranks' n-th exchanges meet."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._told: dict[int, dict[int, bytes]] = {}
        self._left: set[int] = set()

    def leave(self, rank: int) -> None:
        """It has stopped: whoever waits for it is told, as by a broken connection."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def exchange(self, number: int, rank: int, data: bytes, limit: float) -> list[bytes]:
        with self._changed:
            told = self._told.setdefault(number, {})
            assert rank not in told, "two threads of a rank are in one round"
            told[rank] = data
            self._changed.notify_all()
            everyone = set(range(self._size))
            self._changed.wait_for(
                lambda: told.keys() == everyone or self._left - told.keys(), limit
            )
            if told.keys() != everyone:
                missing = sorted(everyone - told.keys())
                if self._left - told.keys():
                    raise HorovodInternalError(f"{missing} have left")
                raise StallError(f"a round has waited for {missing}")
            return [told[other] for other in range(self._size)]


class MemoryBackend(SerialBackend):
    """One rank's end of a meeting."""

    def __init__(self, meeting: Meeting, patience: Patience) -> None:
        self.patience = patience
        self.rounds = 0
        self.driving = 0
        #: raised instead of the round of this number
        self.failures: dict[int, Exception] = {}
        self._meeting = meeting

    def exchange(self, payload: bytes, group: Group, name: str = "control") -> list[bytes]:
        self.rounds += 1
        self.driving += 1
        assert self.driving == 1, "two threads of a rank hold a round"
        try:
            if self.rounds in self.failures:
                raise self.failures[self.rounds]
            return self._meeting.exchange(self.rounds, group.me, payload, self.patience.limit)
        finally:
            self.driving -= 1


class Rank:
    """A rank's negotiator, and records of what it ran."""

    def __init__(self, meeting: Meeting, group: Group, patience: Patience) -> None:
        self.me = group.me
        self.backend = MemoryBackend(meeting, patience)
        self.negotiator = Negotiator(
            self.backend, group, self._stand_in, self._refusal, self._pass_by
        )
        #: names in the order in which they were started, those of stand-ins too
        self.ran: list[str] = []
        self.stood_in: list[str] = []
        self.passed_by: list[str] = []

    def task(
        self,
        name: str,
        kind: str = "allreduce",
        payload: bytes | None = None,
        own: Any = None,
        **terms: Any,
    ) -> Task:
        """An operation whose value is what the peers proposed: (own, payload), None if joined."""
        answers: list[Any] = []

        def start(peers: Peers | None) -> Work:
            assert peers is not None
            self.ran.append(f"{kind}.{name}")
            answers.extend(peer and (peer.own, peer.payload) for peer in peers)
            return Completed()

        return Task(start, lambda: answers, Proposal(kind, f"{kind}.{name}", terms, own, payload))

    def run(self, name: str, **options: Any) -> Any:
        return self.negotiator.run(self.task(name, **options)).result()

    def submit(self, name: str, **options: Any) -> Task:
        return self.negotiator.submit(self.task(name, **options))

    def wait(self, task: Task) -> Any:
        return self.negotiator.wait(task).result()

    def error(self, name: str, **options: Any) -> str:
        with pytest.raises(HorovodInternalError) as caught:
            self.run(name, **options)
        return str(caught.value)

    def join(self) -> int:
        return int(
            self.negotiator.run(
                Task(lambda peers: Completed(), lambda: None, Proposal(JOIN, JOIN))
            ).result()
        )

    def _stand_in(self, proposal: Proposal, group: Group) -> Task:
        self.stood_in.append(proposal.name)
        if proposal.terms.get("stand_in") == "fails":
            raise ValueError("no stand-in today")
        return self.task(proposal.name.partition(".")[2], proposal.kind)

    def _refusal(self, proposal: Proposal, joined: Sequence[int]) -> str:
        return f"it needs {list(joined)}" if proposal.kind == "alltoall" else ""

    def _pass_by(self, proposal: Proposal, group: Group) -> None:
        self.passed_by.append(proposal.name)


def world(
    size: int,
    function: Callable[[Rank], Any],
    patience: Patience = LONG,
    ranks: Sequence[int] | None = None,
    stop: bool = True,
) -> tuple[list[Any], list[Rank]]:
    """Run ``function`` on each rank; the values and the ranks, or what one of them raised."""
    meeting = Meeting(size)
    members = tuple(ranks or range(size))
    made = [Rank(meeting, Group(members, rank), patience) for rank in range(size)]
    values: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            values[rank] = function(made[rank])
            if stop:
                made[rank].negotiator.stop()
                meeting.leave(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for rank in made:
        assert not rank.negotiator._tasks, "a task is left"
    tables = [sorted(rank.negotiator._table) for rank in made]
    assert all(table == tables[0] for table in tables), f"the ranks' tables differ: {tables}"
    return values, made


@pytest.fixture
def ranks_are_main_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take each rank's thread for the main one of its process."""
    monkeypatch.setattr(negotiation, "_in_main_thread", lambda: True)


# -- matching by name -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_order_of_submission_and_of_waiting(size: int) -> None:
    names = [f"op{i}" for i in range(40)]

    def function(rank: Rank) -> None:
        shuffled = random.Random(rank.me)
        tasks = {}
        for name in shuffled.sample(names, len(names)):
            tasks[name] = rank.submit(name, own=[rank.me, name])
        for name in shuffled.sample(names, len(names)):
            assert rank.wait(tasks[name]) == [([r, name], None) for r in range(size)]

    _, made = world(size, function)
    assert sorted(made[0].ran) == sorted(f"allreduce.{name}" for name in names)
    assert all(rank.ran == made[0].ran for rank in made), "the order differs between ranks"


def test_blocking_operations_beside_asynchronous_ones() -> None:
    """Rank 0 blocks in what the others have submitted and not waited for, and the other way."""

    def function(rank: Rank) -> None:
        if rank.me == 0:
            late = rank.submit("late")
            rank.run("early")
        else:
            early = rank.submit("early")
            late = rank.submit("late")
            rank.wait(early)
        rank.run("last")
        rank.wait(late)

    _, made = world(3, function)
    assert all(rank.ran == made[0].ran for rank in made)


def test_submissions_from_several_threads() -> None:
    def function(rank: Rank) -> None:
        failures: list[BaseException] = []

        def work(thread: int) -> None:
            try:
                shuffled = random.Random(10 * rank.me + thread)
                for batch in range(12):
                    names = [f"{thread}.{batch}.{i}" for i in range(8)]
                    tasks = {
                        name: rank.submit(name, own=rank.me) for name in shuffled.sample(names, 8)
                    }
                    assert rank.run(f"{thread}.{batch}", own=rank.me) == [(0, None), (1, None)]
                    for name in shuffled.sample(names, 8):
                        assert rank.wait(tasks[name]) == [(0, None), (1, None)]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"
        if failures:
            raise failures[0]

    _, made = world(2, function)
    assert len(made[0].ran) == 3 * 12 * 9
    assert made[0].ran == made[1].ran


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1 << 20])
def test_payloads_travel_with_the_proposal(length: int) -> None:
    def function(rank: Rank) -> Any:
        # On rank 1 the data is not short, and not in the message.
        payload = None if rank.me == 1 else bytes([rank.me + 65]) * length
        return rank.run("x", payload=payload, own={"rows": rank.me})

    values, _ = world(3, function)
    want = [
        ({"rows": 0}, b"A" * length),
        ({"rows": 1}, None),
        ({"rows": 2}, b"C" * length),
    ]
    assert values == [want] * 3


def test_several_payloads_in_one_round_are_not_mixed_up() -> None:
    def function(rank: Rank) -> None:
        tasks = [
            rank.submit(f"{i}", payload=None if i % 3 == 0 else bytes([i]) * i) for i in range(30)
        ]
        for i, task in enumerate(tasks):
            assert rank.wait(task) == [(None, None if i % 3 == 0 else bytes([i]) * i)] * 2

    world(2, function)


def test_a_blocking_operation_costs_one_round() -> None:
    def function(rank: Rank) -> None:
        for i in range(10):
            rank.run(f"{i}", payload=b"x")

    _, made = world(2, function)
    assert made[0].backend.rounds == 10


def test_calls_and_exchanges_are_in_order_with_operations() -> None:
    def function(rank: Rank) -> None:
        rank.submit("before")
        assert rank.negotiator.call(lambda: rank.ran.append("call") or 7, "set.1") == 7
        told = rank.negotiator.exchange(bytes([rank.me]) * 2000, "object.1")
        assert told == [bytes([r]) * 2000 for r in range(3)]

    _, made = world(3, function)
    assert all(rank.ran == made[0].ran for rank in made)
    assert sorted(made[0].ran) == ["allreduce.before", "call"]


# -- disagreement ---------------------------------------------------------------------------------

TERMS: dict[str, Any] = {
    "dtype": "float32",
    "shape": [2, 3],
    "device": "cpu",
    "op": "Sum",
    "root_rank": 0,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "number of tensors": 3,
}

OTHERS: dict[str, Any] = {
    "dtype": "int64",
    "shape": [3, 2],
    "device": "cuda",
    "op": "Average",
    "root_rank": 2,
    "prescale_factor": 0.5,
    "postscale_factor": 2.0,
    "number of tensors": 4,
}


@pytest.mark.parametrize("term", TERMS)
def test_a_differing_term_is_named_with_values_and_ranks(term: str) -> None:
    def function(rank: Rank) -> str:
        terms = TERMS | ({term: OTHERS[term]} if rank.me == 1 else {})
        text = rank.error("x", **terms)
        # The same name again, and another one.
        assert rank.run("x", own=rank.me, **TERMS) == [(0, None), (1, None), (2, None)]
        rank.run("y", **TERMS)
        return text

    values, made = world(3, function)
    want = (
        "allreduce 'allreduce.x' was called with different arguments: "
        f"{term} is {TERMS[term]} on ranks 0, 2, {OTHERS[term]} on rank 1. Nothing was sent."
    )
    assert values == [want] * 3
    assert made[0].ran == ["allreduce.x", "allreduce.y"], "the refused operation was started"


def test_all_differences_are_told_at_once_with_world_ranks() -> None:
    def function(rank: Rank) -> str:
        return rank.error("x", dtype=f"int{8 << rank.me}", shape=[rank.me // 2], op="Sum")

    values, _ = world(3, function, ranks=(1, 4, 6))
    want = (
        "allreduce 'allreduce.x' was called with different arguments: "
        "dtype is int8 on rank 1, int16 on rank 4, int32 on rank 6; "
        "shape is [0] on ranks 1, 4, [1] on rank 6. Nothing was sent."
    )
    assert values == [want] * 3


def test_a_disagreement_fails_one_operation_of_a_round() -> None:
    def function(rank: Rank) -> None:
        good = [rank.submit(f"good{i}", dtype="float32") for i in range(3)]
        bad = rank.submit("bad", dtype=f"float{32 << rank.me}")
        good += [rank.submit(f"good{i}", dtype="float32") for i in range(3, 6)]
        with pytest.raises(HorovodInternalError, match="dtype is float32 on rank 0, float64"):
            rank.wait(bad)
        for task in good:
            rank.wait(task)

    world(2, function)


@pytest.mark.usefixtures("ranks_are_main_threads")
def test_one_name_for_different_kinds_of_operation() -> None:
    def function(rank: Rank) -> str:
        kind = "broadcast" if rank.me == 1 else "allreduce"
        text = rank.error("noname.3", kind=kind)
        rank.run("next")
        return text

    values, made = world(3, function)
    want = (
        "'noname.3' is not the same operation everywhere: allreduce on ranks 0, 2, broadcast on "
        "rank 1. Nothing was sent."
    )
    assert values == [want] * 3
    for rank in made:  # all count on from there, so that the next ones have equal names
        assert sorted(rank.passed_by) == ["allreduce.noname.3", "broadcast.noname.3"]


@pytest.mark.usefixtures("ranks_are_main_threads")
def test_one_name_for_several_kinds_under_way_is_no_disagreement() -> None:
    """Nobody waits for the first of them, which the others submit in another order."""

    def function(rank: Rank) -> None:
        kinds = ["allreduce", "broadcast"] if rank.me else ["broadcast", "allreduce"]
        first = rank.submit("noname.1", kind=kinds[0])
        rank.run("noname.1", kind=kinds[1])
        rank.wait(first)

    world(2, function)


def test_two_threads_that_wait_for_one_name_are_no_disagreement() -> None:
    """Rank 0's trainer is first there, and rank 1's evaluator; the others follow."""

    def function(rank: Rank) -> None:
        kinds = ["allgather", "allreduce"] if rank.me else ["allreduce", "allgather"]
        failures: list[BaseException] = []

        def run(kind: str) -> None:
            try:
                rank.run("noname.1", kind=kind)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(kind,), daemon=True) for kind in kinds]
        for thread in threads:
            thread.start()
            thread.join(0.2)
        for thread in threads:
            thread.join(PATIENCE)
        if failures:
            raise failures[0]

    world(2, function)


@pytest.mark.usefixtures("ranks_are_main_threads")
def test_one_rank_that_waits_for_both_kinds_is_no_disagreement() -> None:
    def function(rank: Rank) -> None:
        kinds = ["allgather", "allreduce"]
        if rank.me == 1:
            rank.run("meanwhile")
            time.sleep(0.2)
        tasks = [rank.submit("x", kind=kind) for kind in kinds]
        if rank.me == 0:
            for task in tasks:
                rank.negotiator._await(task)
            rank.run("meanwhile")
        for task in tasks:
            rank.wait(task)

    world(2, function)


def test_a_name_that_is_under_way_is_refused_and_free_afterwards() -> None:
    def function(rank: Rank) -> None:
        first = rank.submit("x", own=1)
        if rank.me == 0:  # nobody else has submitted it, so it is under way
            with pytest.raises(HorovodInternalError, match=r"allreduce\.x was submitted while"):
                rank.submit("x", own=2)
            with pytest.raises(HorovodInternalError, match="same name is under way"):
                rank.run("x", own=2)
            rank.run("go")
        assert rank.wait(first) == [(1, None)] * 2
        for turn in range(20):
            assert rank.run("x", own=turn) == [(turn, None)] * 2

    def start(rank: Rank) -> None:
        if rank.me == 1:
            rank.run("go")
        function(rank)

    world(2, start)


# -- errors in an operation -----------------------------------------------------------------------


def test_an_exception_on_one_rank_is_that_ranks_and_the_next_operation_works() -> None:
    def function(rank: Rank) -> None:
        def start(peers: Peers | None) -> Work:
            if rank.me == 1:
                raise MemoryError("no room")
            return Completed()

        task = Task(start, lambda: "fine", Proposal("allreduce", "allreduce.x"))
        if rank.me == 1:
            with pytest.raises(MemoryError, match="no room"):
                rank.negotiator.run(task).result()
        else:
            assert rank.negotiator.run(task).result() == "fine"
        rank.run("next")

    world(2, function)


def test_nothing_of_a_finished_operation_is_kept() -> None:
    def make(name: str, **terms: Any) -> tuple[Task, weakref.ref[torch.Tensor]]:
        tensor = torch.zeros(10)

        def start(peers: Peers | None) -> Work:
            tensor.add_(1)
            return Completed()

        task = Task(start, lambda: None, Proposal("allreduce", name, terms))
        return task, weakref.ref(tensor)

    def function(rank: Rank) -> None:
        for name, terms in (("fine", {}), ("refused", {"op": rank.me})):
            task, buffer = make(name, **terms)
            rank.negotiator.run(task)
            assert buffer() is None, f"the {name} task keeps its buffers"
        assert not rank.negotiator._newly_awaited

    world(2, function)


# -- ranks that have joined -----------------------------------------------------------------------


def test_joined_ranks_stand_in_and_the_last_one_is_told() -> None:
    def function(rank: Rank) -> Any:
        got = []
        for step in range(rank.me):
            got.append(rank.run(f"step{step}", own=rank.me))
        return rank.join(), got

    values, made = world(3, function)
    first = [None, (1, None), (2, None)]
    second = [None, None, (2, None)]
    assert values == [(2, []), (2, [first]), (2, [first, second])]
    assert [rank.stood_in for rank in made] == [
        ["allreduce.step0", "allreduce.step1"],
        ["allreduce.step1"],
        [],
    ]
    assert [rank.passed_by for rank in made] == [rank.stood_in for rank in made]
    assert all(rank.ran == made[0].ran for rank in made)


def test_last_to_join_is_the_last_in_time_and_it_starts_anew() -> None:
    order = [1, 2, 0]

    def function(rank: Rank) -> None:
        for epoch in range(3):
            last = order[(epoch + 2) % 3]
            for turn in range(3):
                if order[(epoch + turn) % 3] == rank.me:
                    assert rank.join() == last
                    break
                rank.run(f"epoch {epoch}, turn {turn}")
            # Nobody has joined any more.
            assert rank.run(f"after {epoch}", own=rank.me) == [(r, None) for r in range(3)]

    world(3, function)


def test_an_operation_that_needs_the_joined_rank_is_refused() -> None:
    def function(rank: Rank) -> Any:
        texts = []
        if rank.me:
            rank.run("before")
            texts.append(rank.error("x", kind="alltoall"))
            rank.run("between")
            texts.append(rank.error("y", dtype=str(rank.me)))
            rank.run("after")
        assert rank.join() == 2
        rank.run("next")
        return texts

    values, made = world(3, function, ranks=(4, 5, 6))
    assert values[0] == []
    assert values[1] == values[2]
    refused, different = values[1]
    assert refused == ("alltoall 'alltoall.x' cannot run after rank 4 called join(): it needs [4].")
    assert "dtype is 1 on rank 5, 2 on rank 6" in different
    assert "allreduce.x" not in made[0].ran
    assert made[0].passed_by == [
        "allreduce.before",
        "alltoall.x",
        "allreduce.between",
        "allreduce.y",
        "allreduce.after",
    ]


def test_what_a_rank_submitted_before_it_joined_runs_with_its_own_data() -> None:
    def function(rank: Rank) -> None:
        if rank.me == 0:
            early = rank.submit("x", own="mine")
            assert rank.join() == 1
            assert rank.wait(early) == [("mine", None), (1, None)]
        else:
            rank.run("y")
            assert rank.run("x", own=1) == [("mine", None), (1, None)]
            rank.join()

    world(2, function)


def test_a_stand_in_that_fails_is_an_error_of_join() -> None:
    def function(rank: Rank) -> str:
        if rank.me:
            rank.run("x", stand_in="fails")
            return ""
        with pytest.raises(HorovodInternalError) as caught:
            rank.join()
        return str(caught.value)

    values, _ = world(2, function)
    assert "'allreduce.x' failed after join(): no stand-in today" in values[0]


# -- waits that are too long ----------------------------------------------------------------------


def test_ranks_that_wait_for_each_other_get_warnings_then_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def function(rank: Rank) -> Any:
        name = "second" if rank.me == 1 else "first"
        begin = time.monotonic()
        text = rank.error(name)
        waited = time.monotonic() - begin
        rank.run("next")
        return text, waited

    values, _ = world(3, function, SHORT)
    for rank, (text, waited) in enumerate(values):
        if rank == 1:
            assert "allreduce 'allreduce.second' has waited 0 s for ranks 0, 2, where" in text
            assert "it was on rank 1." in text
        else:
            assert "allreduce 'allreduce.first' has waited 0 s for rank 1, where" in text
            assert "it was not called; it was on ranks 0, 2." in text
        assert SHORT.limit <= waited < SHORT.limit + 2
    warned = capsys.readouterr().err.splitlines()
    assert len(warned) == 2, warned  # one for each operation, not for each rank
    assert all(line.startswith("unidist: warning: allreduce") for line in warned)
    for name, missing in (("first", "rank 1"), ("second", "ranks 0, 2")):
        (line,) = (
            line
            for line in warned
            if line.startswith(f"unidist: warning: allreduce 'allreduce.{name}'")
        )
        assert f"for {missing}, where" in line
        assert "Meanwhile" in line


@pytest.mark.usefixtures("ranks_are_main_threads")
def test_main_threads_that_wait_for_each_other_need_not_wait_for_the_limit() -> None:
    """None of them is merely late: the time of the warning is the limit."""

    def function(rank: Rank) -> float:
        begin = time.monotonic()
        kind = "broadcast" if rank.me == 1 else "allreduce"
        text = rank.error(f"noname.{rank.me + 1}", kind=kind)
        others = ", ".join(str(other) for other in range(3) if other != rank.me)
        assert f"has waited 0 s for ranks {others}, where it was not called" in text
        rank.run("next")
        return time.monotonic() - begin

    values, made = world(3, function, Patience(0.2, PATIENCE))
    assert all(0.2 <= waited < PATIENCE / 2 for waited in values)
    names = ["allreduce.noname.1", "allreduce.noname.3", "broadcast.noname.2"]
    for rank in made:
        assert sorted(rank.passed_by) == names


def test_no_warning_where_warnings_are_off(capsys: pytest.CaptureFixture[str]) -> None:
    world(2, lambda rank: rank.error(f"{rank.me}"), Patience(0, 0.3))
    assert capsys.readouterr().err == ""


def test_an_operation_in_time_saves_the_others_from_nothing() -> None:
    """A rank that is late for one operation may do others meanwhile; each has its own limit."""

    def function(rank: Rank) -> None:
        if rank.me == 0:
            waiting = rank.submit("late")
            for i in range(30):
                rank.run(f"{i}")
                time.sleep(0.02)
            with pytest.raises(HorovodInternalError, match=r"allreduce\.late.*for rank 1"):
                rank.wait(waiting)
        else:
            for i in range(30):
                rank.run(f"{i}")
        rank.run("next")

    world(2, function, SHORT)


def test_a_rank_that_never_comes_is_an_error_on_all_who_wait() -> None:
    over = threading.Event()

    def function(rank: Rank) -> None:
        if rank.me == 2:
            assert over.wait(PATIENCE)
            return
        pending = rank.submit("other")
        text = rank.error("first")
        assert "allreduce.other" in text
        assert "failed before it began: a round has waited for [2]" in text
        with pytest.raises(HorovodInternalError, match="failed before it began"):
            rank.wait(pending)
        # Messages of the failed round may be under way, so nothing is started any more.
        assert "Call shutdown() and init()" in rank.error("next")
        assert "earlier operation failed" in rank.error("next")
        if rank.me == 0:
            rank.negotiator.stop()
            over.set()

    world(3, function, SHORT, stop=False)


@pytest.mark.parametrize("error", [HorovodInternalError("the wire broke"), OSError("errno 5")])
def test_a_round_that_fails_breaks_all_that_is_pending(error: Exception) -> None:
    def function(rank: Rank) -> None:
        rank.run("fine")
        rank.backend.failures[rank.backend.rounds + 1] = error
        failures = []

        def blocked() -> None:
            try:
                rank.run("other thread")
            except HorovodInternalError as caught:
                failures.append(str(caught))

        thread = threading.Thread(target=blocked, daemon=True)
        thread.start()
        text = rank.error("mine")
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert str(error) in text
        assert len(failures) == 1
        assert str(error) in failures[0]
        assert str(error) in rank.error("next")
        begin = time.monotonic()
        rank.negotiator.stop()
        assert time.monotonic() - begin < 1

    world(2, function)


def test_what_json_cannot_tell_breaks_and_does_not_hang() -> None:
    def function(rank: Rank) -> None:
        assert "not JSON serializable" in rank.error("x", factor=object())
        assert "earlier operation failed" in rank.error("next")

    world(1, function)
    world(2, function)


# -- the pause between rounds ---------------------------------------------------------------------


def test_rounds_that_bring_nothing_become_rare() -> None:
    def function(rank: Rank) -> int:
        waiting = rank.submit(f"{rank.me}")
        rank.run("meet")
        before = rank.backend.rounds
        time.sleep(0.5)
        held = rank.backend.rounds - before
        other = rank.submit(f"{1 - rank.me}")
        rank.wait(waiting)
        rank.wait(other)
        return held

    values, _ = world(2, function)
    for held in values:
        # 0.5, 1, 2, 4, 8, then 10 ms each
        assert 10 < held < 80, f"{held} rounds in half a second"


def test_a_submission_ends_the_pause() -> None:
    """Fifty operations one after the other, beside one that nobody matches yet."""

    def function(rank: Rank) -> float:
        waiting = rank.submit(f"{rank.me}")
        rank.run("meet")
        time.sleep(0.2)  # until the pauses are long
        begin = time.monotonic()
        for i in range(50):
            rank.run(f"step{i}")
            time.sleep(0)
        seconds = time.monotonic() - begin
        other = rank.submit(f"{1 - rank.me}")
        rank.wait(waiting)
        rank.wait(other)
        return seconds

    values, _ = world(2, function)
    assert max(values) < 0.4, f"{max(values):.2f} s for 50 operations"


@pytest.mark.parametrize("seed", range(5))
def test_pauses_and_several_threads(seed: int) -> None:
    """Waiters that take turns in driving, with pauses in between: never two at a time."""

    def function(rank: Rank) -> None:
        never = rank.submit(f"alone on {rank.me}")
        failures: list[BaseException] = []

        def work(thread: int) -> None:
            shuffled = random.Random(100 * seed + 10 * rank.me + thread)
            try:
                for i in range(25):
                    time.sleep(shuffled.choice([0, 0, 0.001, 0.004]))
                    if shuffled.random() < 0.5:
                        rank.run(f"{thread}.{i}")
                    else:
                        rank.wait(rank.submit(f"{thread}.{i}"))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"
        if failures:
            raise failures[0]
        other = rank.submit(f"alone on {1 - rank.me}")
        rank.wait(other)
        rank.wait(never)

    _, made = world(2, function)
    assert made[0].ran == made[1].ran


# -- the end --------------------------------------------------------------------------------------


def test_stop_finishes_what_all_have_submitted() -> None:
    def function(rank: Rank) -> list[Task]:
        shuffled = random.Random(rank.me)
        return [rank.submit(name) for name in shuffled.sample([f"{i}" for i in range(20)], 20)]

    values, made = world(3, function)
    assert all(task.finished for tasks in values for task in tasks)
    assert all(len(rank.ran) == 20 for rank in made)


def test_operations_that_nobody_matches_do_not_hold_up_the_end() -> None:
    """Each rank has forgotten another operation, and all shut down."""

    def function(rank: Rank) -> tuple[Task, Task]:
        both = rank.submit("both")
        return both, rank.submit(f"only {rank.me}")

    begin = time.monotonic()
    values, _ = world(2, function)
    assert time.monotonic() - begin < 5
    for rank, (both, only) in enumerate(values):
        both.result()
        with pytest.raises(HorovodInternalError) as caught:
            only.result()
        text = str(caught.value)
        # The later one of two may find the other gone already.
        assert f"allreduce.only {rank}" in text
        assert f"rank {1 - rank} called shutdown()" in text or f"[{1 - rank}] have left" in text


def test_a_waiter_learns_that_the_other_rank_shuts_down() -> None:
    def function(rank: Rank) -> None:
        if rank.me == 0:
            rank.submit("forgotten")
            return
        assert "rank 0 called shutdown()" in rank.error("never")

    world(2, function)
