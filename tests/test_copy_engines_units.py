"""Parts of copy engines that need no ranks: the pass, what is asked of GPUs, the time-out."""

import time
import weakref
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collective_graphs import RANKS, Graph, backward, forward, replicated_backward

from ndcompile.copy_engines.connect import why_unreachable
from ndcompile.copy_engines.group import CopyGroup
from ndcompile.copy_engines.protocol import Exchanges, Layout, Memory
from ndcompile.copy_engines.watch import Watch
from ndcompile.errors import UnsupportedError
from ndcompile.graphs.collective_chains import GATHER, REDUCE_SCATTER, TOGETHER, collectives
from ndcompile.passes.coalesce_collectives import coalesce_collectives
from ndcompile.passes.use_copy_engines import use_copy_engines

COPIES = {"fsdp": "fsdp.copies"}
CPU = torch.device("cpu")
NOTHING = lambda: None  # noqa: E731


def renamed(g: Graph) -> list[str]:
    """Collectives as text, behind the pass."""
    use_copy_engines(g.graph, COPIES)
    g.graph.lint()
    starts = [node for node in g.graph.nodes if getattr(node.target, "namespace", "") == "_c10d_functional"]
    return [f"{n.target._opname} {n.args[-1]}" for n in starts if n.target is not collectives.wait_tensor.default]


def test_gathers_of_weights_are_copied():
    assert renamed(forward({"a": 4, "b": 4})) == ["all_gather_into_tensor_coalesced fsdp.copies"] * 2


def test_reductions_of_gradients_are_copied():
    assert renamed(backward({"a": 4, "b": 4})) == ["reduce_scatter_tensor_coalesced fsdp.copies"] * 2


def test_what_is_launched_together_stays_so():
    g = forward({"a": 4, "b": 4})
    coalesce_collectives(g.graph)
    assert renamed(g) == ["all_gather_into_tensor_coalesced fsdp.copies"]


def test_the_sum_over_replicas_stays_with_nccl():
    assert renamed(replicated_backward(4)) == [
        *("reduce_scatter_tensor_coalesced fsdp.copies", "all_reduce dp_replicate") * 2
    ]


def test_other_groups_stay_with_nccl():
    g = Graph()
    g.graph.output((g.weight("a", 4, group="efsdp"), g.gradient("b", 4, group="other")))
    assert renamed(g) == ["all_gather_into_tensor efsdp", "reduce_scatter_tensor other"]


def test_gathered_activations_stay_with_nccl():
    g = Graph()
    start = g.call("gather", GATHER, g.input("x", 4), RANKS, "fsdp")
    g.graph.output((g.call("wait", collectives.wait_tensor.default, start),))
    assert renamed(g) == ["all_gather_into_tensor fsdp"]


def _reduced(operation, dtype):
    g = Graph()
    whole = g.call("grad", torch.ops.aten.mul.Tensor, g.input("saved", 4, dtype), 2)
    start = g.call("scatter", REDUCE_SCATTER, whole, operation, RANKS, "fsdp")
    start.meta["custom"] = {"unshard": "free_full_weight"}
    g.graph.output((g.call("wait", collectives.wait_tensor.default, start),))
    return renamed(g)


@pytest.mark.parametrize(("operation", "dtype"), [("max", torch.bfloat16), ("sum", torch.float64)])
def test_reductions_that_copies_cannot_compute_stay_with_nccl(operation, dtype):
    assert _reduced(operation, dtype) == ["reduce_scatter_tensor fsdp"]
    assert _reduced("sum", torch.float32) == [f"{TOGETHER[REDUCE_SCATTER]._opname} fsdp.copies"]


def _unreachable(devices, reach=lambda uuid: True):
    return why_unreachable(devices, 0, range(len(devices)), reach)


def test_linked_gpus_of_one_host_are_reached():
    assert _unreachable([("a", "x", None), ("a", "y", None)]) is None


def test_the_missing_package_is_named():
    found = _unreachable([("a", "x", "cuda-bindings is missing"), ("a", "y", None)])
    assert found == "on rank 0 cuda-bindings is missing"


def test_ranks_of_two_hosts_are_named():
    found = _unreachable([("a", "x", None), ("a", "y", None), ("b", "z", None)])
    assert found == "rank 0 is on host a, and rank 2 of its fsdp group on b"


def test_gpus_without_a_link_are_named():
    found = _unreachable([("a", "x", None), ("a", "y", None)], reach=lambda uuid: uuid != "y")
    assert found == "the GPU of rank 0 cannot reach the memory of that of rank 1"


def test_two_ranks_on_one_gpu_are_told_to_set_their_device():
    assert "torch.cuda.set_device" in _unreachable([("a", "x", None), ("a", "x", None)])


