"""Random layouts and converters: what is planned is what slicing gives, and the proof tells right plans from wrong."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from loader_support import chunked, on_meta, targets_of, tiny_model
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Transpose,
    WeightConverter,
)

from ndcompile.loader import Target
from ndcompile.loader.assignment import Assignment, Source
from ndcompile.loader.catalog import read_catalog
from ndcompile.loader.conversion import convert_group, trace_group
from ndcompile.loader.coverage import Rectangle, Strided, count_uses, find_fault
from ndcompile.loader.keys import ConversionGroup
from ndcompile.loader.layouts import MeshShape, copies, storage_axes
from ndcompile.loader.load import match
from ndcompile.loader.proof import prove, rank_boxes
from ndcompile.loader.reading import execute, plan_reads
from ndcompile.loader.symbolic import symbol_of
from ndcompile.parameters.layout import local_shape
from ndcompile.private.distributed import StridedShard

CHECKPOINTS, LAYOUTS = 210, 5

# Operations on (source patterns, target patterns); sizes are chosen so that each can take its tensors.
CONVERTERS = {
    "transpose": (["w.weight"], ["w.made"], [Transpose(0, 1)], 1),
    "transpose, then halve": (["w.weight"], ["a.made", "b.made"], [Transpose(0, 1), Chunk(0)], 1),
    "halve": (["w.weight"], ["a.made", "b.made"], [Chunk(1)], 1),
    "thirds": (["w.weight"], ["a.made", "b.made", "c.made"], [Chunk(0)], 1),
    "concatenate": (["a.weight", "b.weight"], ["w.made"], [Concatenate(1)], 1),
    "experts": (["experts.*.weight"], ["experts.made"], [MergeModulelist(0)], 3),
    "experts, second dim": (["experts.*.weight"], ["experts.made"], [MergeModulelist(1)], 2),
    "experts, gate and up": (
        ["experts.*.gate.weight", "experts.*.up.weight"],
        ["experts.made"],
        [MergeModulelist(0), Concatenate(1)],
        4,
    ),
    "interleave": (["w.weight"], ["w.made"], [Interleave(0)], 1),
    "interleave columns back": (["w.weight"], ["w.made"], [Interleave(1, inverse=True)], 1),
    "rope": (["w.weight"], ["w.made"], [PermuteForRope()], 1),
    "plain": (["w.weight"], ["w.made"], [Concatenate(0)], 1),
}
ROWS = {"rope": [8, 16, 24], "interleave": [2, 4, 10], "thirds": [3, 6, 9]}


@pytest.fixture(scope="module")
def model():
    """Converters read the number of heads from its config: 4."""
    return on_meta(tiny_model("llama"))


def checkpoint(folder, name, source):
    """A checkpoint with random values and the group of keys that the converter `name` takes."""
    patterns, targets, operations, count = CONVERTERS[name]
    shape = (source.choice(ROWS.get(name, [1, 2, 3, 5, 7])), source.choice([2, 4, 6, 10]))
    keys = [
        (pattern.replace("*", str(n)), pattern) for pattern in patterns for n in range(count if "*" in pattern else 1)
    ]
    tensors = {key: torch.randint(-(2**31), 2**31, shape, dtype=torch.int64) for key, _ in keys}
    tensors["between"] = torch.zeros(3, dtype=torch.uint8)  # so that offsets are odd
    save_file(tensors, folder / "model.safetensors")
    converter = WeightConverter(list(patterns), list(targets), list(operations))
    return ConversionGroup(targets[0], converter, tuple(sorted(keys))), tensors


def random_mesh(source):
    return tuple(source.choice([1, 2, 3, 4]) for _ in range(source.choice([1, 2, 3, 4])))


def random_placements(shape, mesh_shape, source):
    placements, untouched = [], list(shape)
    for _ in mesh_shape:
        dim = source.randrange(len(shape))
        kind = source.choice(["shard", "shard", "replicate", "packed"])
        if kind == "packed" and untouched[dim] and untouched[dim] % 2 == 0:
            placements.append(StridedShard(dim, split_factor=2))
        else:
            placements.append(Replicate() if kind == "replicate" else Shard(dim))
        if placements[-1] != Replicate():
            untouched[dim] = 0
    return tuple(placements)


def planned(folder, model, source, name):
    """Random targets of what converter `name` makes, with their pieces and their whole values."""
    group, tensors = checkpoint(folder, name, source)
    catalog = read_catalog(folder)
    values = convert_group(group, model, tensors.__getitem__)
    for made, symbolic in trace_group(group, model, catalog, torch.int64).items():
        assert symbolic.shape == values[made].shape
        yield made, symbolic, values[made], tuple(key for key, _ in group.sources), catalog


def target_at(value, placements, mesh_shape, coordinate):
    local = torch.full(local_shape(value.shape, placements, mesh_shape, coordinate), -7, dtype=torch.int64)
    return Target("made", local, value.shape, placements, mesh_shape, coordinate)


def test_planned_slices_of_random_layouts_equal_slices_of_the_converted_tensor(tmp_path, model):
    source = random.Random(0)
    cases = 0
    for number in range(CHECKPOINTS):
        name = list(CONVERTERS)[number % len(CONVERTERS)]
        for _, symbolic, value, _, _ in planned(tmp_path, model, source, name):
            for _ in range(LAYOUTS):
                mesh_shape = random_mesh(source)
                placements = random_placements(value.shape, mesh_shape, source)
                coordinate = tuple(source.randrange(size) for size in mesh_shape)
                target = target_at(value, placements, mesh_shape, coordinate)
                execute(plan_reads(symbolic.pieces, target.rectangles()))
                assert torch.equal(target.tensor, chunked(value, placements, mesh_shape, coordinate)), (
                    name,
                    placements,
                )
                cases += 1
    assert cases >= 1000


def test_the_proof_accepts_random_plans_and_rejects_them_with_one_box_moved_by_one_element(tmp_path, model):
    source = random.Random(1)
    cases = 0
    for number in range(CHECKPOINTS):
        made = list(planned(tmp_path, model, source, list(CONVERTERS)[number % len(CONVERTERS)]))
        for _ in range(LAYOUTS):
            mesh = MeshShape(tuple("abcd"), random_mesh(source))
            sources, catalog = [], made[0][4]
            for _, symbolic, value, keys, _ in made:
                placements = random_placements(value.shape, mesh.sizes, source)
                target = target_at(value, placements, mesh.sizes, (0,) * len(mesh.sizes))
                sources.append(Source(target, keys, symbolic.pieces))
                boxes = rank_boxes(value.shape, placements, mesh)
                times = copies(placements, mesh.sizes)
                assert find_fault(value.shape, boxes, times) is None
                assert find_fault(value.shape, moved(boxes, source), times) is not None
                cases += 1
            proof = prove(Assignment(tuple(sources), (), (), ()), catalog, mesh)
            assert proof.faults == ()
            assert proof.unused == ("between",)
            wrong = source.randrange(len(sources))
            for shift in (shift_start, shift_offset):
                pieces = list(sources[wrong].pieces)
                at = source.randrange(len(pieces))
                pieces[at] = shift(pieces[at])
                damaged = [*sources]
                damaged[wrong] = dataclasses.replace(sources[wrong], pieces=pieces)
                assert prove(Assignment(tuple(damaged), (), (), ()), catalog, mesh).faults
    assert cases >= 1000


def moved(boxes, source):
    at = source.choice([n for n, box in enumerate(boxes) if 0 not in box.size])
    dim, step = source.randrange(len(boxes[at].size)), source.choice([-1, 1])
    start = tuple(first + step * (d == dim) for d, first in enumerate(boxes[at].start))
    return [*boxes[:at], Rectangle(start, boxes[at].size), *boxes[at + 1 :]]


def shift_start(piece):
    return piece._replace(start=(piece.start[0] + 1, *piece.start[1:]))


def shift_offset(piece):
    return piece._replace(offset=piece.offset + 1)


def test_a_fault_says_which_elements_are_covered_how_often():
    boxes = [Rectangle((0, 0), (2, 4)), Rectangle((2, 0), (2, 3))]
    assert find_fault((4, 4), boxes) == "[2:4, 3:4] is covered 0 times, not 1"
    assert find_fault((4, 4), [*boxes, Rectangle((1, 3), (3, 1))]) == "[1:2, 3:4] is covered 2 times, not 1"
    assert find_fault((4, 4), [Rectangle((1, 0), (4, 4))]) == "[1:5, 0:4] lies outside of (4, 4)"


def test_uses_of_a_block_are_counted_element_by_element():
    halves = [Strided((3,), 0, (2,)), Strided((3,), 1, (2,))]
    assert count_uses(6, halves) == {1: 6}
    assert count_uses(8, halves) == {0: 2, 1: 6}
    assert count_uses(6, [*halves, Strided((2,), 4, (1,))]) == {1: 4, 2: 2}
    with pytest.raises(ValueError, match="elements 1 to 6 of 6 are asked for"):
        count_uses(6, [Strided((2, 3), 1, (3, 1))])


def test_a_key_of_which_a_part_is_dropped_is_told(tmp_path, model):
    save_file({"w.weight": torch.zeros(5, 2)}, tmp_path / "model.safetensors")
    catalog = read_catalog(tmp_path)
    rows = symbol_of(catalog["w.weight"])[:3]
    target = target_at(torch.empty(3, 2), (Replicate(),), (1,), (0,))
    proof = prove(
        Assignment((Source(target, ("w.weight",), rows.pieces),), (), (), ()), catalog, MeshShape(("a",), (1,))
    )
    assert proof.faults == ()
    assert proof.dropped == ("w.weight in model.safetensors (4 of 10 elements)",)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "deepseek_v3", "gpt_oss", "ernie4_5_moe", "qwen2"])
@pytest.mark.parametrize("mesh_shape", [(4, 1), (2, 3), (5, 2)], ids=str)
def test_the_plans_of_real_checkpoints_are_proven(tmp_path, model_type, mesh_shape):
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    catalog = read_catalog(tmp_path)
    meta = on_meta(model)
    assignment, _ = match(meta, targets_of(meta, mesh_shape, (0, 0)), catalog, tmp_path)
    proof = prove(assignment, catalog, MeshShape(("a", "b"), mesh_shape))
    assert proof.faults == proof.unused == proof.dropped == proof.whole == ()
    assert proof.bytes_used == sum(entry.nbytes for entry in catalog.values())


def test_ranks_are_numbered_as_init_mesh_numbers_them():
    mesh = storage_axes({"dp_replicate": 2, "fsdp": 4, "tp": 2, "ep": 4})
    assert (mesh.names, mesh.sizes) == (("dp_replicate", "tp", "ep_rest", "efsdp"), (2, 2, 2, 2))
    ranks = torch.arange(16).reshape(2, 2, 2, 2).permute(0, 3, 2, 1)  # (dp_replicate, efsdp, ep_rest, tp) to storage
    assert [ranks[mesh.coordinate(rank)] for rank in range(16)] == list(range(16))
