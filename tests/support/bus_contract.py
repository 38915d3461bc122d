"""What every bus must keep, as functions over a harness; `CHECKS` is the whole contract.

A check raises AssertionError when the bus breaks the promise in its name. They are functions and
not tests so that deliberately broken buses can be run through them too: each of those must fail.
"""

from tests.support import bus_checks_reading, bus_checks_trimming, bus_checks_writing
from tests.support.bus_steps import Check

CHECKS: list[Check] = [
    *bus_checks_reading.CHECKS,
    *bus_checks_writing.CHECKS,
    *bus_checks_trimming.CHECKS,
]
