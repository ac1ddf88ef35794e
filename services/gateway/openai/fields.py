"""Fields of OpenAI's requests, in one table. A field outside the table is refused, or ignored where so configured.

A field for a sampling parameter of the contract needs one line in SAMPLING to be served.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from ringserve.cp_core.errors import InvalidRequest
from ringserve.orchestration.protocol.turns import MAX_PRIORITY

Reader = Callable[[str, Any], Any]
"""Reader of a field: takes its name and JSON value, returns the contract's value. Raises InvalidRequest."""


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name}: {shown(value)} is not allowed; give a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest(f"{name}: the number is too large") from None


@cache
def integer(bits: int) -> Reader:
    """Return a reader of whole numbers from 0 that fit in `bits` bits."""

    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << bits:
            raise InvalidRequest(f"{name}: {shown(value)} is not allowed; give a whole number from 0 to {2**bits - 1}")
        return value

    return read


def priority(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_PRIORITY:
        raise InvalidRequest(
            f"{name}: {shown(value)} is not allowed; give a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    return value


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}: {shown(value)} is not allowed; give true or false")
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}: {shown(value)} is not allowed; give a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name}: holds half a surrogate pair, which is no character") from None
    return value


def token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{name}: {shown(value)} is not allowed; give a list of token ids")
    if all(type(item) is int and 0 <= item < 1 << 32 for item in value):
        return value  # a million of them in one go
    read = integer(32)
    return [read(f"{name}[{place}]", item) for place, item in enumerate(value)]


def stops(name: str, value: Any) -> list[str]:
    """Read a string or a list of strings."""
    if not isinstance(value, list):
        return [text(name, value)]
    return [text(f"{name}[{place}]", item) for place, item in enumerate(value)]


def top_k(name: str, value: Any) -> int:
    """Read a token limit; vLLM's clients write -1 for all tokens."""
    return 0 if value == -1 and not isinstance(value, bool) else int(integer(32)(name, value))


def logit_bias(name: str, value: Any) -> dict[int, float]:
    """Read biases by token id; keys of JSON are strings."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: {shown(value)} is not allowed; give an object of token ids and numbers")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest(f"{name}: {shown(key)} is no token id")
        biases[int(key)] = number(f"{name}[{key}]", bias)
    return biases


def shown(value: Any) -> str:
    """Quote a value for a message as JSON, a string in single quotes, and never at length."""
    words = repr(value) if isinstance(value, str) else json.dumps(value)
    return words if len(words) <= 60 else f"{words[:56]} ..."


SAMPLING: dict[str, tuple[str, Reader]] = {
    "temperature": ("temperature", number),
    "max_tokens": ("max_tokens", integer(32)),
    "max_completion_tokens": ("max_tokens", integer(32)),
    "seed": ("seed", integer(64)),
    "stop_token_ids": ("stop_token_ids", token_ids),
    "ignore_eos": ("ignore_eos", boolean),
    "top_p": ("top_p", number),
    "top_k": ("top_k", top_k),
    "min_p": ("min_p", number),
    "presence_penalty": ("presence_penalty", number),
    "frequency_penalty": ("frequency_penalty", number),
    "repetition_penalty": ("repetition_penalty", number),
    "logit_bias": ("logit_bias", logit_bias),
    "min_tokens": ("min_tokens", integer(32)),
    "stop": ("stop", stops),
    "include_stop_str_in_output": ("include_stop_str_in_output", boolean),
    "skip_special_tokens": ("skip_special_tokens", boolean),
    "n": ("n", integer(32)),
}
"""Sampling fields: name -> (field of SamplingParams, reader)."""

OURS: dict[str, Reader] = {
    "conversation_id": text,
    "request_id": text,
    "priority": priority,
    "no_cache": boolean,
    "expected_tokens": integer(32),
    "max_loss": number,
    "max_ttft": number,
}
"""Fields of the contract that OpenAI's requests lack; clients send them as extra fields (`extra_body`)."""

CACHE_KEYS = ("prompt_cache_key", "user")
"""Fields of OpenAI's requests for the contract's `cache_key`; the first one that is not empty counts."""

INERT = frozenset(
    {
        "metadata",
        "safety_identifier",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
    }
)
"""Fields without effect on the answer."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "moderation": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Unsupported fields -> values that change nothing and are accepted. null always is."""


def unknown_names(body: dict[str, Any], own: frozenset[str]) -> list[str]:
    """Return the names of unknown fields. `own` are the fields that only this kind of request has.

    Raises InvalidRequest for a known field with a value that is not served.
    """
    unknown = []
    for name, value in body.items():
        if name in own or name in SAMPLING or name in OURS or name in CACHE_KEYS or name in INERT:
            continue
        if name not in NEUTRAL:
            unknown.append(name)
            continue
        allowed = NEUTRAL[name]
        if not any(_same(value, item) for item in allowed):
            choice = " or ".join(repr(item) for item in allowed)
            raise InvalidRequest(
                f"{name}: {shown(value)} is not supported; " + (f"allowed is {choice}" if allowed else "leave it out")
            )
    return unknown


def _same(value: Any, item: Any) -> bool:
    """Return whether values are equal; 1 equals 1.0, and differs from true."""
    return bool(value == item) and isinstance(value, bool) == isinstance(item, bool)
