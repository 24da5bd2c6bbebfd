"""Families that are not Llama's on a GPU: logits against the CPU, and steps with and without CUDA graphs."""

import gc
import random

import pytest
import torch

from benchmarks.local_engine import LocalEngine
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from tests.kernels.references.problems import assert_no_worse_than
from tests.model.executors.float32_model import Float32Model, assert_same_before_ties
from tests.model.executors.paged import PagedDriver
from tests.tiny_checkpoint import write_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEVICE = "cuda"
VOCAB_SIZE = 1000
SIZES = {"vocab_size": VOCAB_SIZE, "bos_token_id": 998, "eos_token_id": 999, "num_hidden_layers": 3}
GEMMA = SIZES | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 40,
}
MODELS = {
    "gemma": GEMMA | {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"},
    "phi3": SIZES
    | {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 256,
        "head_dim": 64,
        "sliding_window": 40,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 24,
            "long_factor": [1.0 + 0.25 * i for i in range(24)],
        },
    },
    "smollm3": SIZES
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "hidden_size": 256,
        "head_dim": 64,
        "no_rope_layer_interval": 2,
    },
    "stablelm": SIZES
    | {
        "architectures": ["StableLmForCausalLM"],
        "hidden_size": 256,
        "head_dim": 64,
        "use_qkv_bias": True,
    },
    "gemma2": GEMMA | {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 2.0},
    "gemma3_text": GEMMA | {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 3},
    "olmo2": SIZES | {"architectures": ["Olmo2ForCausalLM"], "hidden_size": 256, "head_dim": 64},
    "ministral3": SIZES
    | {
        "architectures": ["Ministral3ForCausalLM"],
        "hidden_size": 256,
        "head_dim": 64,
        "rope_parameters": {
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    },
    "hunyuan_v1_dense": SIZES
    | {"architectures": ["HunYuanDenseV1ForCausalLM"], "hidden_size": 256, "head_dim": 64},
    "apertus": SIZES
    | {
        "architectures": ["ApertusForCausalLM"],
        "hidden_size": 256,
        "head_dim": 64,
        "hidden_act": "xielu",
    },
    "nemotron": SIZES
    | {
        "architectures": ["NemotronForCausalLM"],
        "hidden_size": 256,
        "head_dim": 64,
        "hidden_act": "relu2",
        "mlp_bias": True,
    },
    "exaone4": SIZES
    | {
        "architectures": ["Exaone4ForCausalLM"],
        "hidden_size": 256,
        "head_dim": 64,
        "sliding_window": 40,
        "sliding_window_pattern": 2,
    },
    "gpt2": SIZES
    | {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 256,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
    },
    "gpt_neox": SIZES
    | {"architectures": ["GPTNeoXForCausalLM"], "hidden_size": 256, "hidden_act": "gelu"},
    "gptj": SIZES
    | {
        "architectures": ["GPTJForCausalLM"],
        "n_embd": 256,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
        "rotary_dim": 32,
    },
    "qwen3_5_text": SIZES
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 256,
        "head_dim": 64,
        "full_attention_interval": 3,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "lfm2": SIZES
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": 256,
        "head_dim": 64,
        "full_attn_idxs": [1],
    },
    "granitemoehybrid": SIZES
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": 256,
        "head_dim": 64,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 512,
        "mamba_n_heads": 8,
        "mamba_d_state": 64,
        "attention_multiplier": 0.125,
    },
    "falcon_h1": SIZES
    | {
        "architectures": ["FalconH1ForCausalLM"],
        "hidden_size": 256,
        "head_dim": 64,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 4,
        "mamba_d_state": 64,
        "mamba_rms_norm": True,
    },
    "cohere2": SIZES
    | {"architectures": ["Cohere2ForCausalLM"], "hidden_size": 256, "sliding_window": 40},
    "falcon": SIZES | {"architectures": ["FalconForCausalLM"], "hidden_size": 256},
    "opt": SIZES
    | {
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 320,
        "num_attention_heads": 4,
        "ffn_dim": 640,
    },
}


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    yield write_tiny_checkpoint(tmp_path, model_type=request.param, **MODELS[request.param])
    gc.collect()
    torch.cuda.empty_cache()


def random_tokens(rng, count):
    return [rng.randrange(VOCAB_SIZE - 10) for _ in range(count)]


def drive(folder, device, dtype):
    """Run prompts, decode steps of one to twenty sequences, and a step with both; return all logits in float32."""
    config, rng = ModelConfig.from_folder(folder), random.Random(0)
    driver = PagedDriver(load_model(folder, config, dtype, device), num_blocks=2000)
    found = [driver.step({name: random_tokens(rng, 10 + 5 * name) for name in range(20)})]
    found += [driver.step({i: random_tokens(rng, 1) for i in range(n)}) for n in (1, 2, 4, 20)]
    found.append(driver.step({i: random_tokens(rng, 1 + 30 * (i % 2)) for i in range(5)}))
    return torch.cat([step[name].float().cpu() for step in found for name in sorted(step)])


def test_logits_are_as_exact_as_those_of_the_cpu(folder):
    truth = drive(folder, "cpu", torch.float32)

    on_gpu, on_cpu = (drive(folder, device, torch.bfloat16) for device in (DEVICE, "cpu"))

    assert_no_worse_than(on_gpu, truth, on_cpu)


def test_recorded_steps_give_the_tokens_of_steps_that_are_not(folder):
    rng = random.Random(1)
    sampling = SamplingParams(max_new_tokens=48, temperature=0.0)
    requests = [
        GenerateRequest(
            request_id=i, prompt_token_ids=random_tokens(rng, 1 + 37 * i), sampling=sampling
        )
        for i in range(6)
    ]

    def generate(**changes):
        config = EngineConfig(
            model_path=str(folder), model_id="tiny", device=DEVICE, dtype="float32",
            kv_cache_tokens=1 << 13, max_num_seqs=8, **changes,
        )  # fmt: skip
        answers = LocalEngine(config).generate(requests)
        return [[event.token_id for event in events] for events in answers]

    found, expected = generate(), generate(cuda_graphs=False, overlap=False)

    prompts = [request.prompt_token_ids for request in requests]
    assert_same_before_ties(Float32Model(folder), prompts, found, expected)
