"""Computes the outputs of receipts with a running service, by requests to /v1/completions.

Each reply has a receipt itself, which says what the service was asked for: an output whose parameters such a request
cannot state is refused, instead of being compared with another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET

from model.sampling.parameters import NUMBERS
from server.cli.client.http_client import Client, RequestError, Target
from server.engine.core.request import FinishReason
from server.receipts.comparison import Computed, LogprobDigests
from server.receipts.record import OUTSIDE, ReceiptError, read_receipt, sampling_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from model.sampling.parameters import SamplingParams
    from server.cli.replay.work import Task
    from server.receipts.record import Conditions, Receipt

_STREAMS: Final = 32
_PATH: Final = "/v1/completions"
_OK: Final = 200
_BUSY: Final = (429, 503)
_MOST_PAUSES: Final = 30
_PAUSE_SECONDS: Final = 1.0
_SIGNED: Final = 2**63


def replay(
    target: Target,
    tasks: Sequence[Task],
    on_conditions: Callable[[Conditions, str], None],
    on_done: Callable[[], None],
) -> None:
    """Compute tasks, several together.

    Args:
        target: the service.
        tasks: to compute.
        on_conditions: called before anything is computed with what computes there, and why no request is deterministic
            there; the latter is empty if some are.
        on_done: called when a task is done.

    Raises:
        RequestError: there is no service with receipts.
    """
    asyncio.run(_replay(target, tasks, on_conditions, on_done))


async def _replay(
    target: Target,
    tasks: Sequence[Task],
    on_conditions: Callable[[Conditions, str], None],
    on_done: Callable[[], None],
) -> None:
    client = Client(target)
    with contextlib.closing(client):
        plan = await client.request("GET", "/plan")
        why = _why_not_deterministic(plan.body)
        on_conditions((await _probe(client)).conditions, why)
        waiting = iter(tasks)

        async def stream() -> None:
            for task in waiting:
                task.computed = await _compute(client, task, deterministic=not why)
                on_done()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(_STREAMS, len(tasks))):
                group.create_task(stream())


async def _probe(client: Client) -> Receipt:
    """Return a receipt of the service, which has its conditions."""
    status, reply = await _post(client, {"prompt": [0], "max_tokens": 1, "receipt": True})
    try:
        if status == _OK:
            return read_receipt(reply.get("receipt"))
    except ReceiptError as error:
        raise RequestError(
            "the service makes no receipts that this version reads", str(error)
        ) from None
    raise RequestError(f"POST {_PATH} has status {status}", _message(reply))


async def _compute(client: Client, task: Task, *, deterministic: bool) -> Computed:
    if (digest := task.receipt.conditions.adapter) is not UNSET:
        return Computed(
            error=f"a service cannot be asked for adapter {digest:.71} by its digest; leave out --url, and give it with"
            " --lora-modules"
        )
    sampling, count = task.sampling, len(task.output.token_ids)
    if task.output.finish_reason in OUTSIDE:
        # Log-probabilities have one digest, so that no token may follow.
        sampling = _with_limit(sampling, max(1, count))
    body = _body(sampling) | {
        "prompt": task.prompt,
        "receipt": True,
        "deterministic": True if deterministic and task.receipt.deterministic else None,
    }
    status, reply = await _post(client, body)
    if status != _OK:
        return Computed(error=f"the service refuses it with status {status}: {_message(reply)}")
    try:
        receipt = read_receipt(reply.get("receipt"))
        (output,) = receipt.outputs
    except ValueError as error:
        return Computed(error=f"the service returns no receipt of one output: {error}")
    asked = sampling_of(receipt, output)
    if receipt.prompts != [task.prompt] or asked != sampling:
        names = [
            it for it in asked.__struct_fields__ if getattr(asked, it) != getattr(sampling, it)
        ]
        return Computed(
            error=f"a service cannot be asked for its {', '.join(names) or 'prompt'}; leave out --url"
        )
    if output.finish_reason in OUTSIDE:
        return Computed(error=f"the service ended it by {output.finish_reason}")
    return Computed(
        token_ids=output.token_ids,
        digests=LogprobDigests(output.logprobs, output.prompt_logprobs),
        finish_reason=FinishReason[output.finish_reason.upper()],
    )


def _body(sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request that has these parameters, as far as there are such fields."""
    body: dict[str, Any] = {name: getattr(sampling, name) for name in NUMBERS}
    seed = sampling.seed
    body |= {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "seed": seed if seed < _SIGNED else seed - 2 * _SIGNED,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.eos_token_ids,
        "echo": sampling.prompt_logprobs,
    }
    if sampling.wants_logprobs:
        body["logprobs"] = sampling.top_logprobs
    return body


def _with_limit(sampling: SamplingParams, limit: int) -> SamplingParams:
    return msgspec.structs.replace(sampling, max_new_tokens=limit)


async def _post(client: Client, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Post a body, again while the service is busy; return status and JSON of the reply.

    Raises:
        RequestError: there is no reply.
    """
    content = json.dumps(body).encode()
    response = await client.request("POST", _PATH, content)
    for _ in range(_MOST_PAUSES):
        if response.status not in _BUSY:
            break
        await asyncio.sleep(_PAUSE_SECONDS)
        response = await client.request("POST", _PATH, content)
    try:
        reply = json.loads(response.body)
    except ValueError:
        reply = None
    return response.status, reply if isinstance(reply, dict) else {}


def _message(reply: dict[str, Any]) -> str:
    error = reply.get("error")
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")


def _why_not_deterministic(plan: bytes) -> str:
    """Return why a service computes no request deterministically; empty if it does compute some so."""
    try:
        found = json.loads(plan)["deterministic"]
        return str(found["why"]) if found["requests"] == "none" else ""
    except (ValueError, KeyError, TypeError):
        return "the service has no GET /plan"
