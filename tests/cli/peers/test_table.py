"""The tables of other servers' names, as a whole: each name is answered as its row says, with names that exist."""

import re
from pathlib import Path

import pytest

from server.cli.commands import COMMANDS
from server.cli.parsing.parser import PEERS as PARSED
from server.cli.parsing.parser import Parser
from server.cli.parsing.setting_flags import add_settings, given_settings
from server.cli.peers import subjects
from server.cli.peers.reading import absence
from server.cli.peers.table import PEERS, Found, find_flag, find_variable
from server.cli.peers.values import ADVICE, SPELLINGS
from server.cli.peers.variables import read_variables
from server.cli.settings import Settings, flag

ROWS = [(peer, row) for peer in PEERS for row in peer.rows]
OWN = {flag(name) for name in Settings.model_fields} | {"--config"}
VALUES = {
    "--sharded": "false",
    "-ngl": "99",
    "--gpu-layers": "all",
    "--n-gpu-layers": "auto",
    "--kv-cache-memory-bytes": "1g",
}


@pytest.fixture(scope="module")
def parser():
    parser = Parser(prog="tool")
    add_settings(parser)
    return parser


def word_for(name, row):
    return VALUES.get(name) or (row.only.split() or ["5"])[0]


def texts(row):
    return " ".join((row.always, row.near, absence(Found(PEERS[0], row))))


def test_a_row_has_one_answer_and_some_names():
    for peer, row in ROWS:
        answers = [row.setting, row.always, row.near, row.subject]
        assert len([it for it in answers if it]) == 1, (peer.name, row)
        assert row.flags or row.variables
        assert not row.only or row.always


def test_no_peer_has_a_name_twice():
    for peer in PEERS:
        names = [name for row in peer.rows for name in (row.flags + " " + row.variables).split()]
        assert len(names) == len(set(names)), (
            peer.name,
            {it for it in names if names.count(it) > 1},
        )
        assert all(re.fullmatch(r"--?[A-Za-z][\w.-]*|[A-Z][A-Z0-9_]*", name) for name in names)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_flag_is_answered_as_the_table_says_and_never_taken_for_another(parser, capsys, peer):
    for row in peer.rows:
        for name in row.flags.split():
            if name in OWN:
                continue
            given = [] if row.takes == "nothing" else [word_for(name, row)]
            rows = [it.row for it in find_flag(name)]
            status, options, said = 0, None, ""
            try:
                options = parser.parse_args([name, *given])
            except SystemExit as end:
                status, said = end.code, capsys.readouterr().err
            assert "did you mean" not in said
            assert "unknown flag" not in said
            if not all(row.means(other) for other in rows):
                assert status == 0 or "several meanings" in said or name in said
            elif row.setting:
                assert status == 0, said
                assert row.setting in given_settings(options) or getattr(options, PARSED).notes
            elif row.always:
                assert status == 0, said
                assert given_settings(options) == {}
                assert row.always in getattr(options, PARSED).notes[0]
            else:
                assert status == 2
                assert said.count("\n") == 1
                assert said.startswith(f"tool: error: {name} ({find_flag(name)[0].peer.name}): ")
                assert (row.near or row.subject.text) in said


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_variable_is_answered_as_the_table_says(peer):
    for row in peer.rows:
        for name in row.variables.split():
            assert find_variable(name).row is row
            value = {"HOSTNAME": "0.0.0.0", "CUDA_GRAPHS": "0"}.get(name) or (  # noqa: S104 - a text
                "99" if "LAYERS" in name else "1"
            )
            variables = {name: value} | ({row.needs: "a"} if row.needs else {})
            stops = peer.variables_are_flags and row.subject is not None and row.subject.matters
            if stops:
                with pytest.raises(ValueError, match=rf"^{name} \({peer.name}\): Tessera has no "):
                    read_variables(variables, model_is_given=False)
                continue
            reading = read_variables(variables, model_is_given=False)
            assert sum(note.startswith(name) for note in reading.notes) == 1
            assert (
                (row.setting in reading.given)
                or not row.setting
                or "no effect" in str(reading.notes)
            )


def test_every_name_in_an_answer_is_one_of_tessera():
    for text in [*(texts(row) for _, row in ROWS), *ADVICE.values()]:
        for name in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text):
            assert name in OWN or name in {"--num-shard"}, text
        for command in re.findall(r"`tessera (\w+)", text):
            assert command in COMMANDS, text
        for page in re.findall(r"docs/[\w.-]+", text):
            assert (Path(__file__).parents[3] / page).exists(), text


def test_an_understood_name_is_a_setting_and_an_own_name_the_setting_of_that_name():
    for peer, row in ROWS:
        assert not row.setting or row.setting in Settings.model_fields, (peer.name, row)
        for name in OWN & set(row.flags.split()):
            assert flag(row.setting) == name or name in row.near, (peer.name, name)


def test_spellings_lead_to_values_that_the_setting_takes():
    for name, spellings in SPELLINGS.items():
        for value in spellings.values():
            Settings.model_validate({name: value})


def test_every_subject_is_used_and_completes_a_sentence():
    used = {row.subject for _, row in ROWS}
    for name, subject in vars(subjects).items():
        if isinstance(subject, subjects.Subject):
            assert subject in used, name
            assert not subject.text.endswith(".")
            assert not subject.advice.endswith(".")


@pytest.mark.parametrize("name", ["--compilation-config.mode", "--max_num_partial_prefills", "-O2"])
def test_forms_that_vllm_takes_are_found(name):
    assert find_flag(name)[0].peer.name == "vLLM"


def test_a_name_that_no_peer_has_is_not_found():
    assert find_flag("--prot") == []
    assert find_flag("--no-prot") == []
    assert find_variable("PATH") is None
