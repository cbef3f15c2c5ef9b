"""Answers that are lost on the way: what took effect is done once, however often the client asks again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest
from tests.fakes.proxies.lossy import LossyProxy
from tests.service.conftest import BASE, Service, done_by, printed

from rollbook.store.events import OperationAccepted

pytestmark = [pytest.mark.service, pytest.mark.timeout(480)]
SPARED = ("/client/", "/session_heartbeat", "/telemetry")
"""What the client does not ask again for, or not at once."""


def test_a_third_of_the_answers_is_lost(service: Service, service_at: Callable[..., Service]) -> None:
    """Losses, samples and digests are those of a client that got every answer; nothing was done twice."""
    expected = service.run("everything", base=BASE, count=4)
    lossy = service_at("lossy")
    with LossyProxy([lossy.port], 1 / 3, seed=1, spared=SPARED) as proxy:
        came = printed(lossy.begin("everything", proxy.url, base=BASE, count=4))
    assert came == expected
    assert done_by(lossy) == done_by(service)
    assert sum(lost for path, lost in proxy.lost.items() if path != "retrieve_future") > 5
    assert {"forward_backward", "optim_step", "asample", "save_weights_for_sampler"} & {*proxy.lost}
    assert lossy.errors.read_text() == ""


FORGETFUL = """
from rollbook.train.tenants.operations import Operations
Operations.repeated = lambda *_: False
"""


def test_these_tests_see_a_service_that_forgets(service_at: Callable[..., Service]) -> None:
    """One that takes every repetition for something new has operations twice in its log."""
    forgetful = service_at(first=FORGETFUL)
    with LossyProxy([forgetful.port], 1 / 3, seed=1, spared=SPARED) as proxy:
        program = forgetful.begin("train", proxy.url, base=BASE, count=8)
        by = time.monotonic() + 60
        while _most_accepted(forgetful) < 2 and time.monotonic() < by:
            time.sleep(0.1)
        program.kill()
        program.communicate()
    assert _most_accepted(forgetful) > 1


def _most_accepted(service: Service) -> int:
    """How often the operation that was accepted most often was."""
    events = service.log.events_of({OperationAccepted.KIND})
    return max(Counter(event.record.request_id for event in events).values(), default=0)
