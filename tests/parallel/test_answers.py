"""A store that does not answer keeps nobody waiting for long."""

import threading
import time

import pytest

from megatron_merak.parallel.answers import Answers


def test_an_answer_and_an_error_arrive():
    ask = Answers(5.0)
    assert ask(max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        ask(divmod, 1, 0)


def test_a_question_without_an_answer_is_given_up_and_no_other_is_put_meanwhile():
    ask = Answers(0.2)
    answered = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        ask(answered.wait)
    assert 0.2 <= time.monotonic() - began < 2
    asked = []
    with pytest.raises(TimeoutError):
        ask(asked.append, 1)
    answered.set()
    time.sleep(0.2)
    ask(asked.append, 2)
    assert asked == [2]