def test_processes_that_see_one_gpu_each_are_told_to_see_all():
    assert "CUDA_VISIBLE_DEVICES" in _unreachable([("a", "x", None), ("a", "y", None)], reach=lambda uuid: None)


class End:
    """An event of a GPU."""

    def __init__(self, done):
        self.done = done

    def query(self):
        return self.done


def test_copies_that_do_not_end_end_the_process(caplog):
    given_up = []
    watch = Watch("nd0.fsdp", CPU, timedelta(seconds=0), lambda: given_up.append(True))
    for what, done in (("gather 1", True), ("gather 2", False)):
        watch.pending.append((what, End(done), NOTHING, time.monotonic() - 1))
    watch.look()
    assert given_up == [True]
    assert "gather 2 of group 'nd0.fsdp' has waited for another rank" in caplog.text


def test_copies_that_end_are_forgotten():
    watch, ended = Watch("fsdp", CPU, timedelta(minutes=10), pytest.fail), []
    slow = End(False)
    for number, end in enumerate((End(True), slow, End(True))):
        watch.pending.append(("gather", end, partial(ended.append, number), time.monotonic()))
    watch.look()
    assert ended == [0]
    slow.done = True
    watch.look()
    assert ended == [0, 1, 2]
    assert not watch.pending


def test_the_thread_ends_when_it_is_told():
    watch = Watch("fsdp", CPU, timedelta(minutes=10), pytest.fail)
    watch("gather 1", End(True))
    thread = watch.thread
    assert thread is not None
    watch.end()
    assert not thread.is_alive()


class Recorded:
    """Exchanges of a rank, of which it is noted what they are asked for."""

    def __init__(self, error=None):
        self.rank, self.layout, self.gathers, self.added = 0, Layout(2), 1, None
        self.asked, self.broken, self.error = [], False, error

    def gather(self, results, shards):
        if self.error is not None:
            raise self.error
        return 0, None, None

    def gathered(self, *end):
        self.asked.append("gathered")

    def reduce(self, results, gradients, mean):
        self.asked.append("mean" if mean else "sum")
        return 1, None

    def reduced(self, number, sent):
        self.asked.append(number)


def _group(exchanges=None, watch=lambda *_: None):
    return CopyGroup("fsdp.copies", exchanges or Recorded(), watch)


def _options(operation):
    options = dist.ReduceScatterOptions()
    options.reduceOp = operation
    return options


@pytest.mark.parametrize(("operation", "kind"), [(dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "mean")])
def test_reductions_are_what_was_asked_for(operation, kind):
    exchanges = Recorded()
    tensors = [torch.zeros(2)], [torch.zeros(4)]
    _group(exchanges).reduce_scatter_tensor_coalesced(*tensors, _options(operation)).wait()
    assert exchanges.asked == [kind, 1]


def test_tensors_live_until_somebody_waited():
    shard, whole = torch.zeros(2), torch.zeros(4)
    alive = [weakref.ref(shard), weakref.ref(whole)]
    started = _group().allgather_into_tensor_coalesced([whole], [shard])
    del shard, whole
    assert all(each() is not None for each in alive)
    started.wait()
    assert all(each() is None for each in alive)


def test_tensors_that_nobody_waits_for_are_let_go_when_the_copies_have_ended():
    watched = []
    shard, whole = torch.zeros(2), torch.zeros(4)
    alive = [weakref.ref(shard), weakref.ref(whole)]
    started = _group(watch=lambda *what: watched.append(what)).allgather_into_tensor_coalesced([whole], [shard])
    del shard, whole
    ((what, _, ended),) = watched
    assert what == "gather 1"
    ended()
    assert all(each() is None for each in alive)
    del started


def test_an_error_in_between_is_remembered():
    exchanges = Recorded(error=RuntimeError("refused by the driver"))
    with pytest.raises(RuntimeError, match="refused by the driver"):
        _group(exchanges).allgather_into_tensor_coalesced([torch.zeros(4)], [torch.zeros(2)])
    assert exchanges.broken


def test_a_rank_that_broke_off_in_between_has_begun_what_no_other_has():
    numbers = []
    for rank in range(2):
        exchanges = Exchanges(rank, Layout(2), Memory(torch.zeros(1), [0, 0]), mock.Mock())
        assert exchanges.begun == {"gathers": 0, "reductions": 0}
        exchanges.broken = True
        numbers.append(exchanges.begun["gathers"])
    assert len({0, *numbers}) == 3


def test_tensors_with_gaps_are_refused():
    with pytest.raises(UnsupportedError, match="contiguous"):
        _group().allgather_into_tensor_coalesced([torch.zeros(4, 2).t()], [torch.zeros(4)])


def test_other_reductions_are_refused():
    with pytest.raises(UnsupportedError, match="sum or mean"):
        _group().reduce_scatter_tensor_coalesced([torch.zeros(2)], [torch.zeros(4)], _options(dist.ReduceOp.MAX))
