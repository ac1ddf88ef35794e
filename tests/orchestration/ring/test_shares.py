"""One tenant takes what a ring has only as far as nobody else asks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.errors import CapacityExceeded
from ringserve.orchestration.protocol.turns import Reserve, exceeds_share
from ringserve.orchestration.ring.leader import PRESENT_SECONDS, TenantShares
from ringserve.workers.sampling.parameters import SamplingParameters


class Ring:
    """Ring with room for 40 turns and 100,000 KV tokens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.shares = TenantShares("decode ring d", lambda: self.now)
        self.turns: list[Reserve] = []

    def take(self, tenant: str, num_tokens: int = 10, attempt: int = 1) -> None:
        request = Reserve(
            turn_id=str(len(self.turns)),
            attempt=attempt,
            kv_id="k",
            match_tokens=0,
            num_tokens=num_tokens,
            deadline_seconds=1.0,
            source_incarnation="",
            sampling=SamplingParameters(),
            request_id=f"{tenant}/r" if tenant else "r",
        )
        self.shares.check_turns(request, self.turns, max_turns=40, kv_tokens=100_000)
        self.turns.append(request)

    def flood(self, tenant: str, num_tokens: int = 10) -> int:
        """Take turns of a tenant until one is refused -> their number."""
        for number in range(1000):
            try:
                self.take(tenant, num_tokens)
            except CapacityExceeded:
                return number
        raise AssertionError("the ring has a limit")


@pytest.mark.parametrize("tenant", ["", "lone"])
def test_a_lone_tenant_may_have_all(tenant: str) -> None:
    assert Ring().flood(tenant) == 40


@pytest.mark.parametrize(("num_tokens", "taken", "unit"), [(10, 30, "turns"), (6000, 12, "KV tokens")])
def test_a_flood_leaves_room_for_another_tenant(num_tokens: int, taken: int, unit: str) -> None:
    ring = Ring()
    ring.take("another")
    ring.turns.clear()
    assert ring.flood("flood", num_tokens) == taken
    told = f"decode ring d: tenant 'flood' has .* {unit} under way, .* must stay free for other tenants; retry later"
    with pytest.raises(CapacityExceeded, match=told):
        ring.take("flood", num_tokens)
    ring.take("flood", num_tokens, attempt=2)  # another ring was lost with it
    ring.turns.pop()
    ring.take("another", num_tokens)
    ring.take("third", num_tokens)


def test_a_tenant_that_asks_no_more_gives_its_share_back() -> None:
    ring = Ring()
    ring.take("another")
    ring.turns.clear()
    ring.now = PRESENT_SECONDS
    assert ring.flood("flood") == 40
    with pytest.raises(CapacityExceeded, match="40 turns are under way and at most 40 are allowed"):
        ring.take("another")
    del ring.turns[35:]  # some end: the other one comes first now
    with pytest.raises(CapacityExceeded, match="must stay free for other tenants"):
        ring.take("flood")
    ring.take("another")


@given(asked=st.lists(st.tuples(st.integers(0, 4), st.floats(1, 30)), max_size=60))
def test_whoever_comes_first_the_next_tenant_finds_room(asked: list[tuple[int, float]]) -> None:
    """Room for its smallest turn: of k tenants that flood, none has more than 3 of 3k + 1 parts."""
    held: dict[int, float] = {}
    for tenant, size in asked:
        total = sum(held.values())
        if total + size <= 1000 and not exceeds_share(held.get(tenant, 0.0), size, total, 1000):
            held[tenant] = held.get(tenant, 0.0) + size
    parts = 3 * len(held) + 1
    assert 1000 - sum(held.values()) >= 1000 / parts - 30 * len(held)
