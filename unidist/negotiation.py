"""Operations matched by name: the ranks of a group tell what they are about to do, then do it.

torch.distributed and MPI match operations by the order in which each rank starts them, and hang or
mix data when ranks differ. So before data moves the ranks of a group hold a *round*: each tells the
operations it has been given since the last one, and all hear all. Every rank then has the same
table, and starts the operations that all have submitted, in the table's order ::

    rank 0   submits B, A ─┐             ┌─ table: B {0,1}, A {0,1} ─ run B ─ run A
                           ├─ one round ─┤
    rank 1   submits A, B ─┘             └─ table: B {0,1}, A {0,1} ─ run B ─ run A

- What ranks disagree about (dtype, shape, reduction, root, …) is an error on all of them, with the
  values; nothing has been sent, and the next operation works.
- A small payload travels in the round itself: one message in all.
- A rank takes part in rounds as long as something of its own is unfinished. A round ends when all
  ranks are in it, so a rank that has nothing to do costs the others nothing but their wait for it.
- A rank that has joined (``join``) is in every round, and stands in for itself with zeros.
- A wait for ranks that do not come has a limit, and its error names them (``Patience``).

The idea is Horovod's (Sergeev & Del Balso, arXiv 1802.05799, section 4). Its coordinator polls all
ranks in a cycle of its own; here rounds are held by those who wait, and cost nothing when nobody
does.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unidist.backends.base import Backend, Completed, Group, Work
from unidist.backends.errors import ArgumentError, HorovodInternalError
from unidist.engine import Engine, Value
from unidist.handles import Peers, Proposal, Task

#: name of what a rank submits when it joins
JOIN = "join"

#: seconds between rounds that bring nothing new: the first pause, and the longest
_FIRST_PAUSE, _LONGEST_PAUSE = 5e-4, 1e-2

_HEADER = struct.Struct("<I")


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@dataclass
class _Message:
    """What one rank tells in one round."""

    proposals: list[Proposal] = field(default_factory=list)
    #: names whose time limit has passed on this rank
    expired: list[str] = field(default_factory=list)
    #: names that the main thread of this rank has begun to wait for
    awaited: list[str] = field(default_factory=list)
    #: it shuts down, and will propose nothing more
    leaving: bool = False

    def pack(self) -> bytes:
        payloads = [p.payload for p in self.proposals]
        header = json.dumps(
            [
                [
                    [p.kind, p.name, p.terms, p.own, -1 if data is None else len(data)]
                    for p, data in zip(self.proposals, payloads, strict=True)
                ],
                self.expired,
                self.awaited,
                self.leaving,
            ],
            separators=(",", ":"),
        ).encode()
        return b"".join([_HEADER.pack(len(header)), header, *(p for p in payloads if p)])

    @classmethod
    def unpack(cls, data: bytes) -> _Message:
        (length,) = _HEADER.unpack_from(data)
        at = _HEADER.size + length
        records, expired, awaited, leaving = json.loads(data[_HEADER.size : at])
        message = cls([], expired, awaited, leaving)
        for kind, name, terms, own, size in records:
            payload = None
            if size >= 0:
                payload = data[at : at + size]
                at += size
            message.proposals.append(Proposal(kind, name, terms, own, payload))
        return message


@dataclass
class _Entry:
    """An operation that some ranks have submitted, and others have not yet."""

    kind: str
    name: str
    since: float
    proposals: dict[int, Proposal] = field(default_factory=dict)  # by rank in the group
    awaited: set[int] = field(default_factory=set)
    warned: bool = False
    expired: bool = False


class Negotiator(Engine):
    """Runs the operations of one group, each once all its ranks have submitted it.

    Args:
        stand_in: makes the task with which a rank that has joined takes part in an operation of
            the others.
        refusal: why an operation cannot run without the (world) ranks that have joined, or "".
        pass_by: takes note of an operation that this rank has not submitted and never will, so
            that operations without a name go on having equal ones.
        cycle: called as a round begins, for the timeline.
    """

    def __init__(
        self,
        backend: Backend,
        group: Group,
        stand_in: Callable[[Proposal, Group], Task],
        refusal: Callable[[Proposal, Sequence[int]], str],
        pass_by: Callable[[Proposal, Group], None],
        trace: Callable[[Task], None] | None = None,
        cycle: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(backend, group, trace)
        self._cycle = cycle
        self._stand_in = stand_in
        self._refusal = refusal
        self._pass_by = pass_by
        self._unannounced: list[Task] = []
        self._newly_awaited: list[str] = []
        self._tasks: dict[str, Task] = {}  # unfinished ones, by name
        # What follows is touched by the one thread that drives, and but for times equal on all
        # ranks: it follows from the rounds alone.
        self._table: dict[str, _Entry] = {}
        self._joined: list[int] = []  # in the order in which they told
        self._progress: dict[int, int] = {}  # of a rank that has joined: what it told beside
        self._expired: list[str] = []
        self._pause = 0.0

    # -- with the lock held ---------------------------------------------------------------------

    def _enqueue(self, task: Task) -> None:
        self._check_running(task)
        if self._failure:
            raise self._cannot_start(task)
        name = task.proposal.name
        if name in self._tasks:
            raise ArgumentError(
                f"{task.label} was submitted while an operation of the same name is under way. "
                "Synchronize the first one, or give them different names."
            )
        self._tasks[name] = task
        self._unannounced.append(task)
        self._submitted.notify_all()  # whoever pauses between two rounds

    def _has_work(self) -> bool:
        return bool(self._tasks)

    def _await(self, task: Task) -> None:
        # Of another thread's wait nothing follows: the main thread may still submit what it is for.
        if not (task.awaited or task.finished) and _in_main_thread():
            task.awaited = True
            self._newly_awaited.append(task.proposal.name)

    def _advance(self) -> None:
        if self._pause and not self._unannounced:
            self._busy = True  # nobody else may drive meanwhile
            try:
                self._submitted.wait(self._pause)
            finally:
                self._busy = False
        fresh, self._unannounced = self._unannounced, []
        awaited, self._newly_awaited = self._newly_awaited, []
        leaving = self._stopping
        self._unlocked(lambda: self._round(fresh, awaited, leaving))

    def call(self, function: Callable[[], Value], name: str) -> Value:
        def start(peers: Peers | None) -> Work:
            values.append(function())
            return Completed()

        values: list[Value] = []
        self.run(Task(start, lambda: None, Proposal("call", name))).result()
        return values[0]

    def exchange(self, data: bytes, name: str) -> list[bytes]:
        answers: list[bytes] = []

        def start(peers: Peers | None) -> Work:
            assert peers is not None
            for peer in peers:
                assert peer is not None  # refused when a rank has joined
                assert peer.payload is not None
                answers.append(peer.payload)
            return Completed()

        self.run(Task(start, lambda: None, Proposal("exchange", name, payload=data))).result()
        return answers

    # -- without it -----------------------------------------------------------------------------

    def _round(self, fresh: Sequence[Task], awaited: list[str], leaving: bool) -> None:
        if self._cycle is not None:
            self._cycle()
        try:
            proposals = [task.proposal for task in fresh]
            message = _Message(proposals, self._expired, awaited, leaving)
            self._expired = []
            answers = self._tell(message)
            self._run_all(self._learn(answers))
            self._limit_waits()
        except Exception as error:  # of an operation itself it would be kept in its task
            self._break(error)

    def _tell(self, message: _Message) -> list[_Message]:
        """Hold a round: every rank's message, in rank order."""
        if self.group.size == 1:
            return [message]
        waiting = ", ".join(task.label for task in list(self._tasks.values())[:5])
        try:
            answers = self.backend.exchange(message.pack(), self.group, f"agreement on {waiting}")
        except HorovodInternalError as error:
            raise HorovodInternalError(f"{waiting} failed before it began: {error}") from error
        return [_Message.unpack(answer) for answer in answers]

    def _learn(self, answers: Sequence[_Message]) -> list[_Entry]:
        """Enter a round's messages in the table; return what can run now, in the agreed order."""
        news = False
        for rank, message in enumerate(answers):
            news |= bool(message.proposals or message.expired or message.awaited)
            for proposal in message.proposals:
                if proposal.kind == JOIN:
                    self._joined.append(rank)
                    self._progress[rank] = proposal.own or 0
                    continue
                entry = self._table.setdefault(
                    proposal.name, _Entry(proposal.kind, proposal.name, time.monotonic())
                )
                entry.proposals[rank] = proposal
            for name in message.awaited:
                if name in self._table:
                    self._table[name].awaited.add(rank)
        size = self.group.size
        ready = [
            entry
            for entry in self._table.values()
            if len(entry.proposals) == size
            or (self._joined and len(entry.proposals.keys() | set(self._joined)) == size)
        ]
        for entry in ready:
            del self._table[entry.name]
        expired = [name for message in answers for name in message.expired if name in self._table]
        if expired and self._is_deadlocked():  # then all that is waited for is in vain
            awaited = [entry for entry in self._table.values() if entry.awaited]
            for entry in awaited:  # all count on from there, and the next ones have equal names
                self._pass_by(next(iter(entry.proposals.values())), self.group)
            expired = [entry.name for entry in awaited]
        texts = {name: self._describe_stall(self._table[name]) for name in expired}
        for name, text in texts.items():
            self._fail(self._table.pop(name), text)
        if len(self._table) > 1:
            self._find_different_kinds()
        self._find_abandoned({rank for rank, message in enumerate(answers) if message.leaving})
        if news or ready:
            self._pause = 0.0
        else:
            self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE)
        return ready

    def _run_all(self, ready: Sequence[_Entry]) -> None:
        """Run operations in order: all are started before the first is waited for."""
        started: list[Task] = []
        stand_ins: list[Task] = []
        for entry in ready:
            if self.group.me not in entry.proposals:
                self._pass_by(next(iter(entry.proposals.values())), self.group)
            error = self._disagreement(entry)
            if error:
                self._fail(entry, error)
                continue
            own = entry.proposals.get(self.group.me)
            if own is None:
                proposal = next(iter(entry.proposals.values()))
                try:
                    task = self._stand_in(proposal, self.group)
                except Exception as error:  # the others have begun, and will miss this rank
                    self._break(
                        HorovodInternalError(f"{entry.name!r} failed after join(): {error}")
                    )
                    return
                stand_ins.append(task)
            else:
                task = self._tasks[entry.name]
            peers = [entry.proposals.get(rank) for rank in range(self.group.size)]
            task.start(peers)
            started.append(task)
        for task in started:
            self._forget(task)
            task.complete()
            self._finished(task)
        for task in stand_ins:  # nobody else asks how they went
            try:
                task.result()
            except Exception as error:
                self._break(error)
                return
        if len(self._joined) == self.group.size:
            # Who had no rounds to hold may tell late that it has joined long ago.
            last = max(reversed(self._joined), key=lambda rank: self._progress[rank])
            self._joined = []
            join = self._tasks[JOIN]
            self._forget(join)
            join.succeed(last)
            self._finished(join)

    def _forget(self, task: Task) -> None:
        """Free a task's name, before it is finished: its waiter may use the name again at once."""
        with self._completed:
            if self._tasks.get(task.proposal.name) is task:
                del self._tasks[task.proposal.name]

    def _finished(self, task: Task) -> None:
        self._traced(task)
        with self._completed:
            self._completed.notify_all()

    def _fail(self, entry: _Entry, message: str) -> None:
        task = self._tasks.get(entry.name)
        if task is not None and self.group.me in entry.proposals:
            self._forget(task)
            task.fail(HorovodInternalError(message))
            self._finished(task)

    def _break(self, error: Exception) -> None:
        """A round has failed: nothing can be agreed on any more."""
        with self._completed:
            self._failure = str(error)
            tasks, self._tasks = list(self._tasks.values()), {}
            self._unannounced = []
            for task in tasks:
                task.fail(HorovodInternalError(str(error)))
            self._completed.notify_all()

    # -- what is wrong with an operation ----------------------------------------------------------

    def _spell(self, ranks: Sequence[int]) -> str:
        """Ranks of the group as ranks of the world."""
        names = [str(self.group.ranks[rank]) for rank in sorted(ranks)]
        return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"

    def _disagreement(self, entry: _Entry) -> str:
        """Why an operation that all have submitted must not run, or ""."""
        joined = [rank for rank in self._joined if rank not in entry.proposals]
        if joined:
            proposal = next(iter(entry.proposals.values()))
            why = self._refusal(proposal, [self.group.ranks[rank] for rank in joined])
            if why:
                return (
                    f"{entry.kind} {entry.name!r} cannot run after {self._spell(joined)} called "
                    f"join(): {why}."
                )
        differences = []
        first = next(iter(entry.proposals.values()))
        for term in first.terms:
            by_value: dict[str, list[int]] = {}
            for rank, proposal in sorted(entry.proposals.items()):
                by_value.setdefault(json.dumps(proposal.terms.get(term)), []).append(rank)
            if len(by_value) > 1:
                values = ", ".join(
                    f"{json.loads(value)} on {self._spell(ranks)}"
                    for value, ranks in by_value.items()
                )
                differences.append(f"{term} is {values}")
        if not differences:
            return ""
        return (
            f"{entry.kind} {entry.name!r} was called with different arguments: "
            f"{'; '.join(differences)}. Nothing was sent."
        )

    def _find_different_kinds(self) -> None:
        """One name, waited for as different kinds of operation: those would never be matched."""
        by_name: dict[str, list[_Entry]] = {}
        for entry in self._table.values():
            if entry.proposals.keys() <= entry.awaited:
                by_name.setdefault(entry.name.partition(".")[2], []).append(entry)
        for entries in by_name.values():
            ranks = set(self._joined).union(*(entry.proposals for entry in entries))
            if len(entries) < 2 or len(ranks) < self.group.size:
                continue
            calls = ", ".join(
                f"{entry.kind} on {self._spell(list(entry.proposals))}" for entry in entries
            )
            text = f"{entries[0].name.partition('.')[2]!r} is not the same operation everywhere: "
            for entry in entries:
                del self._table[entry.name]
                self._pass_by(next(iter(entry.proposals.values())), self.group)
                self._fail(entry, f"{text}{calls}. Nothing was sent.")

    def _find_abandoned(self, leaving: set[int]) -> None:
        """What a rank that shuts down has not submitted by now cannot run any more."""
        for entry in list(self._table.values()):
            gone = leaving - entry.proposals.keys() - set(self._joined)
            if gone:
                del self._table[entry.name]
                self._fail(
                    entry,
                    f"{entry.kind} {entry.name!r} cannot run: {self._spell(list(gone))} called "
                    "shutdown(), or ended, without calling it.",
                )

    # -- waits ------------------------------------------------------------------------------------

    def _limit_waits(self) -> None:
        """Warn of what has been waiting for long, and give up what has for too long."""
        if not self._table:
            return
        now, patience = time.monotonic(), self.backend.patience
        limit = patience.limit
        if patience.warn_after and self._is_deadlocked():  # nobody is merely late
            limit = min(limit, patience.warn_after)
        for entry in self._table.values():
            if self.group.me not in entry.proposals:
                continue
            waited = now - entry.since
            if waited > limit and not entry.expired:
                entry.expired = True
                self._expired.append(entry.name)
            elif patience.warn_after and waited > patience.warn_after and not entry.warned:
                entry.warned = True
                if self.group.me == min(entry.proposals):
                    text = self._describe_stall(entry)
                    print(f"unidist: warning: {text}", file=sys.stderr, flush=True)

    def _is_deadlocked(self) -> bool:
        """Whether the main threads of all ranks wait for operations that others do not have.

        Another thread could still submit those, which is why this alone is no error.
        """
        waiting = set(self._joined).union(*(entry.awaited for entry in self._table.values()))
        return len(waiting) == self.group.size > len(self._joined)

    def _describe_stall(self, entry: _Entry) -> str:
        missing = set(range(self.group.size)) - entry.proposals.keys() - set(self._joined)
        others = []
        for rank in sorted(missing):
            names = [other.name for other in self._table.values() if rank in other.proposals]
            if names:
                others.append(f"{self._spell([rank])} waits for {', '.join(names[:3])}")
        return (
            f"{entry.kind} {entry.name!r} has waited {time.monotonic() - entry.since:.0f} s for "
            f"{self._spell(list(missing))}, where it was not called; it was on "
            f"{self._spell(list(entry.proposals))}."
            + (f" Meanwhile {'; '.join(others)}." if others else "")
        )
