"""What a client's messages and a worker's template can make the router render is bounded while it is rendered."""

from __future__ import annotations

import tracemalloc

import pytest

from services.router.tokenize.chat_template import ChatTemplate, TemplateFailed, TooManyRounds

CHARS_MAX = 100_000
TURNS = [{"role": "user", "content": "x"}] * 4096
FOR_EACH = "{% for message in messages %}{{ motto }}{{ message.content }}{% endfor %}"


def rendered(source: str, **options: object) -> str:
    template = ChatTemplate(source, {"eos_token": "</s>"}, chars_max=CHARS_MAX)
    return template.render(TURNS, {"motto": "m" * 64_000, "number": 2, "huge": 10**15}, **options)


@pytest.mark.parametrize(
    "source",
    [
        FOR_EACH,
        "{% set all %}" + FOR_EACH + "{% endset %}",
        "{% macro all() %}" + FOR_EACH + "{% endmacro %}{{ all()|length }}",
        "{% set ns = namespace(s='x') %}{% for m in messages %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for m in messages %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for m in messages %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 'x' * 9999999 }}",
        "{{ 'x' * 3000 * 3000 }}",
        "{{ [1] * 9999999 }}",
        "{{ 'x'.ljust(9999999) }}",
        "{{ '%99999999d' % number }}",
        "{{ '%*d' % (9999999, number) }}",
        "{{ (60 ** 60)|string }}",
        "{% for x in range(100000) %}{{ x }}{% endfor %}{% for x in range(1000000) %}{% endfor %}",
        "{{ range(9999999)|list|length }}",
        "{{ motto|replace('m', motto) }}",
        "{{ motto.replace('m', motto) }}",
        "{{ ([motto] * 9000)|join|length }}",
        "{{ ''.join([motto] * 9000) }}",
        "{{ messages|join(motto, 'content') }}",
        "{{ ([[1]] * 9000)|tojson(indent=99999) }}",
        "{{ motto|indent(9999999, true) }}",
        "{{ 'x'|center(9999999) }}",
        "{{ '{:99999999}'.format(1) }}",
        "{{ motto.expandtabs(100) }}",
        "{{ 'x'.ljust(huge) }}",
        "{{ lipsum(n=9999999) }}",
    ],
)
def test_what_a_template_makes_is_bounded(source):
    tracemalloc.start()
    try:
        with pytest.raises(TemplateFailed):
            rendered(source)
        assert tracemalloc.get_traced_memory()[1] < 40 * CHARS_MAX + 12_000_000
    finally:
        tracemalloc.stop()


def test_a_template_that_draws_lots_does_not_compile():
    with pytest.raises(TemplateFailed, match="random"):  # The engine's would draw others.
        ChatTemplate("{{ messages | random }}", {}, chars_max=CHARS_MAX)


@pytest.mark.parametrize("number", ["1000000000", "1e12"])
def test_a_template_with_huge_numbers_does_not_compile(number):
    with pytest.raises(TemplateFailed, match="numbers go up to"):
        ChatTemplate("{{ 'x'.center(" + number + ") }}", {}, chars_max=CHARS_MAX)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(90) }}",
    ],
)
def test_endless_templates_end(source):
    with pytest.raises(TooManyRounds):
        rendered(source)
    with pytest.raises(TooManyRounds):
        rendered(source, stopped=lambda: True)


def test_a_client_cannot_replace_special_tokens():
    template = ChatTemplate("{{ eos_token }}{{ messages[0].content }}{{ name }}", {"eos_token": "</s>"}, chars_max=100)

    assert template.render(TURNS[:1], {"eos_token": "mine", "messages": [], "name": "n"}) == "</s>xn"


def test_loops_keep_their_variables():
    source = (
        "{% for m in messages[:3] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}"
        "{% for m in messages if m.content == 'y' %}{{ m }}{% else %}none{% endfor %}"
        "{% for m in messages|selectattr('role', 'equalto', 'user') %}{{ loop.index }}{% break %}{% endfor %}"
        "{{ 7 % 4 }}{{ 2 * 3 }}{{ 'a' + 'b' ~ 1 }}{{ '%s-%d' % ('a', 5) }}{{ 2 ** 3 }}"
        "{{ 'aXa'.replace('a', 'b', 1) }}{{ 'aa'|replace('a', 'c') }}{{ ['d', 1]|join('-') }}{{ '+'.join(['e', 'f']) }}"
        "{{ messages[:2]|join('', attribute='content') }}{{ []|join('x') }}{{ {'a': [1]}|tojson(indent=1)|indent(1) }}"
    )

    assert rendered(source) == '1/3,2/3,3/3a1none136ab1a-58bXaccd-1e+fxx{\n  "a": [\n   1\n  ]\n }'


def test_what_a_template_adds_is_added_from_the_left():
    source = (
        "{{ 'a' + (number|string + 'b') + messages[0].content }}{{ 1 + number + (3 - 1) }}{{ ([1] + [2] + [3])[2] }}"
    )

    assert rendered(source) == "a2bx" + "5" + "3"


def test_fields_that_a_message_lacks_are_undefined_as_in_jinja():
    source = (
        "{{ messages[0].none is defined }}{{ not messages[0].none }}{{ messages[0].none }}{{ messages[0].none ~ 'a' }}"
    )

    assert rendered(source) == "False" + "True" + "" + "a"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].none.deeper }}", "{{ 'a' + missing + 'b' }}", "{{ 'a' + 1 + 'b' }}", "{{ motto + 'a' + motto }}"],
)
def test_a_sum_or_field_that_python_or_the_bound_refuses_fails(source):
    with pytest.raises(TemplateFailed):
        rendered(source)
