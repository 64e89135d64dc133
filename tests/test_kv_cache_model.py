"""The state machine of kv_machine.py on arrays of the host, and on a stream that works only when somebody looks."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from kv_machine import Caches


class OnFakeCuda(Caches):
    place_name = "fake cuda"
    look_every = 7


TestOnHost = Caches.TestCase
TestOnHost.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestOnFakeCuda = OnFakeCuda.TestCase
TestOnFakeCuda.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
