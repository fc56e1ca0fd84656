"""Requests to one or more OpenAI-compatible endpoints: bounded in number, retried, moved off what is dead.

Each endpoint has a circuit breaker: `_TRIP` failures in a row take it out of rotation, its requests move to
the others, and it is asked for `/models` until it answers. While no endpoint answers, requests wait without
using up their attempts: a verifier of a terabyte needs ten minutes to restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from common import log
from common.errors import StageError

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from tenacity import RetryCallState

T = TypeVar("T")
R = TypeVar("R")

_LOG = log.get("inference_pool")
_TRIP = 3  # failures in a row, of any request, that open an endpoint's breaker
_PROBATION = 8  # an endpoint that answered the probe at once gets 1/8 of its load until a request succeeds
_CONNECT_S = 15.0
_FIRST_PROBE_S = 0.5  # doubled with each failure in a row
_LONGEST_PROBE_S = 10.0
_LONGEST_WAIT_S = 60.0
_LONGEST_RETRY_AFTER_S = 600.0


class RequestFailed(StageError):
    """One request was given up: refused for good, or out of attempts.

    Attributes:
        reason: a short word for counting: `http_400`, `timeout`, `connection`, `malformed_response`, ...
        detail: the server's or the client's own words.
        attempts: how often it was sent.
        permanent: the server would refuse it again (4xx); it was not retried.
    """

    def __init__(self, reason: str, detail: str, attempts: int, permanent: bool) -> None:
        super().__init__(f"request given up after {attempts} attempts ({reason}): {detail}")
        self.reason = reason
        self.detail = detail
        self.attempts = attempts
        self.permanent = permanent


class _Malformed(Exception):
    """The server answered 200 with something that is no completion."""


@dataclass
class Stats:
    """What a bar shows.

    Attributes:
        in_flight: requests sent and not yet answered.
        retries: requests sent again since the start.
        failures: requests given up since the start.
    """

    in_flight: int = 0
    retries: int = 0
    failures: int = 0


@dataclass
class _Endpoint:
    url: str
    client: AsyncOpenAI
    limit: int
    in_flight: int = 0
    failures: int = 0  # in a row
    down_since: float | None = None
    on_probation: bool = False
    probe: asyncio.Task[None] | None = None

    @property
    def free(self) -> int:
        if self.down_since is not None:
            return 0
        return (max(1, self.limit // _PROBATION) if self.on_probation else self.limit) - self.in_flight


class InferencePool:
    """Clients of one or more endpoints that serve the same model.

    Used as `async with`: entering checks that an endpoint answers. SIGINT and SIGTERM make `run` hand out
    nothing more, wait `grace_s` for what is in flight, then raise KeyboardInterrupt; a second one
    does not wait.

    Args:
        endpoints: base URLs that end in `/v1`.
        concurrency: requests in flight for each endpoint (openai's client opens at most 1000 connections).
        timeout_s: seconds for one whole request; a long thinking answer takes a quarter of an hour.
        max_attempts: how often a request is sent before it is given up.
        api_key: sent as bearer token.
        outage_s: seconds without any endpoint after which the pool gives up.
        grace_s: seconds for requests in flight after SIGINT or SIGTERM.
    """

    def __init__(
        self,
        endpoints: list[str],
        *,
        concurrency: int,
        timeout_s: float = 3600.0,
        max_attempts: int = 8,
        api_key: str = "EMPTY",
        outage_s: float = 900.0,
        grace_s: float = 30.0,
    ) -> None:
        self.stats = Stats()
        self._urls = endpoints
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._api_key = api_key
        self._outage_s = outage_s
        self._grace_s = grace_s
        self._endpoints: list[_Endpoint] = []
        self._changed = asyncio.Condition()
        self._outage: StageError | None = None
        self._workers: set[asyncio.Task[None]] = set()
        self._handlers: dict[signal.Signals, Any] = {}
        self._deadline: asyncio.TimerHandle | None = None
        self._stopping = False

    async def __aenter__(self) -> InferencePool:
        """Connect, and install the signal handlers.

        Raises:
            StageError: no endpoint answers.
        """
        self._endpoints = [_Endpoint(url, self._client(url), self._concurrency) for url in self._urls]
        answers = await asyncio.gather(*(_knock(endpoint) for endpoint in self._endpoints))
        for endpoint, error in zip(self._endpoints, answers, strict=True):
            if error is not None:
                self._take_down(endpoint, error)
        if all(answers):
            await self._close()
            raise StageError(
                f"no server answers at {', '.join(self._urls)} ({answers[0]}). Start it, or correct "
                "--endpoint (a base URL such as http://127.0.0.1:8000/v1)."
            )
        self._task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.getsignal(number)
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._handlers.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)
        if self._deadline is not None:
            self._deadline.cancel()
        await self._close()
        if self._stopping and kind is asyncio.CancelledError:
            raise KeyboardInterrupt

    async def models(self) -> list[dict[str, Any]]:
        """The entries of `/models`: each has an `id`, in vLLM also a `max_model_len`."""
        from openai import APIError

        try:
            async with self._slot() as endpoint:
                found = await endpoint.client.get("/models", cast_to=object)
        except (APIError, ValueError) as error:
            raise StageError(f"{endpoint.url}/models cannot be read: {_detail(error)}") from error
        return found.get("data", []) if isinstance(found, dict) else []

    async def chat(self, **body: Any) -> dict[str, Any]:
        """POST `/chat/completions`.

        Args:
            body: the whole request as JSON values; fields that only vLLM knows are given like any other.

        Returns:
            The response as parsed JSON, with all fields that the server sent.

        Raises:
            RequestFailed: refused for good, or out of attempts.
            StageError: no endpoint has answered for `outage_s`.
        """
        return await self._request("/chat/completions", body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        """POST `/completions`; as `chat`, for prompts given as text or as token ids."""
        return await self._request("/completions", body)

    async def run(
        self, items: Iterable[T], work: Callable[[T], Awaitable[R]]
    ) -> AsyncGenerator[tuple[T, R | RequestFailed], None]:
        """Apply `work` to each item, `concurrency` x endpoints at a time, in order of arrival.

        Items are drawn only when a worker is free and the consumer keeps up, so neither a million prompts nor
        their answers are ever held at once.

        Args:
            items: any iterable; drawn lazily.
            work: coroutine function that calls `chat` or `complete`, once or more.

        Yields:
            The item and its result, or the RequestFailed that ended it.

        Raises:
            KeyboardInterrupt: SIGINT or SIGTERM came, and what was in flight has been yielded.
            Exception: whatever else `work` or `items` raised.
        """
        source = iter(items)
        count = self._concurrency * len(self._urls)
        results: asyncio.Queue[tuple[T, R | RequestFailed] | Exception | None] = asyncio.Queue(count)
        workers = [asyncio.create_task(self._worker(source, work, results)) for _ in range(count)]
        # A consumer that breaks out of its loop leaves this generator suspended; `_close` then ends them.
        self._workers.update(workers)
        try:
            while count:
                result = await results.get()
                if result is None:
                    count -= 1
                elif isinstance(result, Exception):
                    raise result
                else:
                    yield result
        finally:
            await _cancel(workers)
            self._workers.difference_update(workers)
        if self._stopping:
            raise KeyboardInterrupt

    async def _worker(
        self, source: Iterable[T], work: Callable[[T], Awaitable[R]], results: asyncio.Queue[Any]
    ) -> None:
        try:
            for item in source:
                if self._stopping:
                    break
                try:
                    outcome: R | RequestFailed = await work(item)
                except RequestFailed as error:
                    outcome = error
                await results.put((item, outcome))
        except Exception as error:
            await results.put(error)
        else:
            await results.put(None)

    def _client(self, url: str) -> AsyncOpenAI:
        from openai import AsyncOpenAI, Timeout

        # Retries are ours, around the choice of an endpoint; the whole request is timed in `_attempt`.
        timeout = Timeout(None, connect=_CONNECT_S)
        return AsyncOpenAI(base_url=url, api_key=self._api_key, max_retries=0, timeout=timeout)

    async def _request(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        from openai import APIError
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        attempts = 0
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception(_transient),
                wait=_wait,
                stop=stop_after_attempt(self._max_attempts),
                before_sleep=self._count_retry,
                reraise=True,
            ):
                with attempt:
                    attempts = attempt.retry_state.attempt_number
                    return await self._attempt(path, body)
        except (APIError, TimeoutError, _Malformed) as error:
            self.stats.failures += 1
            raise RequestFailed(_reason(error), _detail(error), attempts, not _transient(error)) from error
        raise AssertionError("tenacity returns or raises")

    async def _attempt(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        from openai import APIError

        async with self._slot() as endpoint:
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await endpoint.client.post(path, cast_to=object, body=body)
                if not isinstance(answer, dict) or not _has_choices(answer):
                    raise _Malformed(f"no choices in {str(answer)[:200]!r}")
                if _is_cut_off(answer):
                    raise _Malformed("the server gave the request up (finish_reason abort or error)")
            except ValueError as error:
                self._note_failure(endpoint, error)
                raise _Malformed(f"invalid JSON: {error}") from error
            except (APIError, TimeoutError, _Malformed) as error:
                if _transient(error) and _reason(error) != "http_429":
                    self._note_failure(endpoint, error)
                raise
            endpoint.failures = 0
            endpoint.on_probation = False
            return answer

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[_Endpoint]:
        """The freest endpoint in rotation; waits while all are busy or down."""
        endpoint = max(self._endpoints, key=lambda e: e.free)
        if endpoint.free <= 0 or self._outage:
            async with self._changed:
                await self._changed.wait_for(lambda: self._outage or any(e.free > 0 for e in self._endpoints))
            if self._outage:
                raise self._outage
            endpoint = max(self._endpoints, key=lambda e: e.free)
        endpoint.in_flight += 1
        self.stats.in_flight += 1
        try:
            yield endpoint
        finally:
            endpoint.in_flight -= 1
            self.stats.in_flight -= 1
            async with self._changed:
                self._changed.notify()

    def _count_retry(self, state: RetryCallState) -> None:
        self.stats.retries += 1
        if state.outcome is not None:
            _LOG.debug("attempt %d: %s", state.attempt_number, _detail(state.outcome.exception()))

    def _note_failure(self, endpoint: _Endpoint, error: Exception) -> None:
        endpoint.failures += 1
        if endpoint.failures >= _TRIP and endpoint.down_since is None:
            self._take_down(endpoint, error)

    def _take_down(self, endpoint: _Endpoint, error: Exception) -> None:
        _LOG.warning("%s is out of rotation (%s); its requests move or wait", endpoint.url, _detail(error))
        endpoint.down_since = time.monotonic()
        endpoint.probe = asyncio.create_task(self._await_return(endpoint))

    async def _await_return(self, endpoint: _Endpoint) -> None:
        """Ask for `/models` until it answers, then put the endpoint back into rotation."""
        first = True
        wait = _FIRST_PROBE_S * 2.0 ** min(max(0, endpoint.failures - _TRIP), 6)
        await asyncio.sleep(wait)
        while (error := await _knock(endpoint)) is not None:
            first = False
            silent = [time.monotonic() - e.down_since for e in self._endpoints if e.down_since is not None]
            if len(silent) == len(self._endpoints) and min(silent) > self._outage_s:
                self._outage = StageError(
                    f"no server has answered for {log.human_seconds(min(silent))} at "
                    f"{', '.join(self._urls)} ({_detail(error)}). What arrived is stored; "
                    "start the server and run this again to resume."
                )
                break
            await asyncio.sleep(wait := min(wait * 1.5, _LONGEST_PROBE_S))
        else:
            _LOG.warning("%s is back in rotation", endpoint.url)
            endpoint.down_since = None
            # An endpoint that never went away but fails its requests would otherwise draw them all.
            endpoint.on_probation = first
            endpoint.failures = endpoint.failures if first else 0
        async with self._changed:
            self._changed.notify_all()

    def _interrupt(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._task is not None
        if self._stopping:
            self._task.cancel()
            return
        self._stopping = True
        _LOG.warning(
            "interrupted: waiting up to %d s for %d requests in flight; interrupt again to stop at once",
            self._grace_s,
            self.stats.in_flight,
        )
        self._deadline = loop.call_later(self._grace_s, self._task.cancel)

    async def _close(self) -> None:
        probes = [endpoint.probe for endpoint in self._endpoints if endpoint.probe is not None]
        await _cancel([*self._workers, *probes])
        await asyncio.gather(*(endpoint.client.close() for endpoint in self._endpoints))


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _knock(endpoint: _Endpoint) -> Exception | None:
    """None when the endpoint answers `/models` in any way but a server error."""
    from openai import APIError, APIStatusError

    try:
        await endpoint.client.get("/models", cast_to=object, options={"timeout": _CONNECT_S})
    except APIStatusError as error:
        return error if error.status_code >= 500 else None
    except (APIError, ValueError) as error:
        return error
    return None


def _has_choices(answer: dict[str, Any]) -> bool:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return all(isinstance(c, dict) and isinstance(c.get("message") or {}, dict) for c in choices)


def _is_cut_off(answer: dict[str, Any]) -> bool:
    # A vLLM that is paused or shut down answers 200 with what it has; it would pass for a whole answer.
    return any(choice.get("finish_reason") in ("abort", "error") for choice in answer["choices"])


def _transient(error: BaseException) -> bool:
    from openai import APIConnectionError, APIStatusError

    if isinstance(error, APIStatusError):
        return error.status_code in (408, 409, 425, 429) or error.status_code >= 500
    return isinstance(error, APIConnectionError | TimeoutError | _Malformed)


def _reason(error: BaseException) -> str:
    from openai import APIStatusError, APITimeoutError

    if isinstance(error, APIStatusError):
        return f"http_{error.status_code}"
    if isinstance(error, TimeoutError | APITimeoutError):
        return "timeout"
    return "malformed_response" if isinstance(error, _Malformed) else "connection"


def _detail(error: BaseException | None) -> str:
    cause = f": {error.__cause__}" if error is not None and error.__cause__ is not None else ""
    return f"{str(error).rstrip('.')}{cause}" if str(error) else type(error).__name__


def _wait(state: RetryCallState) -> float:
    """Jittered and exponential, or what Retry-After asks for."""
    from openai import APIStatusError
    from tenacity import wait_random_exponential

    jitter = wait_random_exponential(multiplier=1, max=_LONGEST_WAIT_S)(state)
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.response.headers.get("retry-after") if isinstance(error, APIStatusError) else None
    return min(_seconds(asked), _LONGEST_RETRY_AFTER_S) + jitter / 10 if asked else jitter


def _seconds(retry_after: str) -> float:
    """`Retry-After` in either of its forms, seconds or an HTTP date."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(retry_after))
    with contextlib.suppress(ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    return 0.0
