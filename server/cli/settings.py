"""The settings of the service: the fields of three records, with flag and environment variable for each.

No other module reads the environment.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from server.docstrings import attribute_texts
from server.engine.settings import EngineSettings
from server.http.config import HTTPSettings
from server.setting import Group, Setting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic.fields import FieldInfo

ENV_PREFIX = "TESSERA_"
CONFIG = "config"
"""The name of the flag and variable of the configuration file, which is no setting."""
MAX_ENGINES = 64
_LORAS = 8
"""Slots for adapters where some are given."""
# For a Service named `tessera` or `tessera-...`, Kubernetes sets these in every pod of the namespace.
_KUBERNETES = re.compile(
    r"(_\w+)?(_SERVICE_(HOST|PORT(_\w+)?)|_PORT_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)"
)
_is_number = re.compile(r"[0-9]{1,9}").fullmatch
_QUOTES = "\"'`"
_BLANK = " \t\r\n\"'"
_is_key = re.compile(r"[!-+\--~]+").fullmatch  # visible ASCII without the comma
_RUNS = (
    "model", "chat_template", "host", "device", "max_concurrent_requests", "api_key_file", "prefix_cache_sharing",
    "log_format", "otlp_endpoint", "engine_hang_seconds", "restart_wait", "log_level", "ignore_unknown_env",
)  # fmt: skip
"""The order of the settings in help and documents: each begins a run of one record's fields, to the next of these."""


class Settings(BaseModel, HTTPSettings, EngineSettings):
    """The settings of the service; those in this class are of the command that serves.

    Every flag can also be given as an environment variable: --max-model-len is TESSERA_MAX_MODEL_LEN. A flag overrides
    the environment. `server.cli.command_settings` reads both.

    Attributes:
        model: checkpoint folder, Hugging Face model id such as Qwen/Qwen3-0.6B, or 'bundled' for the included code
            model; may also be given without --model.
        revision: branch, tag or commit of a Hugging Face model id.
        generation_config: auto takes the sampling parameters that a request to the OpenAI API does not set from the
            checkpoint's generation_config.json, none from the service's own defaults.
        host: address to listen on; 0.0.0.0 for all interfaces.
        port: TCP port to listen on; 0 chooses a free one.
        frontends: processes that share the port and the work of HTTP, tokenizing and streaming; one process streams
            about 50,000 tokens per second; default: with a GPU one per 4 usable logical processors, at most 4, plus 2
            for each further engine; else 1.
        data_parallel: engine processes, each with the whole model, that share the requests: each has a GPU of its own,
            or on a CPU a share of the cores; auto is the number of GPUs that CUDA_VISIBLE_DEVICES allows, or 1. Limits
            of memory and steps, such as --max-num-seqs, are those of each engine.
        api_key_file: file of further keys, one on each line, possibly with limits after it: lowest_priority=N, the
            lowest priority with which its requests come before those of other keys (0 without it),
            longest_timeout_ms=N, after which its requests end, and manages_adapters=1, with which it may load and
            unload adapters; empty lines and lines that begin with # are ignored.
        engine_hang_seconds: seconds after which a silent engine, or one whose step does not end, is restarted; steps
            that are usually slow, loading and compiling have more time (docs/operations.md); also the limit of a front
            end that handles nothing.
        ignore_unknown_env: start although an environment variable that begins with TESSERA_ is not one of a setting.
        peer_env: read the environment variables of other servers, such as MODEL_ID (docs/peer-names.md), where nothing
            else gives the setting.

    Example:
        >>> settings = Settings(model="Qwen/Qwen3-0.6B", max_model_len=4096)
        >>> settings.max_model_len, settings.device
        (4096, 'auto')
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: Annotated[str, Setting("model")] = "bundled"
    revision: Annotated[str | None, Setting("model")] = None
    generation_config: Literal["auto", "none"] = "auto"
    host: str = "127.0.0.1"
    port: Annotated[int, Setting(ge=0, le=65535)] = 8000
    frontends: Annotated[int | None, Setting(ge=1, le=64)] = None
    data_parallel: Annotated[int | None, Setting("engine", ge=1, le=MAX_ENGINES)] = 1
    api_key_file: Annotated[Path | None, Setting(restricts=True)] = None
    engine_hang_seconds: Annotated[float, Setting("process", gt=0)] = 60.0
    ignore_unknown_env: Annotated[bool, Setting("process")] = False
    peer_env: Annotated[bool, Setting("process")] = True

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Return the names and values that `repr` shows: no secrets."""
        fields = type(self).model_fields
        return [it for it in super().__repr_args__() if not setting(fields[str(it[0])]).secret]

    def values_of(self, record: type[EngineSettings | HTTPSettings]) -> dict[str, Any]:
        """Return the values of the settings of one record, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(record)}

    @property
    def num_adapter_slots(self) -> int:
        """Slots for adapters on the device; 0 for none."""
        if self.max_loras is not None:
            return self.max_loras
        return _LORAS if self.lora_modules or self.lora_folder else 0

    @field_validator("data_parallel", mode="before")
    @classmethod
    def _engines_are_counted_or_automatic(cls, value: object) -> object:
        if value == "auto":
            return None
        if not _is_number(str(value)) or not 1 <= int(str(value)) <= MAX_ENGINES:
            raise refusal(f"it must be a whole number from 1 to {MAX_ENGINES}, or auto")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _what_restricts_is_not_empty(cls, value: object, info: ValidationInfo) -> object:
        if setting(cls.model_fields[str(info.field_name)]).restricts:
            texts = [value] if isinstance(value, str) else value
            if isinstance(texts, list) and texts and not any(str(it).strip(_BLANK) for it in texts):
                raise refusal("it is empty; leave it out to have none")
        return value

    @field_validator("api_key")
    @classmethod
    def _keys_fit_in_a_header(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return check_keys(keys)

    @field_validator("*")
    @classmethod
    def _texts_have_their_form(cls, value: Any, info: ValidationInfo) -> Any:  # noqa: ANN401 - of any field
        form = setting(cls.model_fields[str(info.field_name)]).form
        if form is None or value is None:
            return value
        for text in [value] if isinstance(value, str) else value:
            if not re.fullmatch(form.pattern, text):
                raise refusal(f"{text!r} {form.refusal}")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse settings that contradict each other."""
        tokens, prefill = self.max_num_batched_tokens, self.max_prefill_tokens
        for name, limit in (("max-num-batched-tokens", tokens), ("max-prefill-tokens", prefill)):
            if limit is not None and self.max_num_seqs is not None and limit < self.max_num_seqs:
                raise refusal(
                    f"--{name} {limit} is less than --max-num-seqs {self.max_num_seqs}: "
                    "every running sequence needs a token of each step"
                )
        if tokens is not None and prefill is not None and prefill < tokens:
            raise refusal(
                f"--max-prefill-tokens {prefill} is less than --max-num-batched-tokens {tokens}: "
                "a step without decoding sequences would have fewer tokens than one with them"
            )
        if self.data_parallel != 1 and self.tensor_parallel > 1:
            raise refusal(
                f"--data-parallel {self.data_parallel or 'auto'} and --tensor-parallel {self.tensor_parallel} cannot "
                "be combined: start a service for each group of GPUs"
            )
        sizes = [
            f"{flag(name)} {value}"
            for name in ("kv_cache_tokens", "kv_cache_gib", "gpu_memory_utilization")
            if (value := getattr(self, name)) is not None
        ]
        if len(sizes) > 1:
            raise refusal(
                f"{sizes[0]} and {sizes[1]} both give the size of the KV cache: leave one out"
            )
        return self


