import pytest

from server.engine.core.request import FinishReason
from tests.http.fakes import EOS_ID, say


@pytest.fixture
def answer(engine, tokenizer):
    """Makes the model answer with a text."""

    def set_script(text, reason=FinishReason.EOS):
        ids = tokenizer.encode(text)
        engine.script = say([*ids, EOS_ID] if reason is FinishReason.EOS else ids, reason)

    return set_script
