"""At most one orchestrator leads, whatever is delayed, lost or suspended."""

from hypothesis import example, given
from hypothesis import strategies as st

from services.orchestrator.leadership import Candidate, Claim, Read, Renew
from shared.contracts.control import Leadership

LEASE_S = 6.0


def candidate(name="a"):
    return Candidate("orchestrator", name, LEASE_S)


def seat_of(leader, term=1):
    return Leadership(role="orchestrator", leader=leader, term=term)


def leading(name="a", now=0.0):
    one = candidate(name)
    one.saw(None, 0)
    one.written(one.due(now), 1, now)
    return one


def test_an_empty_seat_is_claimed_with_the_next_term():
    one = candidate()
    assert one.due(0.0) == Read()
    one.saw(seat_of("b", term=4), 7)
    assert one.due(0.5) == Read()
    one.saw(None, 0)

    assert one.due(1.0) == Claim(seat_of("a", term=5))
    one.written(one.due(1.0), 9, 1.0)
    assert one.may_lead(1.0)
    assert one.term == 5


def test_a_lease_is_renewed_four_times_before_it_ends():
    one = leading()

    assert one.due(1.4) is None
    assert one.due(1.5) == Renew(seat_of("a"), 1)


def test_a_leader_that_cannot_renew_falls_silent_before_its_lease_ends():
    one = leading(now=0.0)

    assert one.may_lead(5.3)
    assert not one.may_lead(5.4)


def test_after_an_outage_a_leader_leads_only_after_renewal():
    one = leading()
    one.doubt()

    assert not one.may_lead(0.1)
    assert one.due(0.1) == Renew(seat_of("a"), 1)
    one.written(one.due(0.1), 2, 0.1)
    assert one.may_lead(0.2)


def test_a_refused_renewal_makes_the_leader_read_the_lease():
    one = leading()
    one.refused()

    assert not one.may_lead(0.1)
    assert one.due(0.1) == Read()


def test_a_claim_without_reply_is_confirmed_by_overwriting_it():
    one = candidate()
    one.saw(seat_of("a", term=2), 5)

    assert not one.may_lead(0.0)
    assert one.due(0.0) == Renew(seat_of("a", term=2), 5)


def test_terms_continue_from_the_last_announced_term():
    one = candidate()
    one.saw(None, 0)
    one.heard(7)
    one.saw(None, 0)

    assert one.due(0.0) == Claim(seat_of("a", term=8))


class Seat:
    """The key-value entry as the server has it: expires ``LEASE_S`` after it was written."""

    def __init__(self):
        self.value, self.revision, self.at = None, 0, 0.0

    def read(self, now):
        if self.value and now >= self.at + LEASE_S:
            self.value = None
        return self.value

    def write(self, order, now):
        held = self.read(now)
        fits = held is None if isinstance(order, Claim) else held is not None and order.revision == self.revision
        if fits:
            self.value, self.revision, self.at = order.value, self.revision + 1, now
        return fits


# A leader whose renewal is on its way when another takes over heard of that term and must not use it again.
OVERTAKEN = [
    (0, 1.0, 3.0, "answer lost"), (0, 0.0, 0.5, "works"), (0, 0.5, 1.0, "works"), (2, 3.0, 3.0, "works"),
    (2, 0.0, 3.0, "works"), (0, 0.5, 0.0, "answer lost"), (0, 0.0, 2.0, "works"), (0, 3.0, 3.0, "works"),
    (0, 0.5, 3.0, "never arrives"), (0, 4.0, 0.0, "works"),
]  # fmt: skip


@example(OVERTAKEN)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.floats(0.0, 4.0),
            st.floats(0.0, 3.0),
            st.sampled_from(["works", "answer lost", "never arrives"]),
        ),
        max_size=80,
    )
)
def test_there_are_never_two_leaders_and_terms_only_grow(steps):
    seat, now = Seat(), 0.0
    everyone = [candidate(name) for name in "abc"]
    highest, led_by = 0, {}
    for who, pause, delay, luck in steps:
        now += pause
        one = everyone[who]
        requested_at = now
        order = one.due(requested_at)
        if order is not None and luck != "never arrives":
            now += delay  # on its way to the server
            if isinstance(order, Read):
                if luck == "works":
                    one.saw(seat.read(now), seat.revision)
            elif seat.write(order, now):
                if luck == "works":
                    one.written(order, seat.revision, requested_at)
            elif luck == "works":
                one.refused()
        leaders = [each for each in everyone if each.may_lead(now)]
        assert len(leaders) <= 1
        for each in leaders:
            assert each.term >= highest
            assert led_by.setdefault(each.term, each.name) == each.name
            highest = each.term
            for other in everyone:
                other.heard(each.term)
