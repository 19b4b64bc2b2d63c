"""What makes an engine large enough for all schedules that it is to run."""

from __future__ import annotations

from sparroll.engines.make import roomiest
from sparroll.schedule import Schedule


def test_an_engine_has_room_for_the_longest_window_of_its_schedules() -> None:
    plain, by16, by64 = Schedule.fixed(64), Schedule.fixed(64).checked(16), Schedule.fixed(256).checked(64, 0.1)
    roomy = roomiest([by16, plain, by64])
    assert roomy is not None and roomy.check is not None and roomy.check.window_tokens == 64
    assert roomy.selector == by16.selector and roomy.dense_layers == by16.dense_layers
    assert roomiest([plain, by64]) is plain, "an engine that begins without checks has no room for them"
    assert roomiest([]) is None
