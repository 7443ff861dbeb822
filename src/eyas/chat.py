"""A conversation of several turns with one engine.

Every turn sends the whole conversation through the chat template. It knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Iterator

from eyas.config import SamplingParams
from eyas.engine.engine import LLM
from eyas.errors import RequestError
from eyas.report.answering import Answering


class Conversation:
    """Messages so far; a turn that fails or is left early leaves no trace in them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str = "") -> None:
        self.llm, self.params = llm, params
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._system)
        self.last: Answering | None = None
        """The last turn as it ran; None if it was refused."""

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer to `text` in pieces; raises `RequestError` before the first."""
        self.last = None
        if not text.strip():
            raise RequestError("empty message", "a turn needs some text", "write something")
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.llm.tokenizer.chat(messages)
        turn = Answering(self.llm.engine, [prompt], [self.params], stream=True)
        self.last = turn
        try:
            while not turn.done:
                turn.step()
                yield turn.new_text()
        finally:
            turn.abort()
        self.messages = [*messages, {"role": "assistant", "content": turn.requests[0].text}]

    def reset(self) -> None:
        """Forget all turns."""
        self.messages = list(self._system)
