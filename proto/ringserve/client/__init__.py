"""Python client, for threads (`Client`) and for asyncio (`AsyncClient`).

```python
with Client("127.0.0.1:50051") as client:
    tale = client.talk("tale")
    for piece in tale.stream("Once upon a time"):
        print(piece.text, end="", flush=True)
    print(tale.ask(" And then?").plan.reason)
```
"""

from ringserve.client.async_client import AsyncClient, AsyncConversation
from ringserve.client.channel import TlsFiles
from ringserve.client.requests import Message, Prompt, Sampling
from ringserve.client.results import Answer, Piece, Plan, TokenLogprobs, Usage
from ringserve.client.retries import RetryPolicy
from ringserve.client.sync_client import Client, Conversation
from ringserve.views import Aborted, ConversationInfo, ConversationSummary, ModelInfo, RingInfo, ServerInfo

__all__ = [
    "Aborted",
    "Answer",
    "AsyncClient",
    "AsyncConversation",
    "Client",
    "Conversation",
    "ConversationInfo",
    "ConversationSummary",
    "Message",
    "ModelInfo",
    "Piece",
    "Plan",
    "Prompt",
    "RetryPolicy",
    "RingInfo",
    "Sampling",
    "ServerInfo",
    "TlsFiles",
    "TokenLogprobs",
    "Usage",
]
