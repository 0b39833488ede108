"""Agreement of ranks through the store: what is compared before the first run of a graph, so that nothing can hang.

A process-group collective could pair with another rank's training step; a store key cannot. Every exchange has a name
and a time-out, and ends with the same error on all ranks that take part.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ndcompile.errors import AgreementError, RoutingError
from ndcompile.mesh import StorageMesh, leave_groups
from ndcompile.private.autograd import at_end_of_backward, current_backward
from ndcompile.private.distributed import collectives_begun, default_store, resolve_process_group

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others: longer than a compile."""
GRACE = timedelta(seconds=10)
"""How long a rank that refused a call waits for the others to refuse it too, at most half of what they wait for it."""


class Agreement:
    """Named exchanges between all ranks of a world. Without peers (one rank, or the fake backend) all are trivial."""

    def __init__(self, mesh: StorageMesh, timeout: timedelta = TIMEOUT) -> None:
        self.mesh = mesh
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.alone = self.world == 1 or mesh.backend == "fake"
        self.timeout = timeout
        self.prefix = f"ndcompile/{mesh.name}/{next(mesh.counter)}"
        self.captures = self.refusals = self.calls = self.runs = 0
        self.in_backward = False
        self.last_signature: Sequence[str] = ()

    def exchange(self, key: str, value: Any, timeout: timedelta | None = None, about: str = "") -> list[Any]:
        """Every rank's value (JSON), in rank order. Raises AgreementError naming the ranks that did not come.

        timeout: how long to wait for them, `self.timeout` by default. about: what the error adds.
        """
        if self.alone:
            return [json.loads(json.dumps(value))]
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        self._wait(keys, key, timeout or self.timeout, about)
        return [json.loads(text) for text in self._store.multi_get(keys)]

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """What all ranks do between exchanges named `name/...`. An error on one rank ends the others' waiting."""
        try:
            yield
        except AgreementError:
            raise
        except Exception as error:
            if not self.alone:
                self._store.set(f"{name}/failed", f"rank {self.rank}: {type(error).__name__}: {error}")
            raise

    def peer_gave_up(self) -> str | None:
        """Why a rank left the mesh's groups, if one did."""
        if self.alone or not self._of_mesh.check(["gave up"]):
            return None
        return self._of_mesh.get("gave up").decode()

    def begin_run(self) -> None:
        """Before a graph runs. Raises AgreementError if this rank left the mesh's groups, for this model or another."""
        self._check_backward()
        if self.mesh.left_for:
            reason = self.mesh.left_for[0]
            raise AgreementError(f"The ranks of this model left its process groups: {reason}. Restart the job.")
        self.runs += 1

    def _check_backward(self) -> None:
        """The last backward has come to its end, or on all ranks before the same collective; else leave the groups."""
        if self.in_backward and current_backward() is None:
            self.in_backward = False
            self.refused("an error ended the backward of an earlier call")

    def watch_backward(self, outputs: Sequence[object]) -> None:
        """Know, at the next call, whether a backward from these outputs came to its end. Autograd tells nobody else."""
        if not self.alone:
            for output in outputs:
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Tensor) -> None:
        self.in_backward = True
        at_end_of_backward(self._backward_ends)  # which an error passes over

    def _backward_ends(self) -> None:
        self.in_backward = False

    @property
    def _store(self) -> dist.Store:
        return dist.PrefixStore(self.prefix, default_store())

    @property
    def _of_mesh(self) -> dist.Store:
        """What models that share a mesh, and so its groups, share."""
        return dist.PrefixStore(f"ndcompile/{self.mesh.name}", default_store())

    def _wait(self, keys: Sequence[str], exchange: str, timeout: timedelta, about: str) -> None:
        """Poll: a blocking wait could not notice that a rank failed."""
        deadline, pause = time.monotonic() + timeout.total_seconds(), 0.001
        failed = f"{exchange.partition('/')[0]}/failed"
        while not self._store.check(list(keys)):
            # Again the keys: a rank that had them all may have failed since, for what all ranks will see.
            if self._store.check([failed]) and not self._store.check(list(keys)):
                raise AgreementError(f"Rank {self.rank} stops, as {self._store.get(failed).decode()}")
            if (reason := self.peer_gave_up()) is not None:
                raise AgreementError(f"Rank {self.rank} stops, as a rank gave up: {reason}")
            if time.monotonic() > deadline:
                missing = [rank for rank, name in enumerate(keys) if not self._store.check([name])]
                reason = (
                    f"Rank {self.rank} waited {timeout} for ranks {missing} to reach {exchange!r}: they did not "
                    "make this call. All ranks must call the model in the same modes (train, eval, no_grad, autocast), "
                    f"with the same arguments, in the same order.{about}"
                )
                self.give_up(reason, AgreementError(reason))
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def give_up(self, reason: str, error: Exception) -> NoReturn:
        """The others may wait for this rank inside a collective: leave the groups, so that they fail too."""
        if not self.alone:
            with suppress(dist.DistNetworkError):  # the host of the store has ended, and so will whoever waits
                self._of_mesh.set("gave up", reason)
            self.leave(reason)
        raise error

    def broke_off(self, error: Exception) -> NoReturn:
        """This rank stopped inside a graph with collectives; see `refused`.

        A lost connection is an error of this rank, or all that it sees of one that gave up.
        """
        with suppress(dist.DistNetworkError):  # the host of the store has ended, and so will whoever waits
            may_be_lost = type(error) is RuntimeError or isinstance(error, dist.DistError)
            if may_be_lost and (reason := self.peer_gave_up()) is not None:
                self.leave(reason)  # for ranks that have no group with the one that gave up
                raise AgreementError(f"A rank left: {reason}") from error
            if isinstance(error, RoutingError):  # it depends on a rank's own tokens
                self.give_up(f"rank {self.rank}: {type(error).__name__}: {error}", error)
            self.refused(f"{type(error).__name__}: {error}")
        raise error

    def leave(self, reason: str) -> None:
        """Leave the groups, if this rank has not yet: whoever waits for it fails."""
        if not (self.alone or self.mesh.left_for):
            self.mesh.left_for.append(reason)
            leave_groups(self.mesh)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """What a rank does for a call by itself: an error in it means that this rank does not make the call."""
        try:
            yield
        except AgreementError:  # all ranks have it
            raise
        except Exception as error:
            self.refused(f"{type(error).__name__}: {error}")
            raise

    def refused(self, what: str) -> None:
        """This rank does not make a call, or not to its end. Where all stop in the same call and before the same
        collective, all may go on; else some wait for others, here or in a collective, as ranks with a graph do not talk
        before a call: give up, but for the error."""
        if self.alone or self.mesh.left_for:
            return
        self.refusals += 1
        keys = [f"refused{self.refusals}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], json.dumps([self.calls, self.runs, self._begun()]))
        deadline = time.monotonic() + min(GRACE, self.timeout / 2).total_seconds()
        while not self._store.check(keys):
            if self.peer_gave_up() is not None or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        else:
            told = [json.loads(text) for text in self._store.multi_get(keys)]
            begun = {(tuple(ranks), number) for *_, groups in told for ranks, number in groups}
            same_call = len({(calls, runs) for calls, runs, _ in told}) == 1
            if same_call and len(begun) == len({ranks for ranks, _ in begun}):
                return
        if (reason := self.peer_gave_up()) is None:
            reason = f"rank {self.rank}: {what}"
            self._of_mesh.set("gave up", reason)
        self.leave(reason)

    def _begun(self) -> list[tuple[list[Any], int]]:
        """What tells this rank's groups apart (their ranks), and how many collectives it has begun on each."""
        groups = {axis.group: resolve_process_group(axis.group) for axis in self.mesh.axes.values()}  # type: ignore[arg-type]
        members = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
        begun: list[tuple[list[Any], int]] = [(members[name], collectives_begun(groups[name])) for name in groups]
        for name, copies in self.mesh.copies.items():
            begun += [([kind, *members[name]], number) for kind, number in copies.exchanges.begun.items()]
        return begun

    def same(self, key: str, value: Sequence[str], what: str, about: str = "") -> None:
        """Raise AgreementError on every rank unless all gave equal lists of lines.

        The error names the first line that differs and the ranks that have it. about: see `exchange`.
        """
        digests = self.exchange(f"{key}/digest", _digest(value), about=about)
        if len(set(digests)) == 1:
            return
        lines = self.exchange(f"{key}/lines", list(value))
        groups: dict[str, list[int]] = defaultdict(list)
        first = next(i for i in range(max(map(len, lines))) if len({_line(text, i) for text in lines}) > 1)
        for rank, text in enumerate(lines):
            groups[_line(text, first)].append(rank)
        found = "\n".join(f"  ranks {ranks}: {line}" for line, ranks in groups.items())
        raise AgreementError(f"Ranks differ in {what}, first at number {first}:\n{found}")

    def capture_begins(self, signature: Sequence[str], inputs: Mapping[str, Tensor], seed: int) -> int:
        """Before a capture of a new signature: all ranks make the same one, and tp ranks have the same inputs.

        Returns the random seed of the tp group's first rank, which all ranks of the group share.
        """
        self._check_backward()
        self.captures += 1
        key = f"capture{self.captures}"
        new = [line for line in signature if line not in self.last_signature] if self.last_signature else []
        about = f" New in the call of rank {self.rank}: {'; '.join(new)}." if new else ""
        self.same(f"{key}/signature", signature, "the signature of the call", about)
        self.last_signature = signature
        return self.same_inputs(key, inputs, seed)

    def same_inputs(self, key: str, inputs: Mapping[str, Tensor], seed: int) -> int:
        """Raise AgreementError on every rank where ranks of one tp group have different inputs.

        Returns the seed of this rank's tp group, which is its first rank's.
        """
        if self.mesh.size("tp") == 1:
            return seed
        records = self.exchange(f"{key}/inputs", [self.mesh.data_rank, seed, input_hashes(inputs)])
        for data_rank in range(self.mesh.data_world_size):
            group = {rank: hashes for rank, (d, _, hashes) in enumerate(records) if d == data_rank}
            for name in inputs:
                _same_input(name, {rank: hashes[name] for rank, hashes in group.items()})
        return next(s for d, s, _ in records if d == self.mesh.data_rank) if len(records) > 1 else seed

    def compile_once(self, compile: Callable[[], T]) -> T:
        """Compile on the first rank of each host, then on the others, which find the result in inductor's cache.

        On GPUs the ranks compile side by side: the device's index is part of the code, so their results differ.
        """
        if self.alone or self.mesh.device.type != "cpu":
            return compile()
        key = f"capture{self.captures}/compile"
        hosts = self.exchange(f"{key}/host", socket.gethostname())
        leader = hosts.index(hosts[self.rank])
        store = dist.PrefixStore(self.prefix, default_store())
        if self.rank == leader:
            try:
                return compile()
            finally:  # a failed compile must free the others, which then fail by themselves
                store.set(f"{key}/{leader}/done", "")
        store.wait([f"{key}/{leader}/done"], self.timeout)
        return compile()


def input_hashes(inputs: Mapping[str, Tensor]) -> dict[str, str]:
    """A hash of each tensor."""
    return {name: tensor_hash(tensor) for name, tensor in inputs.items()}


def tensor_hash(tensor: Tensor) -> str:
    """A hash of the tensor's bytes, dtype and shape; the same on all devices."""
    content = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{content.dtype} {tuple(content.shape)}".encode())
    if content.numel():
        digest.update(content.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _same_input(name: str, hashes: Mapping[int, str]) -> None:
    if len(set(hashes.values())) > 1:
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, value in hashes.items():
            groups[value].append(rank)
        raise AgreementError(
            f"Ranks {list(groups.values())} of one tp group were given different values of {name}. Ranks of a tp group "
            "share their input: shard the data by ndcompile.data_rank(model), not by the global rank."
        )


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _line(lines: Sequence[str], index: int) -> str:
    return lines[index] if index < len(lines) else "(nothing more)"
