"""An OpenAI-compatible server that misbehaves by script, in a thread of the test's process.

Each POST asks the script, `misbehave(number, body)`, what to do; None means a proper answer. Ids are bytes
of a plain rendering of the conversation, so that a test can say what they must be.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

END_ID = 2  # SmolLM2's <|im_end|>
MODEL = "stub"

Body = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """What happens instead of a proper answer.

    Attributes:
        status: HTTP status.
        body: bytes sent as they are; None sends the proper answer (after the delay) where the status is 200.
        headers: e.g. `{"Retry-After": "1"}`.
        delay_s: seconds before anything is sent.
        reset: cut the connection, after `body` was sent as the first half of a longer one.
    """

    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    reset: bool = False


RESET = Fault(reset=True)
CUT_IN_THE_MIDDLE = Fault(reset=True, body=b'{"choices": [{"mess')
EMPTY = Fault(body=b"")
NOT_JSON = Fault(body=b"<html>busy</html>")
NO_CHOICES = Fault(body=b'{"object": "error", "message": "engine is dead"}')
TOO_LONG = Fault(400, body=b'{"error": {"message": "maximum context length is 2048 tokens", "code": 400}}')
BUSY = Fault(429, body=b"{}", headers={"Retry-After": "1"})
BROKEN = Fault(500, body=b"Internal Server Error")
UNAVAILABLE = Fault(503, body=b"upstream is starting")
HANG = Fault(delay_s=3600)

Misbehaviour = Callable[[int, Body], Fault | None]


def render(messages: Sequence[Body]) -> str:
    """The server's chat template: plain, drops reasoning from history, as Kimi's does."""
    return "".join(f"<{m['role']}>{m.get('content') or ''}" for m in messages) + "<assistant>"


def ids(text: str) -> list[int]:
    return list(text.encode())


def answer_text(body: Body) -> str:
    return f"You said: {body['messages'][-1]['content']}"


def proper_answer(body: Body) -> Body:
    """A complete response with ids, as vLLM gives it for `return_token_ids`."""
    text = answer_text(body)
    return response(body, message={"content": text}, token_ids=[*ids(text), END_ID])


def response(body: Body, *, message: Body, token_ids: list[int], finish_reason: str = "stop") -> Body:
    prompt = ids(render(body["messages"]))
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": body["model"],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", **message},
                "finish_reason": finish_reason,
                "token_ids": token_ids,
            }
        ],
        "prompt_token_ids": prompt,
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(token_ids)},
    }


class FaultyServer:
    """`with FaultyServer(...) as server:`; `server.url` is its base URL.

    Args:
        misbehave: the script, or a list of faults for the first requests.
        answer: makes the proper answer out of the request's body.

    Attributes:
        bodies: each POST's parsed body, in order of arrival.
        peak: most POSTs in flight at once.
        answered: proper answers sent.
    """

    def __init__(
        self,
        misbehave: Misbehaviour | Sequence[Fault | None] = (),
        answer: Callable[[Body], Body] = proper_answer,
    ) -> None:
        self.bodies: list[Body] = []
        self.peak = 0
        self.answered = 0
        self.port = 0
        self._misbehave = misbehave if callable(misbehave) else _by_number(misbehave)
        self._answer = answer
        self._in_flight = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> FaultyServer:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        """Listen; after `stop` on the same port again."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def stop(self) -> None:
        """Refuse new connections and cut the open ones, as a server that died."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", _health)
        app.router.add_get("/v1/models", _models)
        app.router.add_post("/v1/chat/completions", self._post)
        app.router.add_post("/v1/completions", self._post)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        fault = self._misbehave(len(self.bodies), body) or Fault()
        self.bodies.append(body)
        self._in_flight += 1
        self.peak = max(self.peak, self._in_flight)
        try:
            await asyncio.sleep(fault.delay_s)
            return await self._reply(request, fault, body)
        finally:
            self._in_flight -= 1

    async def _reply(self, request: web.Request, fault: Fault, body: Body) -> web.StreamResponse:
        if fault.reset:
            if fault.body is not None:
                half = web.StreamResponse(headers={"Content-Length": "5000"})
                await half.prepare(request)
                await half.write(fault.body)
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault.body is not None or fault.status != 200:
            return web.Response(status=fault.status, body=fault.body, headers=fault.headers)
        self.answered += 1
        return web.Response(text=json.dumps(self._answer(body)), content_type="application/json")


def _by_number(faults: Sequence[Fault | None]) -> Misbehaviour:
    return lambda number, _body: faults[number] if number < len(faults) else None


async def _health(_request: web.Request) -> web.Response:
    return web.Response()


async def _models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "max_model_len": 2048}]})


if __name__ == "__main__":
    # A process of its own, for measurements: `python -m tests.faulty_server` prints the URL and serves.
    with FaultyServer() as own:
        print(own.url, flush=True)
        threading.Event().wait()
