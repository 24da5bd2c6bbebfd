"""The chat template of a service, and the tokens that end its generations."""

from model.text.tokenizer import Tokenizer
from model.text.tokens.end_token import stated_ends
from server.http.config import HTTPConfig
from server.http.text.chat import load_chat_template, with_end_tokens
from tests.model.text import chat_cases


def test_the_end_tokens_of_a_service_are_those_of_all_files_and_the_template(tmp_path, caplog):
    folder = chat_cases.save(tmp_path, "byte_level", chat_template=chat_cases.CHATML)
    tokenizer = Tokenizer.from_folder(folder)
    stated = stated_ends({"config.json": (1,)})
    config = HTTPConfig(model_id="m", eos_token_ids=(1,), end_tokens=stated, vocab_size=1000)

    with caplog.at_level("INFO"):
        template = load_chat_template(folder, tokenizer, config)
        found = with_end_tokens(config, tokenizer, template)

    ends = ["<|endoftext|>", "<|im_end|>"]
    assert found.eos_token_ids == (1, *map(tokenizer.token_id, ends))
    assert [it.id for it in found.end_tokens] == list(found.eos_token_ids)
    assert "<|im_end|> (" in caplog.text
