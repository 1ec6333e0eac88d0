"""Waits that are too long: who is told what, on real jobs with limits of seconds.

The limits are Horovod's variables. A warning must name the operation and the missing ranks; the
error must do so, too, and reach all who wait.
"""

from __future__ import annotations

import harness
import pytest
import torch.distributed as dist
from conftest import need

from unidist.backends.base import DEFAULT_TIMEOUT, Patience

PATIENCE = 90.0

LIMITS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}

ENGINES = ("torch", "mpi")

PREAMBLE = """
import os, sys, time
import torch
import torch.distributed as dist
import unidist as hvd
host, port = sys.argv[1].split(":")
store = dist.TCPStore(host, int(port))
hvd.init(backend=BACKEND, timeout=600)
rank = hvd.rank()

def attempt(what, call):
    begin = time.monotonic()
    try:
        said = f"gave {call()}"
    except hvd.HorovodInternalError as error:
        said = f"raised {type(error).__name__} {error}"
    print(f"{what} after {time.monotonic() - begin:.1f} s {said}", flush=True)

def end(*waiting):
    # Those who have failed cannot shut down with the others; but none may go before all are done.
    store.set(f"over {rank}", "")
    store.wait([f"over {other}" for other in waiting])
    sys.stdout.flush()
    os._exit(0)
"""


