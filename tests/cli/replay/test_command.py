import json

import msgspec
from msgspec import UNSET

from server.cli.replay import command
from server.cli.replay.work import tasks_of, with_adapters
from server.cli.settings import Settings
from server.engine.core.request import AdapterRef
from tests.receipts.make import CONDITIONS, make_receipt, plain_receipt


def test_a_file_without_a_receipt_is_one_error_and_status_2(tessera, tmp_path):
    for text in ("", "{}", "x", '{"receipt": {}}', '{"receipt": "\\u001b[2J"}'):
        (tmp_path / "file").write_text(text)

        status, out, err = tessera("replay", str(tmp_path / "file"))

        assert (status, out) == (2, "")
        assert err.startswith("tessera replay: error: ")
        assert err.count("\n") == 1


def test_a_name_in_a_receipt_cannot_change_the_terminal(tessera, tmp_path):
    receipt = plain_receipt()
    receipt["outputs"][0]["finish_reason"] = "\x1b[2J"
    (tmp_path / "file").write_text(json.dumps(receipt))

    assert "\x1b" not in tessera("replay", str(tmp_path / "file"))[2]


def test_at_least_one_file_is_needed_and_it_is_no_model(tessera):
    status, _, err = tessera("replay")
    assert (status, "FILE" in err) == (2, True)

    status, _, err = tessera("replay", "missing.json", "--max-num-seqs", "2")
    assert (status, "missing.json cannot be read: No such file" in err) == (2, True)


def test_an_engine_has_the_formats_of_the_receipt_unless_flags_give_others():
    def changes(*given, **fields):
        return command._changes(msgspec.structs.replace(CONDITIONS, **fields), set(given))

    assert changes() == {"model": "bundled", "quantization": "int8"}
    assert changes("model", "quantization") == {}
    assert changes(quantization="none", dtype="bfloat16", kv_cache_dtype="float8_e4m3fn") == {
        "model": "bundled",
        "quantization": "none",
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8",
    }
    # The checkpoint has this format itself.
    assert changes(quantization="awq") == {"model": "bundled"}
    for found in (changes(), changes(quantization="none", kv_cache_dtype="fp8")):
        Settings.model_validate(found)


def test_an_adapter_is_found_by_its_digest_or_its_outputs_are_not_computed():
    def tasks(adapter):
        receipt = make_receipt()
        conditions = msgspec.structs.replace(CONDITIONS, adapter=adapter)
        return tasks_of("receipt", msgspec.structs.replace(receipt, conditions=conditions))

    plain, here, gone = found = [*tasks(UNSET), *tasks("sha256:ab"), *tasks("sha256:cd")]
    ref = AdapterRef("any", "/adapters/any", "ab")

    assert with_adapters(found, {"ab": ref}) == [plain, here]
    assert (plain.adapter, here.adapter) == (None, ref)
    assert gone.difference == (
        "cannot be computed: adapter sha256:cd is not here; give it with --lora-modules"
    )


def test_an_adapter_is_no_other_condition():
    conditions = msgspec.structs.replace(CONDITIONS, adapter="sha256:ab")
    task = tasks_of("receipt", msgspec.structs.replace(make_receipt(), conditions=conditions))[0]
    notes = []
    command._note_conditions([task], CONDITIONS, "", notes.append)
    assert notes == []
