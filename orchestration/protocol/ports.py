"""Ports of the control plane to ranks, rings and the router.

`services` implements the ring and router ports over gRPC, `orchestration.ring.actors` the rank port over Ray; in tests,
leaders and rank workers of the same process stand in for them. The router, leaders and gateways call the ports.
Protocols only: they have no state.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Literal, Protocol, overload

from ringserve.cp_core.errors import RingserveError
from ringserve.orchestration.protocol.inventory import UNKNOWN_EPOCH, KnownEpoch, Registered
from ringserve.orchestration.protocol.turns import (
    Admit,
    BegunTurn,
    ForkedKv,
    ForkKv,
    KvQuota,
    PrefillDone,
    PrefillTurn,
    Reservation,
    Reserve,
    ResumeTurn,
    RetainedKv,
    RingRegistration,
    SendKv,
    SentKv,
    TakeKv,
    TakenKv,
    TurnEvent,
    TurnOutcome,
    TurnRequest,
)
from ringserve.views import ConversationInfo, ConversationPage, RingInfo, RingRates, ServerInfo
from ringserve.workers.protocol.ranks import RankEndpoints, RankInfo, RankSpec, RankStatus, RingSpec
from ringserve.workers.protocol.steps import DecodeCommand, DecodeEvents, PrefillOutput, PrefillStep
from ringserve.workers.protocol.transfers import BlockPair, KvExpect, KvSend, TransferKey, TransferReport


class RankPort(Protocol):
    """One rank. Every call has a deadline in seconds and raises Unavailable when the rank is gone."""

    async def start(self, spec: RankSpec, timeout: float) -> RankInfo: ...

    async def renew(self, spec: RankSpec, timeout: float) -> RankInfo:
        """Leave the ring, and begin another incarnation of it at the same place with the loaded model.

        After the return nothing of the old incarnation is written or read. Raises Unavailable if that cannot be
        guaranteed.
        """

    async def open_endpoints(self, timeout: float) -> RankEndpoints: ...
    async def join(self, ring: RingSpec, timeout: float) -> None: ...
    async def probe(self, timeout: float) -> RingRates: ...
    async def probe_between_steps(self, timeout: float) -> RingRates: ...
    async def prefill(self, step: PrefillStep, timeout: float) -> PrefillOutput: ...

    async def prefill_within(self, step: PrefillStep, timeout: float) -> PrefillOutput | None:
        """Compute a step between two layers of the running step `step.within`.

        Returns None if that one has ended already. All ranks answer None, or none does. The caller lets at most one
        such step wait at a time.
        """

    async def finish_sends(self, key: TransferKey, timeout: float) -> TransferReport: ...
    async def abandon_send(self, key: TransferKey, timeout: float) -> None: ...
    async def send_kv(self, send: KvSend, timeout: float) -> TransferReport: ...
    async def expect_kv(self, expect: KvExpect, timeout: float) -> None: ...
    async def await_kv(self, key: TransferKey, timeout: float) -> TransferReport: ...
    async def drop_kv(self, key: TransferKey, timeout: float) -> None: ...
    async def copy_blocks(self, pairs: Sequence[BlockPair], timeout: float) -> None: ...
    async def prepare_grammar(self, grammar: str, timeout: float) -> None:
        """Compile a grammar while steps go on, before one needs it.

        For its first grammar a rank also reads the tokenizer.
        """

    async def submit(self, commands: Sequence[DecodeCommand], timeout: float) -> None: ...
    async def poll(self, after: int, wait_seconds: float, timeout: float) -> DecodeEvents: ...
    async def status(self, timeout: float) -> RankStatus: ...

    async def run_decode(self) -> None:
        """Run the decode loop until the rank stops or fails. It has no deadline: the ring's watchdog looks after it."""

    async def remember(self, note: object, timeout: float) -> None:
        """Keep `note`, the leader's measurements, for a later leader that takes this rank over."""

    async def recall(self, timeout: float) -> object:
        """Return the note of the last `remember`, or None."""

    async def kill(self) -> None:
        """End the rank's process for good. Never raises."""


