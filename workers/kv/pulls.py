"""Pulls between slots: a rank lends its out slots to peers, and reads peers' out slots into its landing slots.

The rank's sender and receiver share one `PullAgent`. One thread owns the NIXL agent, since calls from two threads hang
or crash it. NIXL's own thread is off, because it would occupy a core. A READ moves one descriptor. Then an 8-byte READ
fetches the slot's word: this READ fails if the first one left holes, and the word differs from the expected one if the
source has reused the slot.

A READ cannot be cancelled. If it outlives its owner, its landing slot is lent again only when the READ is over.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

import torch

from ringserve.cp_core.errors import ConfigError, TransferError, Unavailable
from ringserve.workers.kv.frames import CardFrame, SlotRef
from ringserve.workers.kv.nixl_agent import Disconnected, NixlAgent, NixlRead, Unfinished
from ringserve.workers.kv.staging import OutSlots, SlotPool

logger = logging.getLogger(__name__)

NUM_SLOTS = 8
PROBE_BYTES = 64
START_SECONDS = 60.0
# Time that `close` gives READs in progress. Then the agent is destroyed, which ends them.
CLOSE_SECONDS = 2.0
# A peer's first READ needs three or four progress calls of the source's agent. Later READs need none.
CONNECTING_SECONDS = 0.005
IDLE_SECONDS = 0.1
# First pause between polls of a READ in progress. Pauses grow with its age.
POLL_SECONDS = 50e-6
MAX_POLL_SECONDS = 0.002


class PullState(Enum):
    """State of a `Pull`; its docstring shows the transitions."""

    QUEUED = auto()
    READING = auto()
    LANDED = auto()
    FAILED = auto()
    LOST = auto()


class Peer:
    """Peer whose slots are read, from `PullAgent.meet` to `leave`. The agent's thread owns everything but the card."""

    def __init__(self, card: CardFrame) -> None:
        self.card = card
        self.pulls: deque[Pull] = deque()
        self.is_leaving = False
        self.is_lost = False


class Pull:
    """READ of one slot of a peer into a landing slot, from `PullAgent.pull` to `release`.

        QUEUED ──posted──> READING ──slot and word are read──> LANDED
           │                  ├──the peer is gone──> FAILED
           │                  └──any other error──> LOST: it may still land, so its slot is never lent again
           └──the peer is gone, or released──> FAILED

    The agent owns the landing slot until LANDED, then the caller until `release`. If the caller releases it earlier,
    the agent owns it until the READ is over. `PullAgent.changed` guards state, error and `is_released`.
    """

    def __init__(self, peer: Peer, ref: SlotRef, landing: int) -> None:
        self.peer = peer
        self.ref = ref
        self.landing = landing
        self.state = PullState.QUEUED
        self.error = ""
        self.is_released = False
        self.read: NixlRead | None = None
        self.reads_word = False
        self.posted_at = 0.0

    @property
    def is_over(self) -> bool:
        return self.state in (PullState.LANDED, PullState.FAILED, PullState.LOST)