def refusal(message: str) -> PydanticCustomError:
    """Return the error of a value that is not allowed."""
    return PydanticCustomError("setting", "{message}", {"message": message})


def read_environment(
    variables: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Read the environment variables that begin with TESSERA_.

    Empty ones count as absent, but not those of settings that keep others out, and of the file that may have such.

    Args:
        variables: to read from; None takes the environment of this process.

    Returns:
        The text of each setting that has a variable, and of the name of the configuration file; and the names of
        variables that belong to no setting. Those that Kubernetes sets for a Service are not among them.
    """
    variables = environment() if variables is None else variables
    values, unknown = {}, []
    for name, value in variables.items():
        if not name.upper().startswith(ENV_PREFIX):
            continue
        field = name[len(ENV_PREFIX) :].lower()
        if not value and field != CONFIG and field not in restricting():
            continue
        if field in Settings.model_fields or field == CONFIG:
            values[field] = value
        elif not _is_of_kubernetes(name, value):
            unknown.append(name)
    return values, sorted(unknown)


@functools.cache
def restricting() -> frozenset[str]:
    """Return the names of the settings that keep others out."""
    fields = Settings.model_fields.items()
    return frozenset(name for name, field in fields if setting(field).restricts)


def environment() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def _is_of_kubernetes(name: str, value: str) -> bool:
    if name.endswith("_PORT") and value.startswith(("tcp://", "udp://")):
        return True
    return _KUBERNETES.fullmatch(name, len(ENV_PREFIX) - 1) is not None


def client_api_key() -> str | None:
    """Return the API key for requests to a service: the first in the variable that gives the service its keys."""
    return os.environ.get(ENV_PREFIX + "API_KEY", "").partition(",")[0].strip() or None


def check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return API keys unchanged.

    Raises:
        PydanticCustomError: a key could not be sent in a header. The message does not show it.
    """
    for number, key in enumerate(keys, 1):
        if not _is_key(key):
            raise refusal(
                f"key {number} is empty or has characters other than visible ASCII without commas"
            )
        if key[0] == key[-1] and key[0] in _QUOTES:
            raise refusal(f"key {number} is in quotation marks, which would be part of it")
    return keys


def setting(field: FieldInfo) -> Setting:
    """Return the metadata of a setting."""
    return next((it for it in field.metadata if isinstance(it, Setting)), Setting())


@functools.cache
def meanings() -> dict[str, str]:
    """Return the descriptions of all settings by name, for help and documents."""
    texts = map(attribute_texts, (Settings, HTTPSettings, EngineSettings))
    return {name: text.removesuffix(".") for part in texts for name, text in part.items()}


def listed_settings() -> dict[str, FieldInfo]:
    """Return all settings by name, in the order of help and documents."""
    run, runs = 0, {}
    for name in Settings.model_fields:
        run = runs[name] = _RUNS.index(name) if name in _RUNS else run
    return dict(sorted(Settings.model_fields.items(), key=lambda it: runs[it[0]]))


def group_of(name: str) -> Group:
    """Return the group of a setting in the help text."""
    record: Group = "engine" if name in EngineSettings.__annotations__ else "HTTP"
    return setting(Settings.model_fields[name]).group or record


def environment_variable(field: str) -> str:
    """Return the name of a setting's environment variable."""
    return ENV_PREFIX + field.upper()


def flag(field: str) -> str:
    """Return a setting's command-line flag."""
    return "--" + field.replace("_", "-")
