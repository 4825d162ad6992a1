"""Lease table properties that random histories do not show."""

from __future__ import annotations

import math

from connector.holder.holder import Holder, HolderSettings
from connector.holder.leases import STALE_ENDS_MAX, LeaseLimits, LeaseTable
from shared.contracts.ids import Epoch, WorkerId

READER = WorkerId("decode-1")


def test_released_leases_do_not_accumulate_in_the_heap():
    leases = LeaseTable(LeaseLimits(pinned_blocks_max=100))
    for number in range(10 * STALE_ENDS_MAX):
        leases.grant(f"lease-{number}", READER, [1, 2], until_s=1e6)
        leases.release(f"lease-{number}", READER)

    assert len(leases._ends) <= STALE_ENDS_MAX + 2


def test_the_next_expiry_is_of_a_lease_that_is_still_held():
    leases = LeaseTable(LeaseLimits(pinned_blocks_max=100))
    leases.grant("short", READER, [1], until_s=5.0)
    leases.grant("long", READER, [1], until_s=9.0)

    leases.release("short", READER)
    assert leases.next_expiry() == 9.0

    assert leases.expire(9.0) == [1]
    assert leases.next_expiry() == math.inf


def test_a_reused_lease_id_keeps_its_own_expiry():
    leases = LeaseTable(LeaseLimits(pinned_blocks_max=100))
    leases.grant("lease", READER, [1], until_s=5.0)
    leases.release("lease", READER)
    leases.grant("lease", READER, [2], until_s=9.0)

    assert leases.expire(5.0) == []
    assert leases.expire(9.0) == [2]


def test_already_pinned_blocks_do_not_count_against_the_maximum():
    leases = LeaseTable(LeaseLimits(pinned_blocks_max=3))
    leases.grant("lease", READER, [1, 2], until_s=5.0)

    assert leases.pinnable([1, 5, 2, 6]) == 3
    assert leases.pinnable([5, 1, 2]) == 3
    assert leases.pinnable([5, 6]) == 1


def test_a_holder_without_a_pool_can_release_all():
    holder = Holder(HolderSettings(WorkerId("p"), Epoch(1)), lambda: 0.0)

    holder.release_all()

    assert (holder.advance(), holder.counts.leases) == ([], 0)
