"""Stop strings end an answer, wherever the pieces of text are cut."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.engines.simulated.responses import StopStrings


def shown(pieces, stops, *, include=False):
    scanner, text = StopStrings(stops, include=include), ""
    for index, piece in enumerate(pieces):
        text += scanner.feed(piece, last=index == len(pieces) - 1)
        if scanner.matched:
            break
    return text, scanner.matched


@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_exactly_before_the_first_stop_string(pieces, stops):
    text, matched = shown(pieces, stops)
    whole = "".join(pieces)

    if matched:
        assert whole.startswith(text + matched)
        assert not any(stop in text for stop in stops)
    else:
        assert text == whole
        assert not any(stop in whole for stop in stops)


def test_the_stop_string_itself_is_shown_only_on_request():
    assert shown([" one", " two", " three"], ["wo t"], include=True) == (" one two t", "wo t")
    assert shown([" one", " two", " three"], ["wo t"]) == (" one t", "wo t")
