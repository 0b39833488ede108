"""Key-value caches as graph inputs."""

import torch
from transformers.cache_utils import DynamicCache

from ndcompile.runtime.caches import MARK, CacheShards, read_cache


def _cache(device, length):
    cache = DynamicCache()
    cache.update(torch.zeros(2, 4, length, 8), torch.zeros(2, 4, length, 8), 0)
    cache.layers[0].device = torch.device(device)
    setattr(cache, MARK, CacheShards())
    return cache


def test_ranks_with_devices_of_their_own_have_the_same_signature():
    assert read_cache(_cache("cuda:0", 5), "cache").key() == read_cache(_cache("cuda:1", 5), "cache").key()


def test_a_signature_does_not_depend_on_the_length():
    one, two = read_cache(_cache("cpu", 5), "cache"), read_cache(_cache("cpu", 9), "cache")
    assert one.key() == two.key()
    assert one.shapes(2) == two.shapes(2) == ((("batch", 4, "past0", 8)), ("batch", 4, "past0", 8))


def test_layers_of_two_lengths_have_two_symbols():
    cache = _cache("cpu", 5)
    cache.update(torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8), 1)
    state = read_cache(cache, "cache")
    assert state.lengths == (5, 3)
    assert state.total == 5


def test_a_capture_in_global_shapes_reads_a_cache_of_all_heads():
    cache = _cache("cpu", 5)
    local, whole = {"[0]['keys']": torch.zeros(2, 4, 5, 8)}, {"[0]['keys']": torch.zeros(2, 12, 5, 8)}
    setattr(cache, MARK, CacheShards.between(frozenset(local), local, whole))
    state = read_cache(cache, "cache").whole()
    shapes = {path: leaf.shape for path, leaf in zip(state.paths, state.leaves, strict=True) if hasattr(leaf, "shape")}
    assert shapes == {"[0]['keys']": (2, 12, 5, 8), "[0]['values']": (2, 4, 5, 8)}
