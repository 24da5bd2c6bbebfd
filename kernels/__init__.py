"""The names of `kernels.api`, which is imported when the first of them is used that is not in `RECORDS`.

So modules that only need records such as `kernels.weight_format` do not import PyTorch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.api import *  # noqa: F403
else:
    RECORDS = {"AttentionProblem": "attention.problem", "Phase": "attention.problem"}
    """Names whose modules do without PyTorch."""

    def __getattr__(name: str) -> object:
        if name in RECORDS:
            return getattr(importlib.import_module(f"{__name__}.{RECORDS[name]}"), name)
        api = importlib.import_module(f"{__name__}.api")
        globals().update({public: getattr(api, public) for public in api.__all__})
        return getattr(api, name)
