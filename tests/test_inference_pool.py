"""Requests to a server that misbehaves by script."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from email.utils import formatdate
from typing import Any

import pytest

from common import inference_pool
from common.errors import StageError
from common.inference_pool import InferencePool, RequestFailed
from tests import faulty_server as faults
from tests.faulty_server import Fault, FaultyServer

HELLO: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_pool, "_LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(inference_pool, "_FIRST_PROBE_S", 0.05)


async def _ask(server: FaultyServer, **settings: Any) -> dict[str, Any]:
    async with InferencePool([server.url], concurrency=1, **settings) as pool:
        return await pool.chat(**HELLO)


async def test_fields_that_only_vllm_knows_survive_both_ways() -> None:
    def answer(body: faults.Body) -> faults.Body:
        message = {"content": None, "reasoning": "hm"}
        found = faults.response(body, message=message, token_ids=[7, 8])
        return {**found, "kv_transfer_params": {"hidden_states_path": "x"}}

    with FaultyServer(answer=answer) as server:
        async with InferencePool([server.url], concurrency=1) as pool:
            found = await pool.chat(**HELLO, return_token_ids=True, chat_template_kwargs={"thinking": True})
            await pool.complete(model="stub", prompt=[1, 2], messages=[], max_tokens=1)
    assert found["choices"][0]["token_ids"] == [7, 8]
    assert found["choices"][0]["message"]["reasoning"] == "hm"
    assert found["prompt_token_ids"] == list(b"<user>hello<assistant>")
    assert found["kv_transfer_params"] == {"hidden_states_path": "x"}
    assert server.bodies[0] == {
        **HELLO,
        "return_token_ids": True,
        "chat_template_kwargs": {"thinking": True},
    }
    assert server.bodies[1]["prompt"] == [1, 2]


@pytest.mark.parametrize(
    "fault",
    [
        faults.RESET,
        faults.CUT_IN_THE_MIDDLE,
        faults.EMPTY,
        faults.NOT_JSON,
        Fault(body=b'{"choices": [', headers={"Content-Type": "application/json"}),
        faults.NO_CHOICES,
        Fault(body=b'{"choices": [null]}'),
        Fault(body=b'{"choices": {"0": {}}}'),
        Fault(body=b'{"choices": [{"message": "Hal"}]}'),
        Fault(body=b'{"choices": [{"message": {"content": "Hal"}, "finish_reason": "abort"}]}'),
        faults.BROKEN,
        faults.UNAVAILABLE,
        Fault(408, body=b""),
        Fault(429, body=b""),
    ],
    ids=lambda fault: f"{fault.status}-{fault.body}-{fault.reset}",
)
async def test_a_passing_fault_costs_a_retry_and_nothing_else(fault: Fault) -> None:
    with FaultyServer([fault, fault]) as server:
        async with InferencePool([server.url], concurrency=1) as pool:
            found = await pool.chat(**HELLO)
            assert pool.stats == inference_pool.Stats(in_flight=0, retries=2, failures=0)
    assert found["choices"][0]["message"]["content"] == "You said: hello"
    assert len(server.bodies) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_a_refusal_for_good_is_not_retried(status: int) -> None:
    with FaultyServer([Fault(status, body=faults.TOO_LONG.body)]) as server:
        with pytest.raises(RequestFailed) as error:
            await _ask(server)
    assert error.value.reason == f"http_{status}"
    assert error.value.permanent
    assert error.value.attempts == 1
    assert "maximum context length is 2048 tokens" in error.value.detail
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (faults.BROKEN, "http_500"),
        (faults.RESET, "connection"),
        (faults.NOT_JSON, "malformed_response"),
        (faults.HANG, "timeout"),
    ],
)
async def test_a_lasting_fault_ends_after_max_attempts(fault: Fault, reason: str) -> None:
    with FaultyServer([fault] * 9) as server:
        with pytest.raises(RequestFailed) as error:
            await _ask(server, max_attempts=3, timeout_s=0.2)
    assert (error.value.reason, error.value.attempts, error.value.permanent) == (reason, 3, False)
    assert len(server.bodies) == 3


async def test_retry_after_in_seconds_is_waited_for() -> None:
    with FaultyServer([faults.BUSY]) as server:
        begun = time.monotonic()
        await _ask(server)
    assert 1.0 <= time.monotonic() - begun < 2.5


def test_retry_after_may_be_a_date() -> None:
    assert 28 < inference_pool._seconds(formatdate(time.time() + 30, usegmt=True)) <= 30
    assert inference_pool._seconds(formatdate(time.time() - 30, usegmt=True)) == 0
    assert inference_pool._seconds("2.5") == 2.5
    assert inference_pool._seconds("soon") == 0


async def test_a_server_that_restarts_costs_no_request() -> None:
    with FaultyServer(lambda *_: Fault(delay_s=0.02)) as server:

        def restart() -> None:
            time.sleep(0.3)
            server.stop()
            time.sleep(1.0)
            server.start()

        thread = threading.Thread(target=restart)
        async with InferencePool([server.url], concurrency=4, max_attempts=3) as pool:
            thread.start()
            answered = [item async for item, found in _echo(pool, range(150)) if isinstance(found, dict)]
            assert pool.stats.retries > 0
        thread.join()
    assert sorted(answered) == list(range(150))


async def test_the_requests_of_a_dead_endpoint_move_to_the_others_and_it_is_taken_back() -> None:
    def slowly(*_: Any) -> Fault:
        return Fault(delay_s=0.02)

    with FaultyServer(slowly) as steady, FaultyServer(slowly) as dying:
        answered = []
        async with InferencePool([steady.url, dying.url], concurrency=4, max_attempts=4) as pool:
            async for item, found in _echo(pool, range(400)):
                assert isinstance(found, dict)
                answered.append(item)
                if len(answered) == 50:
                    dying.stop()
                    before = len(dying.bodies)
                if len(answered) == 150:
                    assert len(dying.bodies) == before
                    dying.start()
        assert len(dying.bodies) > before
        assert dying.peak <= 4
        assert steady.peak <= 4
    assert sorted(answered) == list(range(400))


async def test_an_endpoint_that_only_fails_does_not_draw_all_requests() -> None:
    """Least load alone would choose it always: it is free again at once."""
    with FaultyServer(lambda *_: Fault(delay_s=0.01)) as good, FaultyServer(lambda *_: faults.BROKEN) as bad:
        async with InferencePool([bad.url, good.url], concurrency=4, max_attempts=6) as pool:
            found = [found async for _, found in _echo(pool, range(200))]
    assert not any(isinstance(outcome, RequestFailed) for outcome in found)
    assert len(bad.bodies) < 50


async def test_an_endpoint_that_hangs_is_taken_out_of_rotation() -> None:
    """It accepts connections and never answers: each request sent to it would wait for the whole time-out."""
    with FaultyServer(lambda *_: Fault(delay_s=0.01)) as good, FaultyServer(lambda *_: faults.HANG) as hung:
        async with InferencePool([hung.url, good.url], concurrency=4, timeout_s=0.3) as pool:
            found = [found async for _, found in _echo(pool, range(200))]
    assert not any(isinstance(outcome, RequestFailed) for outcome in found)
    assert len(hung.bodies) < 30


async def test_the_pool_gives_up_when_no_server_comes_back() -> None:
    with FaultyServer() as server:
        async with InferencePool([server.url], concurrency=2, outage_s=0.5) as pool:
            await pool.chat(**HELLO)
            server.stop()
            with pytest.raises(StageError, match="no server has answered for") as error:
                async for _ in _echo(pool, range(10)):
                    pass
    assert not isinstance(error.value, RequestFailed)


async def test_a_server_that_is_not_there_is_named_at_once() -> None:
    begun = time.monotonic()
    with pytest.raises(StageError, match=r"no server answers at http://127\.0\.0\.1:1/v1"):
        async with InferencePool(["http://127.0.0.1:1/v1"], concurrency=1):
            pass
    assert time.monotonic() - begun < 2


async def test_one_absent_endpoint_of_two_is_no_error_and_joins_later() -> None:
    with FaultyServer() as present, FaultyServer() as late:
        late.stop()
        async with InferencePool([late.url, present.url], concurrency=2) as pool:
            assert isinstance(await pool.chat(**HELLO), dict)
            late.start()
            await asyncio.sleep(0.5)
            async for _ in _echo(pool, range(20)):
                pass
        assert late.bodies


async def test_concurrency_is_the_number_in_flight_and_items_are_drawn_as_needed() -> None:
    drawn = 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for item in range(1_000_000):
            drawn += 1
            yield item

    with FaultyServer(lambda *_: Fault(delay_s=0.01)) as server:
        async with InferencePool([server.url], concurrency=8) as pool:
            count = 0
            async for _ in _echo(pool, items()):
                count += 1
                if count == 100:
                    break
        assert server.peak == 8
    assert drawn <= 100 + 3 * 8


async def test_a_defect_in_the_work_is_raised_and_not_swallowed() -> None:
    async def work(_item: int) -> None:
        raise ZeroDivisionError

    with FaultyServer() as server:
        async with InferencePool([server.url], concurrency=2) as pool:
            with pytest.raises(ZeroDivisionError):
                async for _ in pool.run(range(5), work):
                    pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_lets_requests_in_flight_finish(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    arrived: list[int] = []
    with FaultyServer(lambda *_: Fault(delay_s=0.3)) as server:
        with pytest.raises(KeyboardInterrupt):
            await _interrupted(server, number, arrived)
        assert sorted(arrived) == [0, 1, 2, 3]
        assert server.answered == 4
    assert signal.getsignal(number) == before


async def test_the_grace_period_ends() -> None:
    with FaultyServer(lambda *_: faults.HANG) as server:
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            await _interrupted(server, signal.SIGTERM, [], grace_s=0.3)
    assert 0.3 < time.monotonic() - begun < 2


async def test_two_hundred_short_requests_a_second_from_one_process() -> None:
    """By the CPU time of this process: how much of a core it gets is up to its neighbours."""
    command = [sys.executable, "-m", "tests.faulty_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stub:
        assert stub.stdout is not None
        async with InferencePool([stub.stdout.readline().strip()], concurrency=64) as pool:
            await pool.chat(**HELLO)
            begun, busy = time.monotonic(), time.process_time()
            count = sum([1 async for _ in _echo(pool, range(600))])
            wall, busy = time.monotonic() - begun, time.process_time() - busy
        stub.terminate()
    print(f"{count / wall:.0f} requests/s, {busy / count * 1e3:.2f} ms of CPU time each")
    assert count / busy >= 200


async def _echo(pool: InferencePool, items: Any) -> AsyncIterator[tuple[int, Any]]:
    async def work(item: int) -> dict[str, Any]:
        return await pool.chat(model="stub", messages=[{"role": "user", "content": str(item)}])

    async for result in pool.run(items, work):
        yield result


async def _interrupted(
    server: FaultyServer, number: signal.Signals, arrived: list[int], **settings: Any
) -> None:
    async with InferencePool([server.url], concurrency=4, **settings) as pool:
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), number)
        async for item, _ in _echo(pool, range(100)):
            arrived.append(item)
