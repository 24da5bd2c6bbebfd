"""Attention for PyTorch, a text-generation service inside a program, and a client of a running service.

    from tessera import flash_attention            # needs no GPU; `tessera.kernels` has more
    from tessera import Settings, embedded_service
    from tessera import AsyncClient, Client

Each name is imported when it is first used, so that importing `tessera` costs nothing: a client needs no PyTorch.

A wheel contains `tessera.kernels`, `tessera.model` and `tessera.server`, because the name `kernels` belongs to a
package of Hugging Face as well (docs/decisions/0040-one-top-level-package.md). In a source tree they are top-level
packages, and `tessera.kernels` is another name of the same module `kernels`, so that programs import the same names
from both.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

    # For type checkers, the same names as in `_MODULES`.
    # isort: off
    # fmt: off
    from kernels.api import (
        AttentionPlan as AttentionPlan, AttentionProblem as AttentionProblem, BlockMask as BlockMask,
        KernelError as KernelError, PackedBatch as PackedBatch, PagedBatch as PagedBatch, Phase as Phase,
        decode_attention as decode_attention, flash_attention as flash_attention,
        memory_efficient_attention as memory_efficient_attention, plan_attention as plan_attention,
        prefill_attention as prefill_attention, ring_attention as ring_attention,
        scaled_dot_product_attention as scaled_dot_product_attention, write_kv as write_kv,
    )
    from model.errors import ModelError as ModelError
    from server.client.async_client import AsyncClient as AsyncClient
    from server.client.chat_records import (
        CalledFunction as CalledFunction, ChatChoice as ChatChoice, ChatChunk as ChatChunk,
        ChatChunkChoice as ChatChunkChoice, ChatDelta as ChatDelta, ChatLogprobs as ChatLogprobs,
        ChatMessage as ChatMessage, ChatReply as ChatReply, ChatUsage as ChatUsage,
        CompletionTokensDetails as CompletionTokensDetails,
        PromptTokensDetails as PromptTokensDetails, TokenLogprob as TokenLogprob, ToolCall as ToolCall,
        ToolCallDelta as ToolCallDelta, TopLogprob as TopLogprob,
    )
    from server.client.errors import (
        ServiceConnectionError as ServiceConnectionError, ServiceError as ServiceError,
        ServiceStatusError as ServiceStatusError, ServiceTimeoutError as ServiceTimeoutError,
    )
    from server.client.parameters import (
        ChatParameters as ChatParameters, GenerateParameters as GenerateParameters,
    )
    from server.client.records import (
        BestOfSequence as BestOfSequence, Details as Details, GenerateReply as GenerateReply, Health as Health,
        PromptSpan as PromptSpan, PromptToken as PromptToken, StreamDetails as StreamDetails,
        StreamEvent as StreamEvent, Token as Token, Usage as Usage,
    )
    from server.client.streams import AsyncStream as AsyncStream, Stream as Stream
    from server.client.sync_client import Client as Client
    from server.embedding import (
        EmbeddedService as EmbeddedService, Settings as Settings, embedded_service as embedded_service,
    )
    from server.engine.core.plan_report import PlanReport as PlanReport
    from server.engine.core.start_checks import StartupError as StartupError
    from server.engine.link.child_process import ChildStartError as ChildStartError
    # fmt: on
    # isort: on

    __version__: str

PACKAGES: Final = ("kernels", "model", "server")
_MODULES: Final = {
    "kernels.api": """
        flash_attention scaled_dot_product_attention memory_efficient_attention ring_attention BlockMask
        plan_attention prefill_attention decode_attention write_kv AttentionProblem AttentionPlan
        PackedBatch PagedBatch Phase KernelError
    """,
    "server.embedding": "embedded_service EmbeddedService Settings",
    "model.errors": "ModelError",
    "server.engine.core.start_checks": "StartupError",
    "server.engine.link.child_process": "ChildStartError",
    "server.client.sync_client": "Client",
    "server.client.async_client": "AsyncClient",
    "server.client.streams": "Stream AsyncStream",
    "server.client.errors": """
        ServiceError ServiceStatusError ServiceConnectionError ServiceTimeoutError
    """,
    "server.client.parameters": "GenerateParameters ChatParameters",
    "server.client.records": """
        GenerateReply Details BestOfSequence PromptToken Token StreamEvent StreamDetails Usage PromptSpan
        Health
    """,
    "server.client.chat_records": """
        ChatReply ChatChoice ChatMessage ToolCall CalledFunction ChatUsage PromptTokensDetails
        CompletionTokensDetails ChatLogprobs TokenLogprob TopLogprob ChatChunk ChatChunkChoice ChatDelta ToolCallDelta
    """,
    "server.engine.core.plan_report": "PlanReport",
}
"""The public names, by the module that has them: the one table of what programs may import from `tessera`."""
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604 - texts, which the linter cannot see


class _SourceTree(MetaPathFinder, Loader):
    """Finds `tessera.x` as the module `x`, which is imported once, under its own name."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return a spec if the name is that of one of our packages or inside of one."""
        del path, target
        parent, _, name = fullname.partition(".")
        if parent != __name__ or name.partition(".")[0] not in PACKAGES:
            return None
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code, for `python -m tessera.server.ray.main`."""
        found = importlib.util.find_spec(fullname.removeprefix(f"{__name__}."))
        loader = None if found is None else found.loader
        return loader.get_code(found.name) if found and isinstance(loader, InspectLoader) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its own name."""
        module = importlib.import_module(spec.name.removeprefix(f"{__name__}."))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore what the import system changed: the module has run."""
        spec = module.__spec__
        assert spec is not None  # noqa: S101 - the import system has just set it
        module.__spec__ = spec.loader_state


if not Path(__file__).with_name(PACKAGES[0]).is_dir():
    # First, because the paths of our packages would otherwise be searched for modules of a second name.
    sys.meta_path.insert(0, _SourceTree())


if not TYPE_CHECKING:  # for a type checker, every name would exist

    def __getattr__(name: str) -> object:
        """Import a public name.

        Raises:
            AttributeError: it is none.
        """
        if name == "__version__":
            value: object = importlib.import_module("server.version").version()
        elif name in _MODULE_OF:
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value  # the next use does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
