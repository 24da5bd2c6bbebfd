"""Adapters by their names: chosen by requests of every dialect, loaded and unloaded while the service runs."""

import asyncio
import json
import os
import shutil
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from model.errors import ModelFolderError
from server.http.adapters import recent
from server.http.adapters.folder import AdapterFolder
from server.http.adapters.loaded import AdapterBase, read_adapter, read_modules
from server.http.edge.key_limits import KeyLimits
from tests.http.fakes import silent
from tests.model.adapters.peft_adapters import adapted
from tests.model.checkpoint.hf_checkpoints import CASES
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer admin-key"}
USER = {"authorization": "Bearer user-key"}
KEYS = {
    "api_key": ("admin-key", "user-key"),
    "key_limits": {"admin-key": KeyLimits(manages_adapters=1)},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base and adapters beside each other."""
    folder = tmp_path_factory.mktemp("adapters")
    model = CASES["llama"].save(folder / "base")
    for seed, name in enumerate(("sql", "chat")):
        adapted(model, folder / name, 4, ["q_proj"], seed=seed)
        model = model.__class__.from_pretrained(folder / "base")
    return folder


@pytest.fixture
def limits(folders):
    """Settings of a service with the adapter `sql`."""
    base = AdapterBase(str(folders / "base"), "tessera", 16)
    return {
        "lora_base": base,
        "max_loras": 2,
        "adapters": read_modules(base, [f"sql={folders / 'sql'}"]),
    }


@pytest.fixture
async def client(open_client, limits):
    return await open_client(**limits)


def completion(model, **more):
    return {"model": model, "prompt": "hi", "max_tokens": 2, **more}


async def load(client, name, path, headers=ADMIN, **more):
    body = {"lora_name": name, "lora_path": str(path), **more}
    return await client.post("/v1/load_lora_adapter", json=body, headers=headers)


async def unload(client, name, headers=ADMIN):
    body = {"lora_name": name}
    return await client.post("/v1/unload_lora_adapter", json=body, headers=headers)


ROUTES = {
    "completions": ("/v1/completions", completion("sql")),
    "generate": ("/generate", {"inputs": "hi", "parameters": {"adapter_id": "sql"}}),
    "stream": ("/generate_stream", {"inputs": "hi", "parameters": {"adapter_id": "sql"}}),
    "compat": ("/", {"inputs": "hi", "parameters": {"adapter_id": "sql"}}),
    "invocations": ("/invocations", completion("sql")),
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
async def test_every_route_lets_a_request_choose_an_adapter(client, engine, folders, route):
    path, body = ROUTES[route]

    response = await client.post(path, json=body)

    assert response.status_code == 200, response.text
    (request,) = engine.requests
    assert (request.adapter.name, request.adapter.path) == ("sql", str(folders / "sql"))


async def test_a_request_for_the_model_has_no_adapter(client, engine):
    response = await client.post("/v1/completions", json=completion("fake/model"))

    assert response.json()["model"] == "fake/model"
    assert engine.requests[0].adapter is None


async def test_a_reply_names_the_adapter(client):
    assert (await client.post("/v1/completions", json=completion("sql"))).json()["model"] == "sql"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", completion("other")),
        ("/generate", {"inputs": "hi", "parameters": {"adapter_id": "other"}}),
        ("/v1/messages", {"model": "other", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"model": "other", "prompt": "hi"}),
    ],
)  # fmt: skip
async def test_an_unknown_name_is_answered_with_those_that_exist(client, path, body):
    response = await client.post(path, json=body)

    assert response.status_code == 404
    assert "`other` does not exist" in response.text
    assert "`sql`" in response.text


async def test_models_lists_adapters_with_their_parent(client):
    models = (await client.get("/v1/models")).json()["data"]

    assert [(it["id"], it["parent"]) for it in models] == [
        ("fake/model", None),
        ("sql", "fake/model"),
    ]
    assert (await client.get("/v1/models/sql")).json()["parent"] == "fake/model"
    assert (await client.get("/v1/models/other")).status_code == 404


async def test_an_adapter_is_loaded_and_unloaded_by_a_key_that_may(
    open_client, limits, folders, engine
):
    client = await open_client(**limits | KEYS)

    reply = await load(client, "chat", folders / "chat")
    assert (reply.status_code, reply.text) == (
        200,
        "Success: LoRA adapter 'chat' added successfully.",
    )
    answer = await client.post("/v1/completions", json=completion("chat"), headers=USER)
    assert answer.json()["model"] == "chat"
    assert engine.requests[0].adapter.path == str(folders / "chat")

    assert (await unload(client, "chat")).status_code == 200
    answer = await client.post("/v1/completions", json=completion("chat"), headers=USER)
    assert answer.status_code == 404
    assert (await unload(client, "chat")).status_code == 404


async def test_other_keys_and_services_without_keys_change_no_adapters(
    open_client, limits, folders
):
    for headers, config in ((USER, KEYS), ({}, {})):
        client = await open_client(**limits | config)
        response = await load(client, "chat", folders / "chat", headers)
        assert response.status_code == 403
        assert "manages_adapters=1" in response.text
        assert (await unload(client, "sql", headers)).status_code == 403


@pytest.mark.parametrize(
    ("name", "path", "error"),
    [
        ("sql", "sql", "`sql` is loaded already"),
        ("fake/model", "sql", "is a name of the model"),
        ("tgi", "sql", "`tgi` means the model, whatever its name is"),
        ("../x", "sql", "must be letters, digits"),
        ("a\nb", "sql", "must be letters, digits"),
        ("x", "base", "has no adapter_config.json"),
        ("x", "absent", "cannot be loaded"),
        ("x", "x" * 3000, "File name too long"),
        ("x", "a\0b", "cannot be loaded"),
    ],
)
async def test_what_cannot_be_loaded_changes_nothing(
    open_client, limits, folders, name, path, error
):
    client = await open_client(**limits | KEYS)

    response = await load(client, name, folders / path)

    assert response.status_code == 400
    assert error in response.text
    assert len((await client.get("/v1/models", headers=USER)).json()["data"]) == 2


@pytest.mark.parametrize("body", [{}, {"lora_name": "x"}, {"lora_name": 1, "lora_path": "a"}, []])
async def test_a_wrong_body_is_refused(open_client, limits, body):
    client = await open_client(**limits | KEYS)
    response = await client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
    assert response.status_code == 400


async def test_a_name_may_get_other_weights_in_place(open_client, limits, folders, engine):
    client = await open_client(**limits | KEYS)
    await client.post("/v1/completions", json=completion("sql"), headers=USER)

    assert (await load(client, "sql", folders / "chat", load_inplace=True)).status_code == 200
    await client.post("/v1/completions", json=completion("sql"), headers=USER)

    before, after = (it.adapter for it in engine.requests)
    assert before.name == after.name
    assert before.digest != after.digest


async def test_requests_keep_an_adapter_that_is_unloaded(open_client, limits, engine):
    client = await open_client(**limits | KEYS)
    submitted = asyncio.Event()

    async def script(*arguments):
        submitted.set()
        await silent(*arguments)

    engine.script = script
    running = asyncio.create_task(
        client.post("/v1/completions", json=completion("sql"), headers=USER)
    )
    await submitted.wait()

    assert (await unload(client, "sql")).status_code == 200
    assert engine.aborted == []
    running.cancel()


async def test_names_in_the_folder_are_read_when_a_request_chooses_one(
    open_client, limits, folders, engine, tmp_path
):
    shutil.copytree(folders / "sql", tmp_path / "team" / "one")
    client = await open_client(**limits | {"lora_folder": str(tmp_path)})

    assert (await client.post("/v1/completions", json=completion("team/one"))).status_code == 200
    shutil.copytree(folders / "chat", tmp_path / "team" / "one", dirs_exist_ok=True)
    assert (await client.post("/v1/completions", json=completion("team/one"))).status_code == 200
    shutil.copytree(folders / "chat", tmp_path / "other")
    unknown = await client.post("/v1/completions", json=completion("team"))
    assert unknown.status_code == 404
    assert "this server has `fake/model` and `sql` and `team/one` and `other`" in unknown.text
    assert (await client.post("/v1/completions", json=completion("../sql"))).status_code == 404

    first, second = (it.adapter.digest for it in engine.requests)
    assert first != second
    (tmp_path / "team" / "one" / "adapter_config.json").write_text(json.dumps({}))
    response = await client.post("/v1/completions", json=completion("team/one"))
    assert response.status_code == 400
    assert "peft_type = None is not supported" in response.text


async def test_a_receipt_has_the_digest_of_the_adapter(client, engine):
    reply = (await client.post("/v1/completions", json=completion("sql", receipt=True))).json()
    plain = (await client.post("/v1/completions", json=completion(None, receipt=True))).json()

    digest = engine.requests[0].adapter.digest
    assert reply["receipt"]["conditions"]["adapter"] == f"sha256:{digest}"
    assert "adapter" not in plain["receipt"]["conditions"]


async def test_a_service_without_slots_loads_none(open_client, folders):
    client = await open_client(**KEYS)
    response = await load(client, "sql", folders / "sql")
    assert "the service takes no adapters: start it with --max-loras" in response.text


class SlowReads:
    """Holds up reads of adapters until a test lets them go on."""

    def __init__(self, monkeypatch):
        self.started = threading.Semaphore(0)
        self.may_end = defaultdict(threading.Event)

        def read(reader, name, path):
            found = read_adapter(reader, name, path)
            self.started.release()
            assert self.may_end[Path(path).name].wait(GIVE_UP)
            return found

        monkeypatch.setattr("server.http.adapters.table.read_adapter", read)

    async def begin(self, count=1):
        for _ in range(count):
            assert await asyncio.to_thread(self.started.acquire, timeout=GIVE_UP)


async def test_of_two_loads_of_a_name_at_once_one_is_refused(
    open_client, limits, folders, monkeypatch
):
    client = await open_client(**limits | KEYS)
    reads = SlowReads(monkeypatch)
    loads = [asyncio.create_task(load(client, "x", folders / it)) for it in ("sql", "chat")]
    await reads.begin(2)
    for name in ("sql", "chat"):
        reads.may_end[name].set()
    found = await asyncio.gather(*loads)

    assert sorted(it.status_code for it in found) == [200, 400]
    assert "`x` is loaded already" in "".join(it.text for it in found)


async def test_the_limit_of_names_holds_for_loads_at_once(
    open_client, limits, folders, monkeypatch
):
    client = await open_client(**limits | KEYS)
    monkeypatch.setattr("server.engine.link.front_end.adapter_names.MAX_ADAPTERS", 2)
    monkeypatch.setattr("server.http.adapters.table.MAX_ADAPTERS", 2)
    reads = SlowReads(monkeypatch)
    loads = [asyncio.create_task(load(client, it, folders / "chat")) for it in "xy"]
    await reads.begin(2)
    reads.may_end["chat"].set()
    found = await asyncio.gather(*loads)

    assert sorted(it.status_code for it in found) == [200, 400]
    assert "has 2 adapters already" in "".join(it.text for it in found)


@pytest.fixture
async def with_folder(open_client, limits, folders, tmp_path):
    """A client of a service whose folder has the adapter `one`, and that folder."""
    shutil.copytree(folders / "sql", tmp_path / "one")
    return await open_client(**limits | KEYS | {"lora_folder": str(tmp_path)}), tmp_path


async def test_an_adapter_that_is_loaded_while_the_folder_is_read_is_kept(
    with_folder, folders, engine, monkeypatch
):
    client, _ = with_folder
    reads = SlowReads(monkeypatch)
    chosen = asyncio.create_task(
        client.post("/v1/completions", json=completion("one"), headers=USER)
    )
    await reads.begin()
    loaded = asyncio.create_task(load(client, "one", folders / "chat", load_inplace=True))
    await reads.begin()
    reads.may_end["chat"].set()
    assert (await loaded).status_code == 200
    reads.may_end["one"].set()

    assert (await chosen).status_code == 200
    await client.post("/v1/completions", json=completion("one"), headers=USER)
    paths = [it.adapter.path for it in engine.requests]
    assert paths == [str(folders / "chat")] * 2


async def test_an_adapter_that_is_unloaded_while_it_is_looked_up_is_unknown(
    with_folder, folders, monkeypatch
):
    client, folder = with_folder
    await client.post("/v1/completions", json=completion("one"), headers=USER)
    (folder / "one" / "adapter_config.json").touch()
    reads = SlowReads(monkeypatch)
    chosen = asyncio.create_task(
        client.post("/v1/completions", json=completion("one"), headers=USER)
    )
    await reads.begin()
    shutil.rmtree(folder / "one")
    reads.may_end["one"].set()

    assert (await chosen).status_code == 404
    again = await client.post("/v1/completions", json=completion("one"), headers=USER)
    assert again.status_code == 404


async def test_an_adapter_of_the_folder_is_not_unloaded_but_removed_there(with_folder):
    client, folder = with_folder
    for _ in range(2):
        response = await unload(client, "one")
        assert response.status_code == 400
        assert "`one` is in --lora-folder" in response.text
        await client.post("/v1/completions", json=completion("one"), headers=USER)

    shutil.rmtree(folder / "one")
    models = (await client.get("/v1/models", headers=USER)).json()["data"]
    assert [it["id"] for it in models] == ["fake/model", "sql"]
    response = await client.post("/v1/completions", json=completion("one"), headers=USER)
    assert response.status_code == 404
    assert (await unload(client, "one")).status_code == 404


async def test_paths_of_the_service_are_told_to_keys_that_manage_adapters(with_folder, caplog):
    client, folder = with_folder
    (folder / "one" / "adapter_config.json").write_text("{")

    told = await client.post("/v1/completions", json=completion("one"), headers=ADMIN)
    hidden = await client.post("/v1/completions", json=completion("one"), headers=USER)
    assert str(folder) in told.text
    assert "adapter_config.json is not valid JSON" in hidden.text
    assert str(folder) not in hidden.text
    assert str(folder) in caplog.text

    secret = folder.parent / "secret"
    (folder / "one" / "adapter_config.json").unlink()
    (folder / "one" / "adapter_config.json").symlink_to(secret)
    secret.write_text("{}")
    hidden = await client.post("/v1/completions", json=completion("one"), headers=USER)
    assert hidden.status_code == 400
    assert "secret" not in hidden.text
    assert "the log has the reason" in hidden.text


class Clock:
    """The time that memories of failures read."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("server.http.adapters.recent.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def ask(client, name):
    return client.post("/v1/completions", json=completion(name), headers=USER)


async def test_a_name_that_is_absent_is_looked_up_once_in_a_while(
    with_folder, folders, monkeypatch, clock
):
    client, folder = with_folder
    original, looked_up = Path.is_file, []

    def is_file(path):
        looked_up.append(path)
        return original(path)

    monkeypatch.setattr("pathlib.Path.is_file", is_file)
    assert (await ask(client, "new")).status_code == 404
    seen = len(looked_up)
    assert (await ask(client, "new")).status_code == 404
    assert len(looked_up) == seen

    shutil.copytree(folders / "chat", folder / "new")
    assert (await ask(client, "new")).status_code == 404
    clock.now = recent.SECONDS
    assert (await ask(client, "new")).status_code == 200


async def test_an_adapter_that_cannot_be_used_is_read_again_when_it_changes_or_after_a_while(
    with_folder, monkeypatch, clock
):
    client, folder = with_folder
    reads = []

    def read(reader, name, path):
        reads.append(name)
        return read_adapter(reader, name, path)

    monkeypatch.setattr("server.http.adapters.table.read_adapter", read)
    good = (folder / "one" / "adapter_config.json").read_text()
    (folder / "one" / "adapter_config.json").write_text("{")
    for _ in range(3):
        assert "is not valid JSON" in (await ask(client, "one")).text
    assert len(reads) == 1
    clock.now = recent.SECONDS
    assert (await ask(client, "one")).status_code == 400
    assert len(reads) == 2

    (folder / "one" / "adapter_config.json").write_text(good)
    assert (await ask(client, "one")).status_code == 200
    assert len(reads) == 3


async def test_a_repository_that_cannot_be_downloaded_is_not_asked_for_at_once_again(
    open_client, limits, monkeypatch, clock
):
    client = await open_client(**limits | KEYS)
    asked = []

    def read(reader, name, path):
        asked.append(path)
        raise ModelFolderError(f"no repository {path}")

    monkeypatch.setattr("server.http.adapters.table.read_adapter", read)
    for _ in range(2):
        response = await load(client, "x", "some-org/absent")
        assert response.status_code == 400
        assert "no repository some-org/absent" in response.text
    assert len(asked) == 1
    clock.now = recent.SECONDS
    await load(client, "x", "some-org/absent")
    assert len(asked) == 2


async def test_the_reads_of_a_folder_are_bounded(with_folder, folders, monkeypatch):
    client, folder = with_folder
    monkeypatch.setattr("server.http.adapters.folder._MOST_READS", 1)
    shutil.copytree(folders / "chat", folder / "two")
    reads = SlowReads(monkeypatch)
    first = asyncio.create_task(ask(client, "one"))
    await reads.begin()

    refused = await ask(client, "two")
    assert refused.status_code == 429
    assert "adapters are being read" in refused.text
    assert refused.headers["retry-after"]
    reads.may_end["one"].set()
    assert (await first).status_code == 200


async def test_an_adapter_that_was_read_is_found_while_others_are_read(
    with_folder, folders, monkeypatch
):
    client, folder = with_folder
    assert (await ask(client, "one")).status_code == 200
    for name in ("two", "three"):
        shutil.copytree(folders / "chat", folder / name)
    reads = SlowReads(monkeypatch)
    others = [asyncio.create_task(ask(client, it)) for it in ("two", "three")]
    await reads.begin(2)

    assert (await ask(client, "one")).status_code == 200
    for name in ("two", "three"):
        reads.may_end[name].set()
    assert [it.status_code for it in await asyncio.gather(*others)] == [200, 200]


async def test_an_adapter_is_read_once_although_the_request_for_it_has_gone(tmp_path, folders):
    shutil.copytree(folders / "sql", tmp_path / "one")
    started, may_end, paths = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def read(_, path):
        paths.append(path)
        loop.call_soon_threadsafe(started.set)
        may_end.wait(GIVE_UP)
        return path

    folder = AdapterFolder(tmp_path, (), read)
    gone = asyncio.create_task(folder.find("one"))
    await started.wait()
    gone.cancel()
    await asyncio.wait([gone])
    may_end.set()
    await asyncio.gather(*folder._reading.values())

    assert await folder.find("one") == str(tmp_path / "one")
    assert len(paths) == 1
    folder.close()


async def test_no_file_of_the_folder_is_looked_at_on_the_event_loop(
    with_folder, folders, monkeypatch
):
    client, folder = with_folder
    loop, on_loop, elsewhere = threading.current_thread(), [], []

    def noting(original):
        def look(path, *arguments, **more):
            if str(path).startswith(str(folder)):
                here = threading.current_thread() is loop
                (on_loop if here else elsewhere).append(str(path))
            return original(path, *arguments, **more)

        return look

    for name in ("stat", "lstat", "scandir", "open"):
        monkeypatch.setattr(f"os.{name}", noting(getattr(os, name)))
    monkeypatch.setattr("pathlib.Path.is_file", noting(Path.is_file))

    assert (await ask(client, "one")).status_code == 200
    assert (await ask(client, "absent")).status_code == 404
    assert (await client.get("/v1/models/one", headers=USER)).status_code == 200
    assert (await client.get("/v1/models/other", headers=USER)).status_code == 404
    assert "`one` is in --lora-folder" in (await unload(client, "one")).text
    assert "`one` is in --lora-folder already" in (await load(client, "one", folders / "sql")).text
    body = {"model": "one", "prompt": "hi"}
    assert (await client.post("/tokenize", json=body, headers=USER)).status_code == 200
    body = {"inputs": "hi", "parameters": {"adapter_id": "one"}}
    assert (await client.post("/generate", json=body, headers=USER)).status_code == 200
    models = (await client.get("/v1/models", headers=USER)).json()["data"]

    assert [it["id"] for it in models] == ["fake/model", "sql", "one"]
    assert on_loop == []
    assert any(it.startswith(str(folder / "one")) for it in elsewhere)


async def test_lists_of_models_look_for_all_adapters_once_at_a_time(
    with_folder, folders, monkeypatch
):
    client, folder = with_folder
    assert (await ask(client, "one")).status_code == 200
    started, may_end, looks = asyncio.Event(), threading.Event(), []
    loop, original = asyncio.get_running_loop(), AdapterFolder._absent

    def absent(self, names):
        looks.append(names)
        loop.call_soon_threadsafe(started.set)
        assert may_end.wait(GIVE_UP)
        return original(self, names)

    monkeypatch.setattr(AdapterFolder, "_absent", absent)
    shutil.rmtree(folder / "one")

    async def listed():
        models = (await client.get("/v1/models", headers=USER)).json()["data"]
        return [it["id"] for it in models]

    first = asyncio.create_task(listed())
    await started.wait()
    assert await listed() == ["fake/model", "sql", "one"]
    may_end.set()
    assert await first == ["fake/model", "sql"]
    assert looks == [["one"]]


async def test_names_of_any_model_mean_the_model_although_the_folder_has_them(
    with_folder, folders, engine
):
    client, folder = with_folder
    shutil.copytree(folders / "chat", folder / "tgi")
    assert (await ask(client, "tgi")).status_code == 200
    assert engine.requests[0].adapter is None


async def test_the_names_of_the_model_are_adapter_ids_without_an_adapter(client, engine):
    body = {"inputs": "hi", "parameters": {"adapter_id": "fake/model"}}
    assert (await client.post("/generate", json=body)).status_code == 200
    assert engine.requests[0].adapter is None


async def test_an_adapter_in_the_folder_is_replaced_only_in_place(with_folder, folders, engine):
    client, _ = with_folder
    response = await load(client, "one", folders / "chat")
    assert response.status_code == 400
    assert "`one` is in --lora-folder already; `load_inplace` true replaces it" in response.text
    assert (await load(client, "one", folders / "chat", load_inplace=True)).status_code == 200
    await ask(client, "one")
    assert (await unload(client, "one")).status_code == 200
    await ask(client, "one")
    assert [Path(it.adapter.path).name for it in engine.requests] == ["chat", "one"]


async def test_the_engine_may_tell_paths_to_requests_whose_key_manages_adapters(
    open_client, limits, engine
):
    client = await open_client(**limits | KEYS)
    for headers in (USER, ADMIN):
        await client.post("/v1/completions", json=completion("sql"), headers=headers)
    assert [it.adapter.shows_paths for it in engine.requests] == [False, True]


async def test_a_folder_that_may_not_be_read_is_an_error_of_the_request(with_folder, monkeypatch):
    client, folder = with_folder
    original = Path.is_file

    def is_file(path):
        if path.is_relative_to(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr("pathlib.Path.is_file", is_file)
    response = await client.post("/v1/completions", json=completion("one"), headers=ADMIN)
    assert response.status_code == 400
    assert "cannot be read: Permission denied" in response.text
