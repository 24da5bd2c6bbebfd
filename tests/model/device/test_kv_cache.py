"""The memory of the KV cache: blocks of keys and values, and slots of fixed size."""

import torch

from model.device.kv_cache import KVCache
from model.network.state import Fixed, Paged, StateSpec

ATTENTION = Paged(2, 16, "bfloat16")
WIDE = Paged(1, 64, "bfloat16")
RECURRENT = Fixed(((3, 5), (7,)), ("float32", "int64"))


def test_a_cache_of_attention_reports_its_bytes():
    cache = KVCache(StateSpec("bfloat16", (ATTENTION,) * 3), 10, 4, "cpu", num_slots=5)

    assert cache.layers[2].shape == (2, 10, 4, 2, 16)
    assert cache.spec.token_bytes == 384
    assert cache.num_bytes == sum(layer.nbytes for layer in cache.layers)
    assert cache.fixed == ((), (), ())
    assert cache.num_slots == 0


def test_each_layer_has_the_memory_that_its_mixer_keeps():
    spec = StateSpec("bfloat16", (RECURRENT, ATTENTION, WIDE, RECURRENT))
    cache = KVCache(spec, 10, 4, "cpu", num_slots=5)

    shapes = [(0,), (2, 10, 4, 2, 16), (2, 10, 4, 1, 64), (0,)]
    assert [layer.shape for layer in cache.layers] == shapes
    assert [len(arrays) for arrays in cache.fixed] == [2, 0, 0, 2]
    for matrix, vector in (cache.fixed[0], cache.fixed[3]):
        assert (matrix.shape, matrix.dtype) == ((5, 3, 5), torch.float32)
        assert (vector.shape, vector.dtype) == ((5, 7), torch.int64)
        assert matrix[0].is_contiguous()
    assert cache.num_bytes == sum(layer.nbytes for layer in cache.layers) + 5 * spec.slot_bytes


def test_the_arrays_of_slots_do_not_overlap():
    cache = KVCache(StateSpec("float32", (RECURRENT, RECURRENT)), 1, 4, "cpu", num_slots=3)
    arrays = [array for layer in cache.fixed for array in layer]

    for number, array in enumerate(arrays):
        for slot in range(3):
            array[slot] = 10 * number + slot

    for number, array in enumerate(arrays):
        for slot in range(3):
            assert (array[slot] == 10 * number + slot).all()


def test_a_network_without_attention_has_slots_alone():
    cache = KVCache(StateSpec("float32", (RECURRENT,)), 10, 4, "cpu", num_slots=2)

    assert cache.num_bytes == 2 * RECURRENT.offsets[-1]
    assert cache.device == torch.device("cpu")
