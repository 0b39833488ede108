"""Real gloo ranks for tests: processes that start once, take functions by reference, and cannot hang a test.

Importing torch and transformers takes seconds of CPU time. So a pool serves all tests of its world size, and its ranks
are forked from one server process that has imported them (and has no threads yet).
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ndcompile.private.python import with_room_for_frames

TIMEOUT = 150.0
"""Seconds that one function may take on all ranks: above the collectives' own time-out."""
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)


class RankError(Exception):
    """A function failed on some ranks. `failures` maps a rank to (type name, message, traceback)."""

    def __init__(self, failures: dict[int, tuple[str, str, str]], world: int) -> None:
        self.failures = failures
        first = min(failures)
        super().__init__(f"ranks {sorted(failures)} of {world} failed; rank {first}:\n{failures[first][2]}")


class RankTimeout(Exception):
    """Ranks did not answer in time. The pool was killed, and starts anew at the next call."""


class RankDied(RankTimeout):
    """A rank ended in the midst of a function, by the signal of `status` if that is below 0."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


GROUPS = 20
"""Process groups of a rank that is kept. A group of gloo has a thread that looks for messages a hundred times a second:
those of all tests took a fifth of two cores. To destroy groups is not enough: DTensor's caches hold meshes of them."""
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)
"""How gloo's own fault (bench/gloo_heap.py) ends a rank, once in some thousand calls."""


class Pool:
    """`world` gloo processes. `pool(function, *args)` runs a module-level function on all and returns their results.

    A function that raises on some ranks only may leave collectives half done: the pool then starts anew. A function in
    which a rank crashed runs once more, with a warning: what crashes for a reason of its own does so again.
    """

    def __init__(self, world: int, logs: Path) -> None:
        """logs: folder for what the ranks print."""
        self.world, self.logs = world, logs
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        try:
            answers = self._answers(function, args, timeout)
        except RankDied as error:
            if error.status not in CRASHES:
                raise
            warnings.warn(f"once more, for gloo's fault of bench/gloo_heap.py perhaps: {error}", stacklevel=2)
            answers = self._answers(function, args, timeout)
        failures = {rank: error for rank, (error, _) in enumerate(answers) if error is not None}
        if failures:
            if len(failures) < self.world:
                self.stop()
            raise RankError(failures, self.world)
        return [result for _, result in answers]

    def errors(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[tuple[str, str]]:
        """(type name, message) of the exception on every rank; fails when a rank did not raise."""
        try:
            results = self(function, *args, timeout=timeout)
        except RankError as error:
            silent = set(range(self.world)) - set(error.failures)
            if silent:
                raise AssertionError(f"ranks {sorted(silent)} raised nothing, the others did") from error
            return [error.failures[rank][:2] for rank in range(self.world)]
        raise AssertionError(f"no rank raised; results: {results}")

    def renew(self) -> None:
        """Between files: stop ranks that have made many process groups, so that the next call starts new ones."""
        if self.processes and all(process.is_alive() for process in self.processes) and max(self(_groups)) > GROUPS:
            self.stop()

    def stop(self) -> None:
        """End the processes of this pool: an idle rank ends when its pipe closes, any other is killed."""
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self.pipes = [], []

    def _answers(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[tuple[Any, Any]]:
        if not all(process.is_alive() for process in self.processes):
            self.stop()
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + timeout
        answers: list[tuple[Any, Any]] = []
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(max(deadline - time.monotonic(), 0)):
                    raise RankTimeout(
                        self._give_up(f"{function.__name__} did not end within {timeout:.0f} s on rank {rank}")
                    )
                answers.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                self.processes[rank].join(5)
                status = self.processes[rank].exitcode
                raise RankDied(self._give_up(f"rank {rank} died in {function.__name__} ({status})"), status) from None
        return answers

    def _give_up(self, what: str) -> str:
        """End all ranks; `what`, and the last that each of them printed."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes all stacks to the log
        time.sleep(1)
        for process in self.processes:
            process.kill()
        self.stop()
        tails = [f"--- rank {rank} ---\n" + self._log(rank).read_text()[-3000:] for rank in range(self.world)]
        return "\n".join([what, *tails])

    def _log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    def _start(self) -> None:
        import torch.distributed as dist

        # The store lives here, so that no port is chosen twice and ranks may die in any order.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = _forkserver()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            args = (rank, self.world, self.store.port, theirs, str(self._log(rank)))
            process = context.Process(target=_serve, args=args, daemon=True, name=f"rank{rank}of{self.world}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)


def _forkserver() -> Any:
    """A context whose processes are forked after `preloaded` was imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Python 3.11's server does not take over sys.path
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _serve(rank: int, world: int, port: int, pipe: Connection, log: str) -> None:
    """A rank: runs what comes through the pipe until the pipe closes."""
    _write_to(log)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch
    import torch.distributed as dist
    import transformers

    assert "preloaded" in sys.modules, "the server process could not import it"
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: to look at it in every collection is 8% of a capture
    transformers.logging.set_verbosity_error()
    # As under torchrun: transformers fills in sizes of a DistributedConfig from these.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        except Exception as error:  # the function's module does not import here
            pipe.send((_describe(error), None))
            continue
        try:
            answer = (None, _called(function, args))
        except Exception as error:
            answer = (_describe(error), None)
        gc.collect()
        gc.freeze()  # caches that grew stay too
        try:
            pipe.send(answer)
        except Exception as error:  # a result that cannot be pickled
            pipe.send((_describe(error), None))


@with_room_for_frames  # a ninth of the time of a training step on two ranks
def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def _groups() -> int:
    import torch.distributed as dist

    return len(dist.distributed_c10d._world.pg_map)


def _write_to(log: str) -> None:
    """What ranks print goes to their log: pytest's captured descriptors belong to one test, ranks to the session."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)


def _describe(error: BaseException) -> tuple[str, str, str]:
    return type(error).__name__, str(error), "".join(traceback.format_exception(error))
