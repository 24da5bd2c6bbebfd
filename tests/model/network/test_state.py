"""What mixers keep on the device, and the bytes of it."""

from model.network.spec import Attention, Dense, Layer, Network
from model.network.state import Fixed, Paged, StateSpec


def network(*mixers):
    return Network(100, 16, tuple(Layer(mixer, Dense(32)) for mixer in mixers))


def test_the_bytes_of_a_token_are_those_of_all_layers_whose_heads_may_differ():
    state = network(Attention(4, 2, 16, 1.0), Attention(4, 1, 32, 1.0)).state("bfloat16")

    assert state.layers == (Paged(2, 16, "bfloat16"), Paged(1, 32, "bfloat16"))
    assert state.token_bytes == 2 * (2 * 16 + 1 * 32) * 2
    assert state.slot_bytes == 0


def test_a_float8_cache_has_a_float32_scale_for_each_key_and_value_of_a_head():
    state = network(Attention(4, 2, 16, 1.0)).state("float8_e4m3fn")

    assert state.layers[0].scale_dtype == "float32"
    assert state.token_bytes == 2 * 2 * (16 + 4)


def test_the_arrays_of_a_slot_are_aligned():
    fixed = Fixed(((3, 5), (7,)), ("float32", "int8"))

    assert fixed.num_bytes == (60, 7)
    assert fixed.offsets == (0, 128, 256)
    state = StateSpec("float32", (fixed, Paged(1, 8, "float32"), fixed))
    assert state.slot_bytes == 512
    assert state.token_bytes == 64
