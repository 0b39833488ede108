"""Every exchange of tokens, on routing that is chosen token by token, against the model on one process."""

import itertools
import math

import pytest
import routed_model
import torch
import workers
from matrix import sampled_rows
from routed_model import EXPERTS, HIDDEN, KINDS
from workers import Comparison, error, gradient_errors, size

import ndcompile

EP2 = (("ep", 2),)
TP2_EP2 = (("ep", 2), ("tp", 2))
TP2 = (("tp", 2),)


def _random(rank, tokens):
    return torch.randint(0, EXPERTS, (1, tokens, 2), generator=torch.Generator().manual_seed(rank))


ROUTES = {
    "random": lambda rank: _random(rank, 8),
    "7 tokens, which tp does not divide": lambda rank: _random(rank, 7),
    "all to one expert": lambda rank: torch.full((1, 8, 2), 5),
    "nothing to the first rank": lambda rank: torch.full((1, 8, 2), EXPERTS - 1) - _random(rank, 8) % 2,
    "every rank keeps its own": lambda rank: (_random(rank, 8) % 4 + 4 * rank) % EXPERTS,
    "one token": lambda rank: _random(rank, 1),
}
RAGGED = {"another number of tokens on every rank": lambda rank: _random(rank, 3 + 4 * rank)}


def _compiled(kind, layout, implementation="auto", **options):
    sizes = {"ep_size": math.prod(n for _, n in layout if _ in ("ep", "tp"))}
    sizes |= {"fsdp_size": math.prod(n for _, n in layout if _ != "tp"), "tp_size": dict(layout).get("tp", 1)}
    plan = routed_model.RoutedModel.plan(kind)
    fsdp = {"": "free_full_weight"} if sizes["fsdp_size"] > 1 else None
    config = sizes | {"tp_plan": {}, "ep_plan": plan, "fsdp_plan": fsdp, "ep_implementation": implementation}
    model = routed_model.build(kind)
    return ndcompile.compile(
        model, workers.mesh(layout), distributed_config=config, backend="eager", dynamic=True, **options
    )


def _arguments(route, rank):
    index = route(rank)
    hidden = torch.randn(*index.shape[:2], HIDDEN, generator=torch.Generator().manual_seed(10 + rank))
    return {"inputs_embeds": hidden, "index": index}


def _compare(kind, layout, implementation, routes, options):
    """The errors of each route."""
    model = _compiled(kind, layout, implementation, **options)
    world, rank = ndcompile.data_world_size(model), ndcompile.data_rank(model)
    comparisons = {}
    for name in routes:
        route = (ROUTES | RAGGED)[name]
        reference = routed_model.build(kind)
        model.zero_grad()
        output = model(**_arguments(route, rank))
        output.square().sum().backward()
        expected = [reference(**_arguments(route, r)) for r in range(world)]
        (sum(e.square().sum() for e in expected) / world).backward()
        gradients = gradient_errors(model, {n: p.grad for n, p in reference.named_parameters()})
        comparisons[name] = Comparison(error(output, expected[rank]), gradients)
    return comparisons


def _assert_equal(pool, *case):
    for comparisons in pool(_compare, *case):
        assert {name: c.exceeding() for name, c in comparisons.items() if c.exceeding()} == {}


EXACT = {"expert_capacity": math.inf}


@pytest.mark.parametrize(
    ("implementation", "layout", "options"),
    sampled_rows(
        [
            ("all_to_all", TP2_EP2, {}),
            ("all_gather", TP2_EP2, {}),
            ("all_reduce", TP2, {}),
            ("capacity", TP2_EP2, EXACT),
        ],
        0,
        2,
    ),
)
def test_every_routing_gives_the_model_of_one_process(world, implementation, layout, options):
    routes = [*ROUTES, *RAGGED] if implementation == "all_to_all" else [*ROUTES]
    _assert_equal(world(size(layout)), "gated", layout, implementation, routes, options)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gated"])
