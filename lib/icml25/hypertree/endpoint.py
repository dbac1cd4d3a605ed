"""Any OpenAI-compatible endpoint as a backend, with the standard library's HTTP."""

from __future__ import annotations

import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from icml25.hypertree.backends import (
    Backend,
    BackendError,
    Question,
    ReplyError,
    read_index,
)

_RETRY_STATUS = (408, 409, 429, 500, 502, 503, 504)


class EndpointError(BackendError):
    """The endpoint is down, too slow, refuses, or answers no JSON."""


class OpenAICompatible(Backend):
    """Chat completions over HTTP.

    Configured by arguments or by the environment:

    * ``ICML25_LLM_URL``: such as ``http://localhost:8000/v1``;
    * ``ICML25_LLM_MODEL``: the model's name;
    * ``ICML25_LLM_KEY``: the key, if one is needed. It is read at each request, sent
      only in its header, and never stored, shown or logged.

    Args:
        base_url, model: override the environment.
        api_key_env: the variable that holds the key.
        timeout_s: for one request.
        retries: further tries after a time-out, a refused connection, a rate limit or
            a server error, with waits of ``backoff_s`` doubled each time (or what the
            server's ``Retry-After`` says, up to ``max_wait_s``).

    Raises:
        EndpointError: no URL or model configured; every try failed; an answer that is
            not the protocol's JSON.

    Notes:
        ``choose`` asks for the number of an option. It reads log-probabilities of the
        first token where the server offers them; else it puts all weight on the
        written number. An answer outside the options is asked again once.
    """

    writes = True

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        api_key_env: str = "ICML25_LLM_KEY",
        timeout_s: float = 120.0,
        retries: int = 3,
        backoff_s: float = 1.0,
        max_wait_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        url = base_url or os.environ.get("ICML25_LLM_URL", "")
        self.model = model or os.environ.get("ICML25_LLM_MODEL", "")
        if not url or not self.model:
            raise EndpointError(
                "no endpoint: set ICML25_LLM_URL and ICML25_LLM_MODEL "
                "(and ICML25_LLM_KEY where a key is needed)"
            )
        if not url.startswith(("http://", "https://")):
            raise EndpointError(f"base_url={url!r}: an http(s) address")
        if not timeout_s > 0 or retries < 0:
            raise ValueError(f"timeout_s={timeout_s}, retries={retries}: > 0 and >= 0")
        self.base_url = url.rstrip("/")
        self.api_key_env = api_key_env
        self.timeout_s = timeout_s
        self.retries = retries
        self.backoff_s = backoff_s
        self.max_wait_s = max_wait_s
        self._sleep = sleep

    @staticmethod
    def configured() -> bool:
        """Whether the environment names an endpoint."""
        return all(map(os.environ.get, ("ICML25_LLM_URL", "ICML25_LLM_MODEL")))

    def __repr__(self) -> str:
        return f"OpenAICompatible({self.base_url!r}, {self.model!r})"

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.api_key_env):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"{self.base_url}/chat/completions",
            data=json.dumps(body).encode(),
            headers=headers,
            method="POST",
        )
        why = ""
        for attempt in range(self.retries + 1):
            wait = self.backoff_s * 2**attempt
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                    text = reply.read().decode("utf-8", "replace")
                return self._parsed(text)
            except urllib.error.HTTPError as error:
                # The body may repeat the request's headers: it is not shown.
                why = f"HTTP {error.code} {error.reason}"
                if error.code not in _RETRY_STATUS:
                    raise EndpointError(f"{self!r}: {why}") from None
                after = error.headers.get("Retry-After", "") if error.headers else ""
                wait = float(after) if after.isdecimal() else wait
            except TimeoutError:
                why = f"no answer within {self.timeout_s:g} s"
            except urllib.error.URLError as error:
                slow = isinstance(error.reason, TimeoutError)
                why = (
                    f"no answer within {self.timeout_s:g} s"
                    if slow
                    else f"cannot be reached ({error.reason})"
                )
            except (http.client.HTTPException, ConnectionError) as error:
                why = f"the connection broke ({type(error).__name__})"
            if attempt < self.retries:
                self.usage.retries += 1
                self._sleep(min(wait, self.max_wait_s))
        tries = self.retries + 1
        raise EndpointError(f"{self!r}: {why}, {tries} tries")

    def _parsed(self, text: str) -> dict[str, Any]:
        try:
            answer = json.loads(text)
            choice = answer["choices"][0]
            content = choice["message"]["content"]
        except (ValueError, RecursionError, KeyError, IndexError, TypeError):
            if key := os.environ.get(self.api_key_env):
                text = text.replace(key, "...")  # Some proxies echo the headers.
            raise EndpointError(
                f"{self!r}: not a chat completion: {text[:80]!r}"
            ) from None
        if not isinstance(content, str):
            raise EndpointError(f"{self!r}: the reply holds no text")
        used = answer.get("usage")
        used = used if isinstance(used, dict) else {}
        self.usage.calls += 1
        for name in ("prompt_tokens", "completion_tokens"):
            if isinstance(count := used.get(name), int):
                setattr(self.usage, name, getattr(self.usage, name) + count)
        return choice

    def _ask(self, prompt: str, max_tokens: int, **extra: Any) -> dict[str, Any]:
        return self._post(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "temperature": 0,
                **extra,
            }
        )

    def generate(self, prompt: str, *, max_tokens: int = 4096) -> str:
        return self._ask(prompt, max_tokens)["message"]["content"]

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        self.usage.questions += len(questions)
        return [self._choose(q) for q in questions]

    def _choose(self, question: Question) -> list[float]:
        n = len(question.options)
        if n == 1:
            return [1.0]
        numbered = "\n".join(
            f"{i + 1}:{option}" for i, option in enumerate(question.options)
        )
        prompt = (
            f"{question.prompt}\n\nOptions:\n{numbered}\n"
            f"Reply with one number from 1 to {n} and nothing else."
        )
        extra = {"logprobs": True, "top_logprobs": min(20, max(2, n))}
        choice = self._ask(prompt, 8, **extra)
        prob = _from_logprobs(choice, n)
        if prob is not None:
            return prob
        reply = choice["message"]["content"]
        try:
            index = read_index(reply, n)
        except ReplyError:
            self.usage.retries += 1
            again = self.generate(
                f"{prompt}\nYou replied {reply[:80]!r}. One number from 1 to {n}.",
                max_tokens=8,
            )
            index = read_index(again, n)
        return [float(i == index) for i in range(n)]


def _from_logprobs(choice: dict[str, Any], num_options: int) -> list[float] | None:
    """Option probabilities from the first token, if the server sent usable ones."""
    if num_options > 9:  # the first token of "10" is not the whole number
        return None
    try:
        top = choice["logprobs"]["content"][0]["top_logprobs"]
        numbers = [str(i + 1) for i in range(num_options)]
        weights = [0.0] * num_options
        for entry in top:
            token = entry["token"].strip()
            if token in numbers:  # isdigit() also takes a superscript, int() refuses it
                weights[numbers.index(token)] += math.exp(entry["logprob"])
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    total = sum(weights)
    return [w / total for w in weights] if total > 0 else None
