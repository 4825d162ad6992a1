"""Load of one kind on a running system, to be replaced by another kind, with every answer kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.support.system import System, until

END_S_MAX = 120.0


@dataclass
class Load:
    """Requests of one kind, from so many clients one after another, none of them twice."""

    clients: int
    prompt_words: int
    answer_tokens: int
    answers: list[tuple[str, int, str]] = field(default_factory=list)
    """Prompt, HTTP status and text of each answer."""

    @contextmanager
    def on(self, system: System) -> Iterator[None]:
        stop = threading.Event()

        def ask(client: int) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                words = (str(client * 7919 + number * 104729 + word) for word in range(self.prompt_words))
                prompt = f"client {client}, {self.prompt_words} words: {' '.join(words)}"
                self.answers.append((prompt, *self.ask(system, prompt)))

        threads = [threading.Thread(target=ask, args=(client,), daemon=True) for client in range(self.clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(END_S_MAX)

    def ask(self, system: System, prompt: str) -> tuple[int, str]:
        """Status and text of one answer."""
        body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": self.answer_tokens, "ignore_eos": True}
        answer = system.http.post("/v1/completions", json={**body, "temperature": 0})
        text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
        return answer.status_code, text

    def until_served(self) -> None:
        """Until each client has had an answer from now on."""
        seen = len(self.answers)
        until(lambda: len(self.answers) > seen + self.clients, "answers come")

    def check(self, right: Callable[[str], str]) -> None:
        """Every request was answered, and with the text that ``right`` gives for its prompt."""
        assert self.answers
        for prompt, status, text in self.answers:
            assert status == 200, text
            assert text == right(prompt)