def test_every_kind_of_experts(world, kind):
    _assert_equal(world(2), kind, EP2, "all_to_all", ["random", "all to one expert"], {})


def _on_sorted_groups(*case):
    """torch 2.11 sorts the ranks of a group, so that the order of an expert group's ranks is not that of the shards."""
    from ndcompile import mesh

    keep, known = mesh.CAN_KEEP_RANK_ORDER, mesh._worlds.pop(mesh.default_group(), None)
    mesh.CAN_KEEP_RANK_ORDER = False
    # Names go on where they were: the store remembers those of before.
    mesh._worlds[mesh.default_group()] = mesh.World(names=known.names if known else itertools.count())
    try:
        comparisons = _compare(*case)
        assert any(m.axes["ep"].by_rank for m in mesh._worlds[mesh.default_group()].meshes.values())
        return comparisons
    finally:
        mesh.CAN_KEEP_RANK_ORDER = keep
        if known is not None:
            mesh._worlds[mesh.default_group()] = known


@pytest.mark.parametrize(("implementation", "options"), sampled_rows([("all_to_all", {}), ("capacity", EXACT)], 0))
def test_groups_in_the_order_of_ranks_find_the_same_experts(world, implementation, options):
    routes = ["random", "all to one expert"]
    for comparisons in world(4)(_on_sorted_groups, "gated", TP2_EP2, implementation, routes, options):
        assert {name: c.exceeding() for name, c in comparisons.items() if c.exceeding()} == {}


def _poisoned(*case):
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN
    try:
        assert torch.empty(3).isnan().all()
        return _compare(*case)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("implementation", "options"), [("all_to_all", {}), ("all_gather", {}), ("capacity", EXACT)])
def test_no_row_is_read_that_nobody_wrote(world, implementation, options):
    for comparisons in world(2)(_poisoned, "gated", EP2, implementation, [*ROUTES], options):
        assert not any(c.exceeding() for c in comparisons.values())


def _drop(capacity):
    model = _compiled("gated", EP2, expert_capacity=capacity)
    model(**_arguments(ROUTES["all to one expert"], ndcompile.data_rank(model)))
    return ndcompile.dropped_tokens(model)


def test_a_capacity_drops_what_exceeds_it_and_says_how_much(world):
    """8 tokens meet 2 experts each, all on one of 2 ranks: 16 pairs, of which 1.25 x 16 / 2 = 10 have room."""
    assert world(2)(_drop, 1.25) == [{"experts": 6}] * 2


def test_the_worst_case_capacity_drops_nothing(world):
    assert world(2)(_drop, math.inf) == [{"experts": 0}] * 2


def _fatal(pool, *call):
    """The errors of the ranks, which have left their groups: the pool must start anew."""
    try:
        return pool.errors(*call)
    finally:
        pool.stop()


def _bad_index(implementation, layout):
    model = _compiled("gated", layout, implementation)
    arguments = _arguments(ROUTES["random"], ndcompile.data_rank(model))
    if ndcompile.data_rank(model) == 1:
        arguments["index"][0, 3, 1] = EXPERTS
    model(**arguments)


@pytest.mark.parametrize("implementation", ["all_to_all", "all_gather"])
def test_a_routing_index_outside_the_experts_stops_all_ranks(world, implementation):
    errors = _fatal(world(2), _bad_index, implementation, EP2)
    kind, message = errors[1]
    assert kind == "RoutingError"
    assert "'experts': routing indices outside the 8 experts" in message
    assert errors[0][0] in ("RoutingError", "AgreementError")


def _ragged_in_fixed_shapes():
    model = _compiled("gated", EP2, "all_gather")
    model(**_arguments(RAGGED["another number of tokens on every rank"], ndcompile.data_rank(model)))


def test_ranks_with_other_numbers_of_tokens_are_refused_by_an_exchange_in_fixed_shapes(world):
    for kind, message in _fatal(world(2), _ragged_in_fixed_shapes):
        assert kind == "RoutingError"
        assert "have different numbers of tokens" in message
        assert "Use ep_implementation='all_to_all'" in message
