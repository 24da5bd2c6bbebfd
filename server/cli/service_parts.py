"""What a service consists of, from its settings; shared by `tessera serve` and `server.embedding`."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic_core import PydanticCustomError

from model.checkpoint.generation_config import read_sampling_defaults
from model.errors import AdapterError
from model.hub.resolve import BUNDLED, is_bundled, resolve
from model.sampling.parameters import SamplingDefaults
from model.text.template_files import read_template
from model.text.tokens.end_token import stated_ends
from server.cli.listening import is_loopback
from server.cli.nvidia import count_gpus, may_have_gpu
from server.cli.settings import Settings, check_keys, refusal
from server.engine.core.start_checks import StartupError
from server.engine.link.spawn import gpu_variables
from server.http.adapters.loaded import AdapterBase, read_modules
from server.http.adapters.names import name_problem
from server.http.body.request_options import MAX_PRIORITY, MAX_TIMEOUT_MS
from server.http.config import HTTPConfig, HTTPSettings
from server.http.edge.key_limits import NO_LIMITS, KeyLimits

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from model.checkpoint.config import ModelConfig

log = logging.getLogger("tessera")
_KEY_CHARACTERS = 16
_KEY_FILE_CHARACTERS = 1 << 20
_KEY_LIMITS: Final = {
    "lowest_priority": (-MAX_PRIORITY, MAX_PRIORITY),
    "longest_timeout_ms": (1, MAX_TIMEOUT_MS),
    "manages_adapters": (0, 1),
}
"""By name of a limit in the file of keys, its lowest and highest value."""
_TRACING_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


def http_config(
    settings: Settings,
    folder: Path,
    model: ModelConfig,
    keys: Mapping[str, KeyLimits],
    allowed_hosts: tuple[str, ...],
) -> HTTPConfig:
    """Return the HTTP layer's part of the settings.

    Args:
        settings: of the service.
        folder: of the checkpoint.
        model: configuration of the checkpoint.
        keys: the API keys with their limits; none if the service has none.
        allowed_hosts: hosts that requests may name; none for any.

    Raises:
        ModelError: the chat template or the checkpoint's sampling defaults cannot be read, or an adapter does not fit.
    """
    for note in model.notes:
        log.warning("%s: %s", folder, note)
    from_file = settings.generation_config == "auto"
    slots = settings.num_adapter_slots
    base = AdapterBase(str(folder), settings.model_backend, settings.max_lora_rank)
    _check_adapters(settings)
    resolved = {
        "chat_template": settings.chat_template and read_template(settings.chat_template),
        "api_key": tuple(keys),
        "allowed_hosts": allowed_hosts,
        "lora_folder": _lora_folder(settings),
    }
    return HTTPConfig(
        key_limits={key: limits for key, limits in keys.items() if limits != NO_LIMITS},
        model_id=settings.model,
        adapters=read_modules(base, settings.lora_modules),
        lora_base=base if slots else None,
        max_loras=slots,
        checkpoint="" if settings.load_format == "dummy" else str(folder),
        eos_token_ids=model.eos_token_ids,
        end_tokens=stated_ends(model.eos_by_file),
        vocab_size=model.network.vocab,
        sampling_defaults=read_sampling_defaults(folder) if from_file else SamplingDefaults(),
        # Who gives the bundled code model another template wants to chat.
        continues_text=settings.chat_template is None and is_bundled(folder),
        **settings.values_of(HTTPSettings) | resolved,
    )


def _check_adapters(settings: Settings) -> None:
    """Check what the settings say of adapters.

    Raises:
        AdapterError: they contradict each other, or there is no such folder.
    """
    given = {"--lora-modules": settings.lora_modules, "--lora-folder": settings.lora_folder}
    for name, value in given.items():
        if value and not settings.num_adapter_slots:
            raise AdapterError(f"{name} has no effect with --max-loras 0")
    names = settings.served_model_name or (settings.model,)
    for module in settings.lora_modules:
        name = module.partition("=")[0]
        if (problem := name_problem(name, names)) is not None:
            raise AdapterError(f"--lora-modules {name}: it {problem}")


def _lora_folder(settings: Settings) -> str | None:
    """Return the folder of adapters, in which `~` is the home of a user.

    Raises:
        AdapterError: there is no such folder.
    """
    if settings.lora_folder is None:
        return None
    try:
        folder = Path(settings.lora_folder).expanduser()
        if folder.is_dir():
            return str(folder)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: no such user
        pass
    raise AdapterError(f"--lora-folder {settings.lora_folder} is not a folder")


def tokenizer_path(settings: Settings, model_path: Path) -> Path:
    """Return the model's folder. A model with random weights may have no tokenizer and uses the bundled model's."""
    has_tokenizer = model_path.is_file() or (model_path / "tokenizer.json").exists()
    if settings.load_format == "dummy" and not has_tokenizer:
        log.warning("%s has no tokenizer.json; using the bundled model's", model_path)
        return resolve(BUNDLED)
    return model_path


def api_keys(settings: Settings) -> dict[str, KeyLimits]:
    """Return all keys, each once, with their limits; none if the service is open to all.

    Keys that can be guessed are logged by number.

    Raises:
        StartupError: the file cannot be read, has no key, has a line that is not a key with its limits, or can be
            written by other users.
    """
    keys = dict.fromkeys(settings.api_key, NO_LIMITS)
    if settings.api_key_file is not None:
        keys |= _read_keys(settings.api_key_file)
    short = [str(number) for number, key in enumerate(keys, 1) if len(key) < _KEY_CHARACTERS]
    if short:
        log.warning(
            "API keys with fewer than %d characters can be guessed: %s of %d (`openssl rand -hex 32` makes one)",
            _KEY_CHARACTERS,
            ", ".join(short),
            len(keys),
        )
    return keys


def warn_if_open(host: str, address: str, port: int, keys: Collection[str]) -> None:
    """Log a warning if other machines can use the service without a key.

    Args:
        host: that the operator gave.
        address: that the service listens on.
        port: that it listens on.
        keys: its API keys.
    """
    if not keys and not is_loopback(address):
        shown = f"[{address}]" if ":" in address else address
        log.warning(
            "the service has no API key, and everyone who reaches %s:%d can use it (--host %s); --api-key-file gives "
            "it keys",
            shown,
            port,
            host,
        )


def _read_keys(path: Path) -> dict[str, KeyLimits]:
    keys: dict[str, KeyLimits] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_KEY_FILE_CHARACTERS + 1)
        if len(text) > _KEY_FILE_CHARACTERS:
            raise StartupError(
                f"--api-key-file {path}: it has more than {_KEY_FILE_CHARACTERS} characters"
            )
        if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
            raise StartupError(
                f"--api-key-file {path}: other users can write to it, and so add keys: chmod 600"
            )
        if stat.S_ISREG(mode) and mode & stat.S_IROTH:
            log.warning(
                "--api-key-file %s: other users of this machine can read it (chmod 600)", path
            )
        # Only at line feeds: at other separators `splitlines` would make two keys of one with a control character.
        for line in (it.strip(" \t\r") for it in text.split("\n")):
            if line and not line.startswith("#"):
                key, *options = re.split("[ \t]+", line)
                if any("=" not in option for option in options):
                    key = line  # as if it were one key, so that the message shows nothing of it
                check_keys((*keys, key))
                limits = _read_limits(options, len(keys) + 1)
                if keys.setdefault(key, limits) != limits:
                    raise refusal(f"key {len(keys)} is given before with other limits")
    except (OSError, UnicodeDecodeError, PydanticCustomError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, UnicodeDecodeError):
            reason = "it is not UTF-8"
        raise StartupError(f"--api-key-file {path}: {reason}") from None
    if not keys:
        raise StartupError(f"--api-key-file {path}: the file has no key")
    return keys


def _read_limits(options: Sequence[str], number: int) -> KeyLimits:
    """Read what follows a key on its line.

    Raises:
        PydanticCustomError: an option or a value is not known. The message does not show the key.
    """
    values: dict[str, int] = {}
    for option in options:
        name, _, text = option.partition("=")
        if name not in _KEY_LIMITS:
            raise refusal(f"key {number}: {name!r} must be one of {', '.join(_KEY_LIMITS)}")
        if name in values:
            raise refusal(f"key {number}: {name} is given twice")
        least, most = _KEY_LIMITS[name]
        if not re.fullmatch(r"-?[0-9]{1,10}", text) or not least <= int(text) <= most:
            raise refusal(
                f"key {number}: {name} must be a whole number from {least} to {most}. Given: {text}"
            )
        values[name] = int(text)
    return KeyLimits(**values)


def check_tracing(settings: Settings) -> None:
    """Check that the packages for `--otlp-endpoint` are installed, if it is given.

    Raises:
        StartupError: they are not.
    """
    if settings.otlp_endpoint is not None and not all(map(_is_installed, _TRACING_PACKAGES)):
        raise StartupError(
            "--otlp-endpoint needs the packages of the extra `otel`: pip install 'tessera[otel]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


def engine_environments(settings: Settings) -> Sequence[Mapping[str, str]]:
    """Return the engine processes of a service: for each, the variables of its environment that make it use its GPU.

    On a CPU they have none; there the engines share processors and memory.

    Raises:
        StartupError: there are fewer GPUs than engines.
    """
    wanted = settings.data_parallel
    if wanted == 1:
        return ({},)
    num_gpus = count_gpus() if settings.device != "cpu" and may_have_gpu() else 0
    if wanted is None:
        wanted = max(1, num_gpus)
    if wanted == 1:
        return ({},)
    if num_gpus or settings.device == "cuda":
        if wanted > num_gpus:
            raise StartupError(
                f"--data-parallel {wanted}: each engine needs a GPU of its own, and {num_gpus} "
                f"{'is' if num_gpus == 1 else 'are'} visible (CUDA_VISIBLE_DEVICES chooses among those of the machine)"
            )
        return tuple(gpu_variables(number) for number in range(wanted))
    return ({},) * wanted
