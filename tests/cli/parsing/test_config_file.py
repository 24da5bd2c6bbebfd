"""Configuration files."""

import pytest

from server.cli.parsing.config_file import ConfigError, settings_of_file


@pytest.fixture
def read(tmp_path):
    """Return a function: write a file, read it, and return the texts of its settings and the notes."""

    def read(text):
        file = tmp_path / "service.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        reading = settings_of_file(str(file))
        return {name: given.text for name, given in reading.given.items()}, reading.notes

    return read


@pytest.fixture
def refusal(read, tmp_path):
    """Return a function: read a file that is refused; return the message without the folder."""

    def refuse(text):
        with pytest.raises(ConfigError) as error:
            read(text)
        return str(error.value).replace(f"{tmp_path}/", "")

    return refuse


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", {}),
        ("# nothing\n", {}),
        ("---\n# nothing\n", {}),
        ("null\n", {}),
        ("served-model-name: !!str 1\nhost: =\n", {"served_model_name": "1", "host": "="}),
        ("model: org/name\nport: 9000\n", {"model": "org/name", "port": "9000"}),
        ("--max-model-len: 4k\nmax_num_seqs: 8\n", {"max_model_len": "4k", "max_num_seqs": "8"}),
        ("served-model-name: [a, b]\n", {"served_model_name": "a,b"}),
        ("allowed_hosts:\n- a\n- b\n", {"allowed_hosts": "a,b"}),
        ("overlap: no\ncuda-graphs: true\n", {"overlap": "no", "cuda_graphs": "true"}),
        ("no-overlap: true\nno_cuda_graphs: false\n", {"overlap": "false", "cuda_graphs": "true"}),
        ("revision: 1e3\nhost: 0x7f\n", {"revision": "1e3", "host": "0x7f"}),
        ('{"model": "a", "port": 1}', {"model": "a", "port": "1"}),
        ("model_tag: a\ntensor-parallel-size: 2\n", {"model": "a", "tensor_parallel": "2"}),
        ("tp: 2\nm: a\n", {"tensor_parallel": "2", "model": "a"}),
        ("enforce-eager: true\n", {"cuda_graphs": "false"}),
        ("enforce-eager: false\n", {"cuda_graphs": "true"}),
        ("enable-lora: false\n", {}),
        ("c: 8192\nnp: 4\n", {"max_model_len": "8192", "max_num_seqs": "4"}),
    ],
)
def test_keys_are_names_of_flags_and_values_their_texts(read, text, settings):
    assert read(text)[0] == settings


def test_notes_name_the_line(read):
    assert read("port: 1\ntp: 2\nenable-auto-tool-choice: true\n")[1] == [
        "line 2: tp is --tensor-parallel 2",
        "line 3: enable-auto-tool-choice has no effect: tools may always be called",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a", "service.yaml, line 1: it must have lines of the form `key: value`"),
        ("- a", "service.yaml, line 1: it must have lines of the form"),
        ("port: 1\nport: 2", "service.yaml, line 2: port is also in service.yaml, line 1"),
        ("max-model-len: 1\nmax_model_len: 1", "line 2: max-model-len is also in"),
        ("\nprot: 1", "service.yaml, line 2: no setting is called prot; did you mean port?"),
        ("xyzzy: 1", "no setting is called xyzzy"),
        ("config: other.yaml", "no setting is called config"),
        ("port:", "service.yaml, line 1: port has no value"),
        ("port: [1, 2]", "port takes one value, not a list"),
        ("port: {a: 1}", "the value of port is nested"),
        ("allowed-hosts: [[a]]", "the value of allowed-hosts is nested"),
        ("tp: {a: 1}", "the value of tp is nested"),
        ("api-key: !env API_KEY", "line 1: the value of api-key has the tag !env"),
        ("api-key: [a, !vault b]", "the value of api-key has the tag !vault"),
        ("api-key: !!binary aGVsbG8=", "the value of api-key has the tag !!binary"),
        ('"po\\e[31mrt": 1', r"'po\x1b[31mrt' is not the name of a setting"),
        ('"": 1', "'' is not the name of a setting"),
        ("[a]: 1", "a key must be the name of a flag"),
        ("no-overlap: 5", "no-overlap is '5'; it must be true or false"),
        ("a: b: c", "service.yaml, line 1: it is not valid YAML"),
        ("port: 1\n---\nport: 2", "it is not valid YAML"),
        ("port: *x", "it is not valid YAML"),
        (b"\xff\xfe\xff", "it is not valid YAML"),
        (b"port: \x00", "it is not valid YAML"),
        ("[" * 100_000, "it is not valid YAML"),
        ("#" * 1_100_000, "more than 1048576 bytes"),
        ("speculative-config: {method: ngram}", "--max-draft-tokens"),
        ("mem-fraction-static: 0.9", "--gpu-memory-utilization is "),
        ("ngl: 20", "line 1: ngl 20: Tessera computes all layers on one device"),
        ("max-model-len: 1\ncontext-length: 2", "both set --max-model-len, to '1' and '2'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(refusal, text, said):
    message = refusal(text)

    assert said in message
    assert "\n" not in message
    assert message.startswith("service.yaml")


@pytest.mark.parametrize(
    ("path", "said"), [("none.yaml", "No such file"), ("", "Is a directory"), ("\0", "null")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, path, said):
    with pytest.raises(ConfigError, match=said):
        settings_of_file(f"{tmp_path}/{path}")


def test_an_empty_name_of_a_file_is_said_to_be_empty():
    with pytest.raises(ConfigError, match="the name of the configuration file is empty"):
        settings_of_file("")


def test_yaml_cannot_make_objects(refusal):
    assert "has the tag !!python/object" in refusal("x: !!python/object/apply:os.system [true]")