class RankFactory(Protocol):
    """Makes the ranks of one ring, all or none, and frees their resources.

    Each tensor parallel process counts as a rank here.
    """

    async def create(self, num_ranks: int, timeout: float) -> Sequence[RankPort]: ...

    async def adopt(self, num_ranks: int) -> Sequence[RankPort]:
        """Return the ranks of this ring that a dead leader left; the caller renews them. Empty if there are none."""

    async def replace(self, lost: Sequence[int], timeout: float) -> Sequence[RankPort]:
        """Kill the lost ranks of the present ring and make others in their places. Return all ranks of the ring.

        Raises Unavailable.
        """

    async def close(self) -> None: ...


class PrefillPort(Protocol):
    """Prefill ring leader. A decode leader has these methods too: it may compute a prompt itself."""

    async def reserve(self, request: Reserve) -> Reservation: ...
    async def prefill(self, turn: PrefillTurn) -> PrefillDone: ...
    async def abort_turn(self, turn_id: str, error: RingserveError) -> None: ...
    async def settle(self, kv_id: str, turn_id: str, retain_tokens: int) -> None: ...
    async def send_kv(self, request: SendKv) -> SentKv: ...
    async def take_kv(self, request: TakeKv) -> TakenKv: ...
    async def fork_kv(self, request: ForkKv) -> ForkedKv: ...
    async def get_retained(self, kv_ids: Sequence[str]) -> RetainedKv: ...
    async def drain(self, seconds: float) -> None: ...
    async def undrain(self) -> None: ...
    async def get_status(self) -> RingInfo: ...


class DecodePort(PrefillPort, Protocol):
    """Decode ring leader."""

    async def admit(self, admit: Admit) -> None: ...
    def stream_turn(self, turn_id: str, after: int = 0, interval: float = 0.0) -> AsyncGenerator[TurnEvent, None]:
        """Yield a turn's events after its first `after` tokens; tokens come at least `interval` seconds apart."""
        ...

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None: ...


class RouterPort(Protocol):
    """The router."""

    async def begin_turn(self, request: TurnRequest) -> BegunTurn: ...
    async def resume_turn(self, request: ResumeTurn) -> None: ...
    async def end_turn(self, outcome: TurnOutcome) -> int: ...
    async def abort_requests(self, request_ids: Sequence[str], reader: str = "") -> tuple[list[str], list[str]]: ...
    async def get_conversation(self, conversation_id: str) -> ConversationInfo: ...
    async def list_conversations(self, prefix: str, after: str, limit: int) -> ConversationPage: ...
    async def fork_conversation(
        self, source_id: str, new_id: str, at_token: int | None, kv_quota: KvQuota | None = None
    ) -> ConversationInfo: ...
    async def delete_conversation(self, conversation_id: str) -> None: ...
    async def register_ring(self, ring: RingRegistration, known: KnownEpoch = UNKNOWN_EPOCH) -> Registered: ...
    async def drain_ring(self, name: str, seconds: float, *, force: bool = False) -> None: ...
    async def restart_ring(self, name: str, seconds: float, *, leaving_node: str = "") -> None: ...
    async def undrain_ring(self, name: str) -> None: ...
    async def get_server_info(self) -> ServerInfo: ...

    async def find_fault(self) -> str:
        """Return one sentence on why no turns should be sent to the service; empty if it serves.

        The answer comes from the rings' announcements; no ring is asked.
        """


class Peers(Protocol):
    """Directory of ring leaders by role and endpoint (HOST:PORT)."""

    @overload
    def leader(self, role: Literal["decode"], endpoint: str) -> DecodePort: ...
    @overload
    def leader(self, role: str, endpoint: str) -> PrefillPort: ...
