"""What can be wrong with a model, as exceptions a user can act on.

    ModelError
    ├── ModelFolderError        a file or a value of the checkpoint is missing, broken or absurd
    ├── UnsupportedModelError   a sound checkpoint that needs something Tessera does not have
    ├── WeightsError            the tensors do not fit the configuration
    └── TokenizerError          the tokenizer cannot be loaded, or cannot take this text or id

Knows neither HTTP nor exit codes; the texts name the file, the offending value and the limit.
"""

from __future__ import annotations


class ModelError(Exception):
    """Anything wrong with a model that its user can mend."""


class ModelFolderError(ModelError):
    """The model cannot be found, or one of its files or values cannot be used."""


class UnsupportedModelError(ModelError):
    """The checkpoint asks for an architecture or a feature outside the supported list."""


class WeightsError(ModelError):
    """Tensors are missing, unexpected, wrongly shaped, or their files are damaged."""


class TokenizerError(ModelError):
    """The checkpoint's tokenizer cannot be used, or it was given something that is not text."""
