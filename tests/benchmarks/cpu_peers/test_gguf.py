import json
import struct

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import save_file

from benchmarks.cpu_peers import gguf
from model.checkpoint.config import ModelConfig
from model.text.tokenizer import Tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
    "tie_word_embeddings": True, "eos_token_id": 7, "hidden_act": "silu", "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
SCALARS = {4: "<I", 5: "<i", 6: "<f", 7: "<?"}
STRING, ARRAY = 8, 9


class Reader:
    """A plain GGUF reader after the format's description."""

    def __init__(self, path):
        self.data, self.at = path.read_bytes(), 4
        assert self.data[:4] == b"GGUF"
        version, tensors, keys = self.take("<IQQ")
        assert version == 3
        self.keys = {self.string(): self.value(*self.take("<I")) for _ in range(keys)}
        infos = [self.info() for _ in range(tensors)]
        start = -(-self.at // 32) * 32
        self.tensors = {}
        for name, shape, kind, offset in infos:
            dtype = {0: np.float32, 30: np.int16}[kind]
            assert offset % 32 == 0
            values = np.frombuffer(self.data, dtype, int(np.prod(shape)), start + offset)
            self.tensors[name] = torch.from_numpy(values.reshape(shape).copy())
            if kind == 30:
                self.tensors[name] = self.tensors[name].view(torch.bfloat16)

    def take(self, layout):
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self):
        (length,) = self.take("<Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, length = self.take("<IQ")
            return [self.value(inner) for _ in range(length)]
        return self.take(SCALARS[kind])[0]

    def info(self):
        name, (dimensions,) = self.string(), self.take("<I")
        shape = self.take(f"<{dimensions}Q")[::-1]
        return name, shape, *self.take("<IQ")


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "tiny"
    model.mkdir()
    return model


def configure(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_folder(folder)


@pytest.mark.parametrize("config", [CONFIG, QWEN, CONFIG | {"tie_word_embeddings": False}])
def test_a_file_holds_every_weight_of_the_model(folder, tmp_path, config):
    expected = configure(folder, config).network
    gguf.write(tmp_path / "m.gguf", folder, random=True)

    file = Reader(tmp_path / "m.gguf")

    assert sum(tensor.numel() for tensor in file.tensors.values()) == expected.num_parameters
    assert ("output.weight" in file.tensors) == (not expected.tied)
    assert ("blk.0.attn_q_norm.weight" in file.tensors) == (config == QWEN)
    assert file.tensors["blk.0.ffn_down.weight"].shape == (32, 64)


def test_the_header_states_the_models_sizes(folder, tmp_path):
    configure(folder, CONFIG)
    gguf.write(tmp_path / "m.gguf", folder, random=True)

    keys = Reader(tmp_path / "m.gguf").keys

    assert keys["general.architecture"] == "llama"
    assert keys["llama.block_count"] == 1
    assert keys["llama.attention.head_count_kv"] == 1
    assert keys["llama.rope.freq_base"] == 5000.0
    assert keys["tokenizer.ggml.eos_token_id"] == 7


def test_random_weights_have_the_models_deviation_and_norms_are_one(folder, tmp_path):
    configure(folder, CONFIG)
    gguf.write(tmp_path / "m.gguf", folder, random=True)

    tensors = Reader(tmp_path / "m.gguf").tensors

    assert tensors["token_embd.weight"].float().std() == pytest.approx(0.02, rel=0.05)
    assert (tensors["output_norm.weight"] == 1).all()


def test_rows_of_queries_and_keys_are_reordered_to_neighbouring_pairs(folder, tmp_path):
    config = configure(folder, CONFIG)
    stored = {
        f"{tensor.source}.weight": torch.randn(tensor.shape).bfloat16()
        for tensor in gguf.tensors(config)
    }
    save_file(stored, folder / "model.safetensors")
    gguf.write(tmp_path / "m.gguf", folder, random=False)

    tensors = Reader(tmp_path / "m.gguf").tensors

    queries = stored["model.layers.0.self_attn.q_proj.weight"]
    for head in (0, 16):
        for i in range(8):
            written = tensors["blk.0.attn_q.weight"]
            assert torch.equal(written[head + 2 * i], queries[head + i])
            assert torch.equal(written[head + 2 * i + 1], queries[head + 8 + i])
    values = stored["model.layers.0.self_attn.v_proj.weight"]
    assert torch.equal(tensors["blk.0.attn_v.weight"], values)


@pytest.mark.parametrize("size", [100, 256, 300])
def test_a_vocabulary_has_distinct_words_and_every_byte(size):
    words = gguf.vocabulary(size)

    assert len(words) == len(set(words)) == size
    assert words[ord("a")] == "a"


def test_a_model_with_biases_is_refused(folder):
    config = configure(folder, CONFIG | {"attention_bias": True})

    with pytest.raises(ValueError, match="biases"):
        gguf.tensors(config)


def test_the_gguf_package_reads_a_file(folder, tmp_path):
    config = configure(folder, CONFIG)
    gguf.write(tmp_path / "m.gguf", folder, random=True)

    assert len(GGUFReader(tmp_path / "m.gguf").tensors) == len(gguf.tensors(config))


@pytest.mark.parametrize("config", [CONFIG, QWEN])
def test_tessera_reads_a_file(folder, tmp_path, config):
    expected = configure(folder, config)
    gguf.write(tmp_path / "m.gguf", folder, random=True)

    found = ModelConfig.from_folder(tmp_path / "m.gguf")
    tokenizer = Tokenizer.from_folder(tmp_path / "m.gguf", in_process=True)

    assert found.network.num_parameters == expected.network.num_parameters
    assert found.architecture == expected.architecture
    assert tokenizer.encode("ab") == [256]
