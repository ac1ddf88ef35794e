"""Python client, for threads (`Client`) and for asyncio (`AsyncClient`).

```python
with Client("127.0.0.1:50051") as client:
    tale = client.talk("tale")
    for piece in tale.stream("Once upon a time"):
        print(piece.text, end="", flush=True)
    print(tale.ask(" And then?").plan.reason)
```
"""

from services.client.async_client import AsyncClient, AsyncConversation
from services.client.channel import TlsFiles
from services.client.requests import Message, Prompt, Sampling
from services.client.results import Answer, Piece, Plan, Usage
from services.client.retries import RetryPolicy
from services.client.sync_client import Client, Conversation

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncConversation",
    "Client",
    "Conversation",
    "Message",
    "Piece",
    "Plan",
    "Prompt",
    "RetryPolicy",
    "Sampling",
    "TlsFiles",
    "Usage",
]