class PullAgent:
    """A rank's out slots, landing slots and NIXL agent, from construction to `close`. Thread-safe.

    The agent is named after the rank's incarnation. With `is_required` (kv_transfer.carrier: nixl), a transfer to a
    peer that NIXL does not reach fails instead of using the socket. `make` makes the agent in the agent's thread.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        slot_bytes: int,
        num_slots: int = NUM_SLOTS,
        is_required: bool = False,
        make: Callable[[str, torch.device], NixlAgent] = NixlAgent,
    ) -> None:
        """Start. Raises ConfigError if NIXL cannot be loaded, Unavailable if its agent does not start."""
        self.name = f"{name}:{secrets.token_hex(4)}"
        self.device = device
        self.is_required = is_required
        self.out = OutSlots(num_slots, slot_bytes, device)
        self.landings = SlotPool(num_slots, num_slots)
        self.changed = threading.Condition()
        # The last landing slot is for probes. Nobody reads it.
        self._landing = torch.empty(num_slots * slot_bytes + PROBE_BYTES, dtype=torch.uint8, device=device)
        self._words = torch.zeros(num_slots + 1, dtype=torch.int64)
        self._metadata = b""
        self._error = ""
        self._refusal: ConfigError | None = None
        self._jobs: deque[Callable[[], None]] = deque()
        self._peers: dict[str, Peer] = {}
        self._waiting: list[Peer] = []
        self._lost: list[NixlRead] = []
        self._num_expected = 0
        self._is_closing = self._is_ended = False
        self._make = make
        self._thread = threading.Thread(target=self._run, name=f"nixl-{name}", daemon=True)
        self._thread.start()
        with self.changed:
            self.changed.wait_for(lambda: self._metadata or self._is_ended, START_SECONDS)
        if self._refusal is not None:
            raise self._refusal
        if not self._metadata:
            raise Unavailable(f"the NIXL agent of {name} does not start: {self._error or 'it does not answer'}")
        atexit.register(self.close)  # a process that exits while its agent exists aborts

    def card(self, destination: str) -> CardFrame:
        """Return this rank's card for an incarnation of another ring."""
        return CardFrame(
            destination=destination,
            agent=self.name,
            metadata=self._metadata,
            device=self.device.type,
            device_index=self.device.index or 0,
            slots_address=self.out.memory.data_ptr(),
            words_address=self.out.words.data_ptr(),
            slot_bytes=self.out.slot_bytes,
            num_slots=self.out.num_slots,
        )

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Call progress often inside the `with` block, while a peer connects to this agent."""
        self._put(lambda: self._expect(1))
        try:
            yield
        finally:
            self._put(lambda: self._expect(-1))

    def meet(self, card: CardFrame, seconds: float, is_stopped: Callable[[], bool]) -> Peer:
        """Connect to a peer by a first small READ.

        Raises ConnectionError if NIXL cannot reach it, TimeoutError after `seconds`.
        """
        peer = Peer(card)
        probe = Pull(peer, SlotRef(0, 0, PROBE_BYTES), self.out.num_slots)
        peer.pulls.append(probe)
        self._put(lambda: self._waiting.append(peer))
        try:
            self._await(probe, seconds, is_stopped)
        except OSError:
            self.leave(peer)
            raise
        finally:
            self.release(probe)
        return peer

    def pull(self, peer: Peer, ref: SlotRef, seconds: float, is_stopped: Callable[[], bool]) -> Pull:
        """Start reading a slot when a landing slot is free. Raises TransferError, Unavailable (`SlotPool.take`)."""
        card = peer.card
        if ref.number >= card.num_slots or ref.num_bytes > card.slot_bytes:
            raise TransferError(f"{ref.num_bytes} bytes of slot {ref.number} lie outside the source's card")
        pull = Pull(peer, ref, self.landings.take(peer, seconds, is_stopped))
        self._put(lambda: self._queue(pull))
        return pull

    def wait(self, pull: Pull, seconds: float, is_stopped: Callable[[], bool]) -> torch.Tensor:
        """Wait for the end of a READ. Return its bytes in the landing slot.

        Raises ConnectionError if the peer or the agent fails or `is_stopped` returns True (see `wake`), TimeoutError
        after `seconds`, TransferError if the source has reused the slot.
        """
        self._await(pull, seconds, is_stopped)
        word = int(self._words[pull.landing])
        if word != pull.ref.generation:
            raise TransferError(f"slot {pull.ref.number} was reused: generation {word}, expected {pull.ref.generation}")
        return self._landing_of(pull)

    def release(self, pull: Pull) -> None:
        """Give back a pull's landing slot. Call it once; the pull may be in any state."""
        with self.changed:
            pull.is_released = True
            if pull.is_over:
                self._retire(pull)

    def leave(self, peer: Peer) -> None:
        """Forget a peer once its READs are over. Idempotent."""
        self._put(lambda: setattr(peer, "is_leaving", True))

    def wake(self) -> None:
        """Make waits check their `is_stopped` again."""
        self.landings.wake()
        with self.changed:
            self.changed.notify_all()

    def check_usable(self) -> None:
        """Raise Unavailable if every landing slot is lost or the thread has ended: the rank must be replaced."""
        if self.landings.is_used_up:
            raise Unavailable(f"the NIXL agent {self.name} has no safe landing slot left")
        if self._is_ended and not self._is_closing:
            raise Unavailable(f"the NIXL agent {self.name} has ended: {self._error}")

    def close(self) -> None:
        """End the agent. READs in progress get CLOSE_SECONDS, then destroying the agent ends them. Idempotent."""
        atexit.unregister(self.close)
        self.out.close()
        self.landings.close()
        with self.changed:
            self._is_closing = True
            self.changed.notify_all()
        self._thread.join(START_SECONDS)

    def _await(self, pull: Pull, seconds: float, is_stopped: Callable[[], bool]) -> None:
        with self.changed:
            self.changed.wait_for(lambda: pull.is_over or self._is_ended or is_stopped(), seconds)
            if pull.error:
                raise ConnectionError(pull.error)
            if not pull.is_over:
                is_closing = self._is_ended or is_stopped()
                raise ConnectionError("this receiver is closing") if is_closing else TimeoutError("timed out")

    def _put(self, job: Callable[[], None]) -> None:
        with self.changed:
            self._jobs.append(job)
            self.changed.notify_all()

    def _landing_of(self, pull: Pull) -> torch.Tensor:
        begin = pull.landing * self.out.slot_bytes
        return self._landing[begin : begin + pull.ref.num_bytes]

    def _retire(self, pull: Pull) -> None:
        """Free the landing slot of a pull that is over and released. The caller holds `changed`."""
        if pull.landing < self.out.num_slots:
            (self.landings.lose if pull.state is PullState.LOST else self.landings.release)(pull.landing)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        nixl = None
        try:
            nixl = self._make(self.name, self.device)
            for memory in (self.out.memory, self.out.words, self._landing, self._words):
                nixl.register(memory)
            metadata = nixl.metadata()
            with self.changed:
                self._metadata = metadata
                self.changed.notify_all()
            self._serve(nixl)
        except ConfigError as error:
            self._refusal = error
        except Exception as error:
            # As text, because the error's frames would keep the agent alive.
            self._error = str(error) or type(error).__name__
            logger.error("the NIXL agent %s failed: %s", self.name, self._error)
        finally:
            self._end_all()
            if nixl is not None:
                nixl.close()

    def _serve(self, nixl: NixlAgent) -> None:
        closed_at: float | None = None
        while closed_at is None or (self._num_reading and time.monotonic() - closed_at < CLOSE_SECONDS):
            self._nap()
            with self.changed:
                jobs, self._jobs = self._jobs, deque()
                if self._is_closing and closed_at is None:
                    closed_at = time.monotonic()
            for job in jobs:
                job()
            self._add_peers(nixl)
            for peer in list(self._peers.values()):
                self._advance(nixl, peer)
            nixl.progress()

    def _expect(self, count: int) -> None:
        self._num_expected += count

    @property
    def _num_reading(self) -> int:
        return sum(pull.read is not None for peer in self._peers.values() for pull in peer.pulls)

    def _nap(self) -> None:
        """Wait for a job, or until it is time to poll the READs in progress."""
        now = time.monotonic()
        ages = [now - peer.pulls[0].posted_at for peer in self._peers.values() if peer.pulls]
        seconds = min(MAX_POLL_SECONDS, POLL_SECONDS + min(ages) / 20) if ages else IDLE_SECONDS
        if self._num_expected or self._waiting:
            seconds = min(seconds, CONNECTING_SECONDS)
        with self.changed:
            self.changed.wait_for(lambda: self._jobs or (self._is_closing and not ages), seconds)

    def _add_peers(self, nixl: NixlAgent) -> None:
        """Add waiting peers whose earlier incarnations are forgotten."""
        for peer in self._waiting[:]:
            if not peer.is_leaving and peer.card.agent in self._peers:
                continue
            self._waiting.remove(peer)
            try:
                if peer.is_leaving:
                    raise Disconnected("its connection has ended")
                nixl.add(peer.card.agent, peer.card.metadata)
                self._peers[peer.card.agent] = peer
            except Disconnected as error:
                self._fail(peer, str(error))

    def _queue(self, pull: Pull) -> None:
        if self._peers.get(pull.peer.card.agent) is pull.peer:
            pull.peer.pulls.append(pull)
        else:
            self._end(pull, PullState.FAILED, "its agent is gone")

    def _advance(self, nixl: NixlAgent, peer: Peer) -> None:
        """Advance a peer's READs, one at a time. Forget a leaving peer after its last READ."""
        try:
            while peer.pulls and self._read(nixl, peer, peer.pulls[0]):
                peer.pulls.popleft()
        except Disconnected as error:
            peer.pulls[0].read = None
            self._fail(peer, str(error))
        except Unfinished as error:
            logger.error("KV of %s: %s; its landing slot is never used again", peer.card.agent, error)
            peer.is_lost = True
            # Dropping the handle would try to cancel the READ.
            self._lost.append(error.read)
            self._end(peer.pulls.popleft(), PullState.LOST, str(error))
            self._fail(peer, str(error))
        if peer.is_leaving and not peer.pulls and not peer.is_lost:
            nixl.remove(peer.card.agent)
            del self._peers[peer.card.agent]

    def _read(self, nixl: NixlAgent, peer: Peer, pull: Pull) -> bool:
        """Start a pull's next READ, or poll the READ in progress. Return True if the pull is over."""
        if pull.read is not None:
            nixl.look(pull.read)
        elif pull.is_released or peer.is_leaving:
            self._end(pull, PullState.FAILED, "its connection has ended")
            return True
        card, ref = peer.card, pull.ref
        if pull.read is None:
            with self.changed:
                pull.state = PullState.READING
            pull.posted_at = time.monotonic()
            address = card.slots_address + ref.number * card.slot_bytes
            pull.read = nixl.read(card.agent, self._landing_of(pull), address, card.device, card.device_index)
        if pull.read.is_done and not pull.reads_word:
            word = self._words[pull.landing : pull.landing + 1]
            pull.reads_word = True
            pull.read = nixl.read(card.agent, word, card.words_address + ref.number * word.itemsize, "cpu", 0)
        if not pull.read.is_done:
            return False
        pull.read = None
        self._end(pull, PullState.LANDED)
        return True

    def _fail(self, peer: Peer, reason: str) -> None:
        """End all pulls of a peer that has no READ in progress, and let it leave."""
        peer.is_leaving = True
        while peer.pulls:
            self._end(peer.pulls.popleft(), PullState.FAILED, reason)

    def _end(self, pull: Pull, state: PullState, error: str = "") -> None:
        with self.changed:
            pull.state, pull.error = state, error
            if pull.is_released:
                self._retire(pull)
            self.changed.notify_all()

    def _end_all(self) -> None:
        """End all waits. No READ outlives the agent, so their handles may be dropped."""
        for peer in (*self._peers.values(), *self._waiting):
            for pull in peer.pulls:
                pull.read = None
            self._fail(peer, "the NIXL agent is closed")
        self._lost.clear()
        with self.changed:
            self._is_ended = True
            self.changed.notify_all()
