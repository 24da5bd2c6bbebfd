"""lm_eval's `local-completions` scores the bundled model like transformers.

`pip install -e '.[clients]'` installs it.
"""

from pathlib import Path

import pytest
import torch

import model
from tests.e2e.conftest import Service

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.filterwarnings("default")]

CHECKPOINT = str(Path(model.__file__).parent / "bundled")
SOURCE = (Path(model.__file__).parent / "text" / "stop.py").read_text()
# Lines of a source file, each after its ten predecessors.
LINES = [line + "\n" for line in SOURCE.split("\n")]
PAIRS = [("".join(LINES[i - 10 : i]), LINES[i]) for i in range(12, 60, 3) if LINES[i].strip()]


@pytest.fixture(scope="module")
def exact_service():
    """The bundled model without quantization, whose figures are those of float32."""
    service = Service(["--device=cpu", "--quantization=none"])
    service.wait_until_healthy()
    yield service
    service.stop()


@pytest.fixture
def client(exact_service):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    models = pytest.importorskip("lm_eval.models.openai_completions")
    return models.LocalCompletionsAPI(
        model="bundled", base_url=f"{exact_service.url}/v1/completions", tokenizer=CHECKPOINT,
        tokenizer_backend="huggingface", max_length=512, batch_size=4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


def score(reference, ids, start):
    """Return the log-likelihood of the tokens from `start`, and whether each is the most likely one."""
    with torch.inference_mode():
        logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    targets = torch.tensor(ids[start:])
    rows = logprobs[start - 1 : -1]
    likelihood = rows[torch.arange(len(targets)), targets].sum().item()
    return likelihood, bool((rows.argmax(-1) == targets).all())


def requests(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, values, i) for i, values in enumerate(arguments)]


def test_log_likelihoods_are_those_of_transformers(client, reference):
    found = client.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)

    assert len(found) == len(PAIRS)
    for (context, line), (likelihood, greedy) in zip(PAIRS, found, strict=True):
        before, after = client._encode_pair(context, line)
        expected, expected_greedy = score(reference, before + after, len(before))
        assert likelihood == pytest.approx(expected, abs=1e-3)
        assert greedy == expected_greedy


def test_rolling_log_likelihoods_are_those_of_transformers(client, reference):
    texts = [(SOURCE[:600],), (SOURCE[600:1000],)]

    found = client.loglikelihood_rolling(
        requests("loglikelihood_rolling", texts), disable_tqdm=True
    )

    for (text,), likelihood in zip(texts, found, strict=True):
        ids = [client.prefix_token_id, *client.tok_encode(text)]
        assert len(ids) <= client.max_length
        assert likelihood == pytest.approx(score(reference, ids, 1)[0], abs=1e-3)


def test_generations_end_before_the_stop_string(client):
    options = {"until": ["\n\n"], "max_gen_toks": 32, "temperature": 0}
    prompts = [("def fibonacci(n):\n", dict(options)), ("class Stack:\n", dict(options))]

    texts = client.generate_until(requests("generate_until", prompts), disable_tqdm=True)

    assert all(text and "\n\n" not in text for text in texts)
