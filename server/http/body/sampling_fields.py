"""The sampling parameters that request bodies of all dialects have, under the same names and with the same meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field, create_model

from model.sampling.parameters import NUMBERS, SamplingDefaults, SamplingParams
from server.docstrings import attribute_texts
from server.http.body.field_types import BadWords, LogitBias, StopTokenIds, optional
from server.http.body.limits import MAX_BAD_WORD_CHARACTERS, SMALLEST_TEMPERATURE, logit_biases
from server.http.body.request_options import RequestOptionFields

if TYPE_CHECKING:
    from server.engine.core.messages import EngineInfo
    from server.http.config import HTTPConfig

SMALLEST: Final = f"; else at least {SMALLEST_TEMPERATURE}"
"""Note of the field `temperature`."""
_TEXTS: Final = attribute_texts(SamplingDefaults) | attribute_texts(SamplingParams)
# Their limits differ between dialects.
_DECLARED_BY_DIALECTS: Final = ("temperature", "top_k")


def number(name: str, note: str = "", **limits: int | float) -> Any:  # noqa: ANN401 - as pydantic's `Field`
    """Return the description and the limits of the field of a sampling parameter that is a number.

    Args:
        name: of the parameter.
        note: that ends the description.
        limits: `ge`, `gt` and `le`, where they differ from the parameter's own.
    """
    options: dict[str, Any] = NUMBERS[name].limits | limits
    return Field(description=f"{_TEXTS[name].removesuffix('.')}{note}.", **options)


if TYPE_CHECKING:
    _Numbers = RequestOptionFields
else:
    _Numbers = create_model(
        "_Numbers",
        __base__=RequestOptionFields,
        **{
            name: (Annotated[it.type | None, number(name)], None)
            for name, it in NUMBERS.items()
            if name not in _DECLARED_BY_DIALECTS
        },
    )


class CommonSamplingFields(_Numbers):
    """The fields; bodies of dialects inherit them. Null means the default."""

    logit_bias: LogitBias | None = optional(
        "Numbers to add to the logits of tokens, by token id, before penalties and "
        "`temperature`. -100 and 100 in effect ban and force a token."
    )
    bad_words: BadWords | None = optional(
        f"Words, of up to {MAX_BAD_WORD_CHARACTERS} characters, to ban: the tokens of each word, "
        "with and without a space before it, are not generated in sequence."
    )
    stop_token_ids: StopTokenIds | None = optional("Token ids that end the text.")
    ignore_eos: bool | None = optional("Continue after the model's end-of-sequence token.")

    def sampling_params(
        self,
        config: HTTPConfig,
        info: EngineInfo,
        defaults: SamplingDefaults,
        **own: Any,  # noqa: ANN401 - the fields of `SamplingParams`
    ) -> SamplingParams:
        """Make sampling parameters with `max_new_tokens` 1, which depends on the prompt, and without `bad_words`.

        Args:
            config: the model's end tokens.
            info: limits of the engine.
            defaults: of fields that the request leaves out.
            own: parameters that the dialect determines itself.

        Raises:
            ValidationError: a key of `logit_bias` is not a token id.
        """
        numbers: dict[str, Any] = {}
        for name, it in NUMBERS.items():
            given = getattr(self, name)
            numbers[name] = getattr(defaults, name, it.neutral) if given is None else given
        numbers["top_k"] = min(max(numbers["top_k"], 0), info.vocab_size)
        return SamplingParams(
            max_new_tokens=1,
            logit_bias=logit_biases(self.logit_bias or {}, info),
            eos_token_ids=() if self.ignore_eos else config.eos_token_ids,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **numbers | own,
        )
