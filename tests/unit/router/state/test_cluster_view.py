"""A record that a worker only renews changes nothing but the time at which the worker was heard."""

from __future__ import annotations

from services.router.state import fleet_table as t
from services.router.state.cluster_view import ClusterView
from shared.contracts.workers import Role
from tests.support.fleet_builders import load, record


def test_a_renewed_record_is_no_news_but_counts_as_heard():
    cluster = ClusterView()
    assert cluster.record(record("w1"), 1.0)
    mask = cluster.mask("m")
    cluster.unregister("w1")

    assert not cluster.record(record("w1"), 2.0)

    view = cluster.workers["w1"]
    assert view.registered
    assert view.heard_at == cluster.table.numbers[t.HEARD_AT, view.row] == 2.0
    assert cluster.mask("m") is mask


def test_a_renewed_record_of_another_content_is_news():
    cluster = ClusterView()
    cluster.record(record("w1"), 1.0)

    assert cluster.record(record("w1", models=("other",)), 2.0)
    assert cluster.record(record("w1", models=("other",), epoch=2), 3.0)
    assert cluster.mask("other").tolist() == [True]
    assert cluster.mask("m").tolist() == [False]


def test_a_record_restores_the_role_that_a_report_has_changed():
    cluster = ClusterView()
    cluster.record(record("w1", role=Role.BOTH), 1.0)
    assert cluster.report(load("w1", role=Role.DECODE), 2.0)
    assert not cluster.report(load("w1", role=Role.DECODE), 3.0)

    assert cluster.record(record("w1", role=Role.BOTH), 4.0)
    assert cluster.workers["w1"].record.role is Role.BOTH
    assert cluster.table.flags[t.PREFILLS, 0]


def test_a_report_writes_whether_its_worker_is_ready():
    cluster = ClusterView()
    cluster.record(record("w1"), 1.0)
    written = []
    for silent_s, late_s in ((0.0, 0.0), (1e9, 0.0), (1e9, 0.0), (0.0, 2.9), (0.0, 3.1), (0.0, 0.0)):
        cluster.report(load("w1", engine_silent_s=silent_s, loop_late_s=late_s), 2.0)
        written.append(bool(cluster.table.flags[t.READY, 0]))

    assert written == [True, False, False, True, False, True]


def test_a_row_keeps_its_numbers_when_the_table_grows():
    cluster = ClusterView()
    for number in range(3 * t.ROWS_AT_FIRST):
        cluster.record(record(f"w{number}"), float(number))
        cluster.report(load(f"w{number}", waiting_tokens=number, role=Role.BOTH), float(number))

    rows = [cluster.workers[f"w{number}"].row for number in range(3 * t.ROWS_AT_FIRST)]
    assert cluster.table.numbers[t.WAITING_TOKENS, rows].tolist() == list(range(3 * t.ROWS_AT_FIRST))
    assert [cluster.table.of(row)[t.HEARD_AT] for row in rows] == [float(number) for number in range(len(rows))]
    assert (cluster.table.numbers[t.DIVISORS] >= 1.0).all()
