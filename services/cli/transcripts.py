"""Messages of chats, one file for each conversation of this user: rings retain tokens, and the messages stay here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ringserve.client import Message
from ringserve.cp_core.errors import ConfigError
from ringserve.services.cluster.state import state_directory


def read_transcript(conversation: str) -> tuple[Message, ...] | None:
    """Return the messages of a conversation, None where this user has none of it. Raises ConfigError."""
    path = _path(conversation)
    try:
        return tuple(Message(**each) for each in json.loads(path.read_text(encoding="utf-8"))["messages"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"RINGSERVE_STATE: {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"--conversation: {path} is no transcript of a chat; remove it") from None


def write_transcript(conversation: str, messages: Sequence[Message]) -> None:
    """Write the messages of a conversation, readable for this user alone. Raises ConfigError."""
    path = _path(conversation)
    draft = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.touch(mode=0o600)
        content = {"conversation": conversation, "messages": [asdict(message) for message in messages]}
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"RINGSERVE_STATE: {path} cannot be written: {error.strerror}") from error


def remove_transcript(conversation: str) -> None:
    """Remove the messages of a conversation. Idempotent."""
    _path(conversation).unlink(missing_ok=True)


def _path(conversation: str) -> Path:
    """Return the file of a conversation: its id may hold characters that no file name can."""
    return state_directory() / "chats" / f"{hashlib.sha256(conversation.encode()).hexdigest()[:32]}.json"
