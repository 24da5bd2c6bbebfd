"""Errors that the user of a model can correct.

    ModelError
    ├── ModelFolderError        a file or a value of the checkpoint is missing, broken or outside its limits
    ├── UnsupportedModelError   a valid checkpoint needs a feature that is not supported
    ├── WeightsError            the tensors do not fit the configuration
    ├── AdapterError            an adapter does not fit the model, or cannot be used
    ├── TokenizerError          the tokenizer cannot be loaded, or cannot take this text or id
    ├── ChatTemplateError       the chat template cannot be used, or rejects these messages
    │   └── ChatTemplateLimitError  it takes too much time or memory
    └── GrammarError            a grammar for structured output cannot be used

The messages name the file, the value and the limit.
"""

from __future__ import annotations

import re
from typing import Final

PICKLE_ADVICE: Final = (
    "a pickle can run code, so it is refused: convert the checkpoint to safetensors, or set --load-format pickle, which"
    " reads tensors alone, if you trust the author"
)
"""What to do about weights as pickle files; the end of a sentence."""

_PATH: Final = re.compile(r"""(?:^|[\s'"`(=])[/~]\S""")


def without_paths(reason: str, folder: str) -> str:
    """Return why files cannot be used, without paths of this machine, for those who may not know them.

    Args:
        reason: a message that names the files.
        folder: that has them, absolute.
    """
    shown = reason.replace(f"{folder}/", "").replace(folder, "the folder")
    return "its files cannot be used; the log has the reason" if _PATH.search(shown) else shown


class ModelError(Exception):
    """Base class of all model errors.

    Example:
        >>> async def main() -> None:
        ...     try:
        ...         async with embedded_service(Settings(model="/no/such/folder")):
        ...             pass
        ...     except ModelError as error:
        ...         print(type(error).__name__)
        >>> asyncio.run(main())
        ModelFolderError
    """


class ModelFolderError(ModelError):
    """The model cannot be found, or one of its files or values cannot be used."""


class UnsupportedModelError(ModelError):
    """The checkpoint needs an architecture or a feature that is not supported."""


class WeightsError(ModelError):
    """Tensors are missing, unexpected, wrongly shaped, or their files are damaged."""


class AdapterError(ModelError):
    """An adapter is damaged, does not fit the model, or needs a feature that is not supported."""


class TokenizerError(ModelError):
    """The checkpoint's tokenizer cannot be used, or cannot encode this text or decode this id."""


class ChatTemplateError(ModelError):
    """The chat template cannot be used, or cannot render these messages."""


class ChatTemplateLimitError(ChatTemplateError):
    """The chat template takes too much time or memory."""


class GrammarError(ModelError):
    """A grammar is not valid, needs something that is not supported, or is too costly."""
