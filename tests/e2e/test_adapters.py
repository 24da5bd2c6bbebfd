"""A service with adapters, as the clients of OpenAI, Anthropic and Hugging Face use it, and its engine's restart."""

import copy
import json
import os
import signal

import httpx
import openai
import pytest
import torch
import transformers
from huggingface_hub import InferenceClient

from model.hub.resolve import BUNDLED, resolve
from server.cli.main import main
from tests.e2e.conftest import Service
from tests.model.adapters.peft_adapters import adapted

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "def fibonacci(n):"
ADMIN, USER = "the-key-of-the-admin", "the-key-of-the-others"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Adapters of the bundled model that change its text."""
    folder = tmp_path_factory.mktemp("adapters")
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        str(resolve(BUNDLED)), dtype=torch.float32
    )
    for seed, name in enumerate(("one", "two", "three")):
        adapted(copy.deepcopy(plain), folder / name, 8, seed=seed, std=0.1)
    keys = folder / "keys"
    keys.write_text(f"{ADMIN} manages_adapters=1\n{USER}\n")
    keys.chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def service(folder):
    service = Service(
        [
            "--device=cpu",
            "--frontends=2",
            f"--lora-modules=one={folder / 'one'}",
            f"--lora-folder={folder}",
            "--max-loras=2",
            f"--api-key-file={folder / 'keys'}",
        ]
    )
    service.wait_until_healthy()
    yield service
    service.stop()


@pytest.fixture
def client(service):
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=USER, max_retries=0)


def complete(client, model):
    return client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)


def post(service, path, body, key=ADMIN):
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{service.url}{path}", json=body, headers=headers, timeout=60)


def test_openai_s_client_chooses_an_adapter_by_the_model(client):
    texts = {it: complete(client, it).choices[0].text for it in ("bundled", "one", "two", "three")}

    assert len(set(texts.values())) == 4
    assert complete(client, "one").choices[0].text == texts["one"]
    assert complete(client, "one").model == "one"
    chat = [{"role": "user", "content": "hello"}]
    kinds = [
        client.chat.completions.create(model=it, messages=chat, max_tokens=8, temperature=0)
        for it in ("bundled", "two")
    ]
    assert kinds[0].choices[0].message.content != kinds[1].choices[0].message.content
    replies = [
        client.responses.create(model=it, input="hello", max_output_tokens=16, temperature=0)
        for it in ("bundled", "two")
    ]
    assert replies[0].output_text != replies[1].output_text
    with pytest.raises(openai.NotFoundError, match="`four` does not exist"):
        complete(client, "four")
    listed = {it.id: it.parent for it in client.models.list()}
    assert listed["bundled"] is None
    assert listed["one"] == "bundled"


def test_hugging_face_s_client_chooses_an_adapter_by_its_id(service, client):
    tgi = InferenceClient(service.url, token=USER)

    for name in ("one", "two"):
        text = tgi.text_generation(
            PROMPT, adapter_id=name, max_new_tokens=12, return_full_text=False
        )
        assert text == complete(client, name).choices[0].text
        streamed = tgi.text_generation(
            PROMPT, adapter_id=name, max_new_tokens=12, return_full_text=False, stream=True
        )
        assert "".join(streamed) == text


def test_messages_choose_an_adapter_too(service):
    body = {"max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "hello"}]}
    replies = [
        post(service, "/v1/messages", body | {"model": it}, USER).json()
        for it in ("bundled", "one")
    ]

    assert replies[1]["model"] == "one"
    assert replies[0]["content"] != replies[1]["content"]


def test_an_adapter_is_loaded_for_all_front_ends_and_survives_an_engine(service, client, folder):
    body = {"lora_name": "mine", "lora_path": str(folder / "three")}
    assert post(service, "/v1/load_lora_adapter", body, USER).status_code == 403
    assert post(service, "/v1/load_lora_adapter", body).status_code == 200
    expected = complete(client, "three").choices[0].text
    for _ in range(6):  # each is a connection of its own
        assert complete(client, "mine").choices[0].text == expected

    os.kill(service.engine_pid(), signal.SIGKILL)
    assert complete(client, "mine").choices[0].text == expected

    assert post(service, "/v1/unload_lora_adapter", {"lora_name": "mine"}).status_code == 200
    with pytest.raises(openai.NotFoundError):
        complete(client, "mine")


def test_a_receipt_is_computed_again_with_the_adapter_of_its_digest(
    service, folder, tmp_path, capsys
):
    body = {"prompt": PROMPT, "max_tokens": 8, "receipt": True, "deterministic": True}
    replies = [
        post(service, "/v1/completions", body | {"model": it}).json() for it in ("bundled", "two")
    ]
    file = tmp_path / "receipts"
    file.write_text("".join(json.dumps(it) for it in replies))

    def replay(*flags):
        status = 0
        try:
            main(["replay", str(file), "--device=cpu", "--log-level=error", *flags])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    status, out, err = replay(f"--lora-modules=other={folder / 'two'}")
    assert (status, out.splitlines()[-1]) == (0, "2 receipts, 2 outputs: all equal")
    assert "other conditions" not in err

    for flags in ((), (f"--lora-modules=two={folder / 'one'}",)):
        status, out, _ = replay(*flags)
        assert status == 1
        digest = replies[1]["receipt"]["conditions"]["adapter"]
        assert f"cannot be computed: adapter {digest} is not here" in out
        assert "2 outputs: 1 cannot be computed" in out

    status, out, _ = replay(f"--url={service.url}", f"--api-key={USER}")
    assert status == 1
    assert f"cannot be asked for adapter {digest} by its digest" in out


def test_metrics_name_the_adapters(service, client):
    complete(client, "one")
    headers = {"authorization": f"Bearer {USER}"}
    text = httpx.get(f"{service.url}/metrics", headers=headers).text

    assert 'vllm:lora_requests_info{engine="0",max_lora="2"' in text
    assert "tessera_adapter_loads_total" in text


def test_a_broken_adapter_ends_the_start(folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    service = Service(["--device=cpu", f"--lora-modules=bad={tmp_path}"])

    assert service.process.wait(60) == 1
    assert "--lora-modules bad: " in service.log()
    assert "peft_type = None is not supported" in service.log()
