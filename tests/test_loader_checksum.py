"""Checksums that add up over slices, and what they find."""

from __future__ import annotations

import threading

import pytest
import torch
from loader_support import chunked, coordinates, on_meta, rewrite, targets_of, tiny_model
from torch.distributed.tensor import Replicate, Shard

from ndcompile.loader import CheckpointError, Peers, checksum, load_into
from ndcompile.loader.checksum import MODULUS
from ndcompile.parameters.layout import boxes, local_shape, narrow

MESH = (2, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(1), Shard(1)), (Shard(2), Shard(0))], ids=str)
def test_the_sums_of_all_slices_add_up_to_the_tensors(dtype, placements, monkeypatch):
    monkeypatch.setattr(checksum, "_CHUNK", 20)
    value = torch.randint(-100, 100, (5, 7, 3)).to(dtype)
    total = 0
    for coordinate in coordinates(MESH):
        local = chunked(value, placements, MESH, coordinate)
        assert local.shape == local_shape(value.shape, placements, MESH, coordinate)
        for box in boxes(value.shape, placements, MESH, coordinate):
            total += checksum.checksum(narrow(local, box.local_offset, box.size), box.global_offset)
    assert total % MODULUS == checksum.checksum(value, (0, 0, 0)) != 0


def test_a_scalar_has_a_checksum():
    assert checksum.checksum(torch.tensor(2.5), ()) != checksum.checksum(torch.tensor(-2.5), ())


@pytest.mark.parametrize("change", ["bit", "swap", "rows", "sign of zero"])
def test_a_changed_tensor_has_another_checksum(change):
    value = torch.randn(16, 16)
    value[3, 3] = 0.0
    other = value.clone()
    if change == "bit":
        other.view(torch.int32)[5, 6] ^= 1
    elif change == "swap":
        other[0, 1], other[2, 5] = value[2, 5], value[0, 1]
    elif change == "rows":
        other[[4, 9]] = value[[9, 4]]
    else:
        other[3, 3] = -0.0
    assert checksum.checksum(value, (0, 0)) != checksum.checksum(other, (0, 0))


class Ranks:
    """Exchanges between ranks that are threads."""

    def __init__(self, world):
        self.world, self.values = world, {}
        self.barrier = threading.Barrier(world, timeout=60)

    def peers(self, rank):
        def exchange(name, value):
            self.values[name, rank] = value
            self.barrier.wait()
            return [self.values[name, other] for other in range(self.world)]

        return Peers(exchange, rank, self.world)


def load_on_all(model, folder, damage=lambda rank, targets: None):
    """Load on every rank of MESH; `damage` may change what a rank holds between the load and the comparison."""
    ranks, results = Ranks(6), {}

    def run(rank, coordinate):
        meta = on_meta(model)
        targets = targets_of(meta, MESH, coordinate)
        peers = ranks.peers(rank)
        loaded = load_into(meta, targets, folder)
        assert loaded.verified == 0
        damage(rank, targets)
        try:
            results[rank] = checksum.verify_checksums(meta, *matched(meta, targets, folder), peers)
        except CheckpointError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(coordinates(MESH))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(6)]


def matched(meta, targets, folder):
    from ndcompile.loader.catalog import read_catalog
    from ndcompile.loader.load import match

    catalog = read_catalog(folder)
    return match(meta, targets, catalog, folder)[0], catalog


@pytest.fixture
def mixtral(tmp_path):
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    return model


def test_ranks_that_hold_the_checkpoint_agree(mixtral, tmp_path):
    assert load_on_all(mixtral, tmp_path) == [len(mixtral.state_dict())] * 6


def test_one_wrong_bit_names_the_tensor_and_the_rank_on_every_rank(mixtral, tmp_path):
    def damage(rank, targets):
        if rank == 4:
            (experts,) = [target for target in targets if target.fqn == "model.layers.1.mlp.experts.gate_up_proj"]
            experts.tensor.view(torch.int32).view(-1)[17] ^= 1 << 9

    for message in load_on_all(mixtral, tmp_path, damage):
        assert "checksums of 1 of 21 tensors" in message
        assert "model.layers.1.mlp.experts.gate_up_proj: the memory of ranks [4] is not what" in message


def test_a_copy_that_is_wrong_on_one_rank_only_is_found(mixtral, tmp_path):
    # norm.weight is sharded over the first axis and replicated over the second.
    def damage(rank, targets):
        if rank == 5:
            (norm,) = [target for target in targets if target.fqn == "model.norm.weight"]
            assert norm.placements == (Shard(0), Replicate())
            norm.tensor[0] += 1

    assert "model.norm.weight: the memory of ranks [5]" in load_on_all(mixtral, tmp_path, damage)[0]


def test_a_single_process_verifies_while_it_loads(mixtral, tmp_path):
    meta = on_meta(mixtral)
    report = load_into(meta, targets_of(meta), tmp_path, verify=Peers(lambda name, value: [value]))
    assert report.verified == len(mixtral.state_dict())


def test_a_model_of_another_dtype_is_compared_after_the_cast(mixtral, tmp_path):
    meta = on_meta(mixtral, torch.bfloat16)
    report = load_into(meta, targets_of(meta), tmp_path, verify=Peers(lambda name, value: [value]))
    assert report.verified == len(mixtral.state_dict())


def test_missing_tensors_are_not_compared(mixtral, tmp_path):
    rewrite(tmp_path, lambda tensors: {key: value for key, value in tensors.items() if key != "model.norm.weight"})
    meta = on_meta(mixtral)
    report = load_into(meta, targets_of(meta), tmp_path, strict=False, verify=Peers(lambda name, value: [value]))
    assert report.verified == len(mixtral.state_dict()) - 1
