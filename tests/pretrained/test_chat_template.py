"""Templates as Transformers renders them, hostile ones, and the process that they run in."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from trm_jax.models.pretrained import chat_template, render_template

pytest.importorskip("jinja2")

MESSAGES = {"messages": [{"role": "user", "content": "a<b & c"}, {"role": "tool", "content": "x"}]}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for m in messages %}\n  {% if m.role == 'user' %}\nU\n  {% endif %}\n{% endfor %}\n",
            "U\n",
        ),  # blocks trimmed
        ("{{ messages[0].content }}", "a<b & c"),  # no HTML escapes
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a<b & c"}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 1,\n "b": "é"\n}'),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}", "tool"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "x!"),
        ("{{ messages[0]['content'].split('<')[-1].strip() }}", "b & c"),
        ("{{ missing }}{{ missing is defined }}", "False"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{%- macro f(x) -%}({{ x }}){%- endmacro -%}{{ f(messages | length) }}", "(2)"),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert render_template(source, MESSAGES) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('user first') }}", "The chat template refused these messages: user first"),
        ("{% for %}", "The chat template failed: TemplateSyntaxError"),
        ("{{ messages[5].content }}", "failed: UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "failed: SecurityError"),
        (
            "{{ render.__globals__ }}{{ cycler.__init__.__globals__.os.system('true') }}",
            "failed: (SecurityError|UndefinedError)",
        ),
        ("{{ messages.append(1) }}", "failed: SecurityError"),
        ("{% include '/etc/passwd' %}", "failed: TypeError|failed: TemplateNotFound"),
        ("{{ 1 // 0 }}", "failed: ZeroDivisionError"),
        ("{% for i in range(1000000) %}{% endfor %}", "failed: OverflowError"),
        ("{% for i in range(90000) %}{{ 'xxxxxxxxxx' * 10 }}{% endfor %}", "writes more than 4194304 characters"),
        ("{{ 'x' * 10 ** 11 }}", "failed: MemoryError|more memory"),
        (
            "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "MemoryError|more",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed: RecursionError|more than"),
    ],
)
def test_hostile_and_broken_templates_are_told_in_words(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render_template(source, MESSAGES)
    assert render_template("{{ messages[1].content }}", MESSAGES) == "x"


def test_a_template_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_SECONDS", 1.0)
    began = time.monotonic()
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="takes more than 1 seconds"):
        render_template(loop, {})
    assert time.monotonic() - began < 30
    monkeypatch.undo()
    assert render_template("x", {}) == "x"


def test_the_process_is_replaced_when_it_was_killed() -> None:
    assert render_template("{{ 1 + 1 }}", {}) == "2"
    process = chat_template._SHARED._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert render_template("{{ 1 + 2 }}", {}) == "3"


def test_several_threads_get_their_own_answers() -> None:
    found: dict[int, str] = {}

    def render(number: int) -> None:
        found[number] = render_template("{{ n }}" + "x" * 50_000, {"n": number})[:2].strip("x")

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: str(number) for number in range(8)}