def start(
    engine: str, size: int, code: str, environment: dict[str, str] | None = None
) -> harness.Result:
    """Run code on some ranks; each ends with ``end()``."""
    need(engine)
    row = harness.ENGINES[engine]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    result = harness.launch(
        row.launcher,
        size,
        ["-c", f"BACKEND = {row.backend!r}\n{PREAMBLE}\n{code}", f"127.0.0.1:{store.port}"],
        environment=LIMITS if environment is None else environment,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.report()
    assert not result.left, result.report()
    return result


def line(result: harness.Result, rank: int, what: str) -> str:
    """The one line that a rank printed of an attempt."""
    found = [
        text for text in result.outputs[f"rank {rank}"].splitlines() if text.startswith(f"{what} ")
    ]
    assert len(found) == 1, result.report()
    return found[0]


def seconds(text: str) -> float:
    return float(text.partition(" after ")[2].split()[0])


def warnings(result: harness.Result) -> list[str]:
    return [text for text in result.text.splitlines() if "unidist: warning:" in text]


ABSENT = """
hvd.barrier()
if rank == 1:
    store.wait(["over 0", "over 2"])
else:
    attempt("first", lambda: hvd.allreduce(torch.ones(3), name="lonely"))
    attempt("second", lambda: hvd.allreduce(torch.ones(3), name="another"))
end(0, 1, 2)
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_never_calls(engine: str) -> None:
    """It is alive and does something else: those who wait name it, and what they wait for."""
    result = start(engine, 3, ABSENT)
    for rank in (0, 2):
        said = line(result, rank, "first")
        assert "raised" in said, said
        assert "allreduce.lonely" in said, said
        assert "rank 1" in said, said
        assert 2.5 < seconds(said) < 8, said
        later = line(result, rank, "second")
        assert "raised" in later, later
        assert seconds(later) < 1, later
    warned = warnings(result)
    assert warned, result.report()
    assert any("allreduce.lonely" in text and "rank 1," in text for text in warned), warned


ELSEWHERE = """
hvd.barrier()
if rank == 1:
    attempt("first", lambda: hvd.allgather(torch.ones(3), name="other"))
else:
    attempt("first", lambda: hvd.allreduce(torch.ones(3), name="lonely"))
attempt("second", lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist())
hvd.shutdown()
end(0, 1, 2)
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_waits_in_another_operation(engine: str) -> None:
    """All are told, and since all are still there, the next operation works.

    Nobody is merely late, so the time of the warning is the limit.
    """
    result = start(engine, 3, ELSEWHERE)
    for rank in range(3):
        said = line(result, rank, "first")
        name, there, missing = (
            ("allgather 'allgather.other'", "rank 1", "ranks 0, 2")
            if rank == 1
            else ("allreduce 'allreduce.lonely'", "ranks 0, 2", "rank 1")
        )
        assert f"{name} has waited 1 s for {missing}" in said, said
        assert f"it was on {there}" in said, said
        assert 0.9 < seconds(said) < 2.5, said
        assert "gave [3.0, 3.0, 3.0]" in line(result, rank, "second"), result.report()


BUCKET = """
parameters = [torch.nn.Parameter(torch.zeros(1 << 12)) for _ in range(3)]
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), groups=3)

def step():
    optimizer.zero_grad()
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()

step()
if rank == 1:
    store.wait(["over 0", "over 2"])
else:
    attempt("first", step)
end(0, 1, 2)
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bucket_of_the_optimizer(engine: str) -> None:
    result = start(engine, 3, BUCKET)
    for rank in (0, 2):
        said = line(result, rank, "first")
        assert "raised" in said, said
        assert "gradients" in said, said
        assert "rank 1" in said, said
        assert 2.5 < seconds(said) < 8, said
    assert any("gradients" in text and "rank 1" in text for text in warnings(result))


LATE = """
hvd.barrier()
if rank == 1:
    time.sleep(2.5)
attempt("first", lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist())
parameter = torch.nn.Parameter(torch.zeros(4))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
for _ in range(2):
    parameter.sum().backward()
    optimizer.step()
hvd.shutdown()
end(0, 1)
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_warnings_can_be_turned_off_and_lateness_is_no_error(engine: str) -> None:
    variables = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    result = start(engine, 2, LATE, variables)
    assert not warnings(result), result.report()
    for rank in range(2):
        assert "gave [2.0, 2.0, 2.0]" in line(result, rank, "first"), result.report()
    assert seconds(line(result, 0, "first")) > 2, result.report()


JOINED = """
parameter = torch.nn.Parameter(torch.zeros(4))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
for step in range(8 if rank else 1):
    optimizer.zero_grad()
    parameter.sum().backward()
    optimizer.step()
    if rank:
        time.sleep(0.7)
attempt("join", hvd.join)
attempt("next", lambda: hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist())
hvd.shutdown()
end(0, 1)
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_has_joined_waits_as_long_as_the_others_train(engine: str) -> None:
    """Longer than the limit in all, while steps are made all the time."""
    result = start(engine, 2, JOINED)
    for rank in range(2):
        assert "gave 1" in line(result, rank, "join"), result.report()
        assert "gave [2.0]" in line(result, rank, "next"), result.report()


# -- the variables --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "timeout", "want"),
    [
        ({}, None, Patience(60.0, DEFAULT_TIMEOUT)),
        (LIMITS, None, Patience(1.0, 3.0)),
        (LIMITS, 2.0, Patience(1.0, 2.0)),
        (LIMITS, 600.0, Patience(1.0, 3.0)),
        ({}, 600.0, Patience(60.0, 600.0)),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, None, Patience(60.0, DEFAULT_TIMEOUT)),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5"}, None, Patience(0.5, DEFAULT_TIMEOUT)),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, None, Patience(0.0, DEFAULT_TIMEOUT)),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, None, Patience(60.0, DEFAULT_TIMEOUT)),
        ({"HOROVOD_STALL_CHECK_DISABLE": ""}, None, Patience(60.0, DEFAULT_TIMEOUT)),
    ],
)
def test_limits_from_the_environment(
    variables: dict[str, str], timeout: float | None, want: Patience
) -> None:
    assert Patience.from_environment(variables, timeout) == want


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan", "1,5"])
@pytest.mark.parametrize("variable", sorted(LIMITS))
def test_bad_values_are_refused(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} must be a number of seconds"):
        Patience.from_environment({variable: text}, None)


def test_init_refuses_a_bad_value() -> None:
    code = """
import unidist as hvd
try:
    hvd.init(backend="serial")
    print("NOT REACHED")
except ValueError as error:
    print("caught:", error)
assert not hvd.is_initialized()
"""
    variables = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "a minute"}
    text = harness.launch("none", 1, ["-c", code], environment=variables).outputs["rank 0"]
    assert "caught: HOROVOD_STALL_CHECK_TIME_SECONDS must be" in text
    assert "NOT REACHED" not in text
