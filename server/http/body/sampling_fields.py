"""The sampling parameters that request bodies of all dialects have, under the same names and with the same meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from model.sampling.parameters import SamplingParams
from server.http.body.field_types import BadWords, LogitBias, StopTokenIds
from server.http.body.limits import MAX_BAD_WORD_CHARACTERS, given, logit_biases
from server.http.body.request_options import RequestOptionFields

if TYPE_CHECKING:
    from model.checkpoint.generation_config import SamplingDefaults
    from server.engine.core.messages import EngineInfo
    from server.http.config import HTTPConfig


class CommonSamplingFields(RequestOptionFields):
    """The fields; bodies of dialects inherit them. Null means the default."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Sample from the most likely tokens that together have this probability."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="Sample from tokens at least this likely, relative to the most likely one.",
    )
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Sample from the locally typical tokens that together have this probability.",
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        None,
        description="Divides the positive and multiplies the negative logits of tokens seen so "
        "far; 1 is off.",
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None, description="Subtracted from a token's logit once for each time it was generated."
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None, description="Subtracted once from the logit of every token that was generated."
    )
    logit_bias: LogitBias | None = Field(
        None,
        description="Numbers to add to the logits of tokens, by token id, before penalties and "
        "`temperature`. -100 and 100 in effect ban and force a token.",
    )
    bad_words: BadWords | None = Field(
        None,
        description=f"Words, of up to {MAX_BAD_WORD_CHARACTERS} characters, to ban: the tokens of each word, "
        "with and without a space before it, are not generated in sequence.",
    )
    stop_token_ids: StopTokenIds | None = Field(None, description="Token ids that end the text.")
    ignore_eos: bool | None = Field(
        None, description="Continue after the model's end-of-sequence token."
    )

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
            own: the parameters whose fields differ between dialects.

        Raises:
            ValidationError: a key of `logit_bias` is not a token id.
        """
        return SamplingParams(
            max_new_tokens=1,
            top_p=given(self.top_p, defaults.top_p),
            min_p=given(self.min_p, defaults.min_p),
            typical_p=given(self.typical_p, defaults.typical_p),
            repetition_penalty=given(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=given(self.presence_penalty, 0.0),
            frequency_penalty=given(self.frequency_penalty, 0.0),
            logit_bias=logit_biases(self.logit_bias or {}, info),
            eos_token_ids=() if self.ignore_eos else config.eos_token_ids,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **own,
        )
