"""kill -9 of the service at any moment, while a client trains, samples, saves and loads."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest
from tests.service.conftest import BASE, Service, done_by, printed

KILLS = int(os.environ.get("ROLLBOOK_KILLS", "8"))
STEPS = 2 + 2 * KILLS
pytestmark = [pytest.mark.service, pytest.mark.timeout(120 + 20 * KILLS)]


def test_a_client_does_not_notice(service: Service, service_at: Callable[..., Service]) -> None:
    """Its curve, samples and digests are those of a service that lived; every operation ended once.

    ROLLBOOK_KILLS=50 has it killed so often.
    """
    expected = service.run("everything", base=BASE, count=STEPS)
    killed = service_at("killed")
    program, chance, kills = killed.begin("everything", base=BASE, count=STEPS), random.Random(KILLS), 0
    while kills < KILLS and program.poll() is None:
        time.sleep(0.4 * chance.random())
        killed.kill()
        killed.start()
        kills += 1
    came = printed(program, timeout_s=60 + 20 * KILLS)
    assert kills == KILLS
    assert came == expected
    assert done_by(killed) == done_by(service)
    assert "Traceback" not in killed.errors.read_text()
