"""Many small calls to the engine as one."""

from __future__ import annotations

from collections.abc import Sequence

from connector.scheduler.calls import EngineCall, PeerGone
from shared.contracts.kv_exchange import LeaseKv


def one_call(calls: Sequence[EngineCall]) -> EngineCall:
    """The same as all of them one after the other, though an engine does what is of one kind together: a lease that a
    later release ends is left out, and so is the end of a peer that came back.
    """
    if len(calls) == 1:
        return calls[0]
    leases: dict[tuple[str, str], LeaseKv] = {}
    ended: dict[tuple[str, int], PeerGone] = {}
    for call in calls:
        for peer in call.peers:
            ended.pop((peer.handshake.worker_id, peer.handshake.epoch), None)
        ended.update({(gone.worker_id, gone.epoch): gone for gone in call.gone})
        for release in call.releases:
            for ask_id in release.ask_ids:
                leases.pop((release.reader_id, ask_id), None)
        leases.update({(lease.reader_id, lease.ask_id): lease for lease in call.leases})
    return EngineCall(
        describe=any(call.describe for call in calls),
        peers=[peer for call in calls for peer in call.peers],
        gone=list(ended.values()),
        releases=[release for call in calls for release in call.releases],
        leases=list(leases.values()),
        grants=[grant for call in calls for grant in call.grants],
        fetches=[fetch for call in calls for fetch in call.fetches],
        chains_max=max(call.chains_max for call in calls),
        release_all=any(call.release_all for call in calls),
    )
