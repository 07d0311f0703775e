"""Messages ordered by counters, on two threads of the host: they arrive whole, without a race."""

import pytest

from tests.native.host_programs import RACE, Mutant, build, run, seen
from tests.native.shim import NEEDED

pytestmark = NEEDED
SIGNAL, PROGRAM = "include/merak/signal.h", "test/mailbox.cpp"

MUTANTS = {
    "no release": Mutant(SIGNAL, "__ATOMIC_RELEASE", "__ATOMIC_RELAXED"),
    "no acquire": Mutant(SIGNAL, "__ATOMIC_ACQUIRE", "__ATOMIC_RELAXED"),
    "no wrapping around": Mutant(
        SIGNAL, "int32_t(acquire(counter) - value) < 0", "acquire(counter) < value"
    ),
    "one message early": Mutant(SIGNAL, "- value) < 0", "- value) < -1"),
    "a slot too many": Mutant(PROGRAM, "number + 1 - kSlots", "number - kSlots"),
}


def test_messages_arrive_in_order_and_no_race(tmp_path):
    """When the receiver waits for every message, when the sender waits for every slot, and at
    random.
    """
    program = build(tmp_path, "mailbox", RACE)
    for seed in range(3):
        done = run(program, 3000, seed)
        assert done.returncode == 0, done.stdout + done.stderr[:2000]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant, tmp_path):
    """By what arrives, or by ThreadSanitizer."""
    assert seen(build(tmp_path, "mailbox", RACE, mutant=MUTANTS[mutant]), 3000), mutant
