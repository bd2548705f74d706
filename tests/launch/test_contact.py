"""Hosts that answer, and those of which nothing can be concluded.

That a host which dies is noticed needs hosts: see tests/cluster.
"""

from __future__ import annotations

from hpc_train.launch.contact import FIRST, Contact, answering, resolved
from tests.waiting import wait_until

NOBODY = "no-such-host.invalid"  # RFC 6761: it never exists


def test_a_host_that_lives_answers_whether_or_not_it_listens():
    assert answering({"here": resolved("localhost")}) == {"here"}
    assert resolved(NOBODY) is None


def test_a_host_that_has_never_answered_is_not_taken_for_dead():
    contact = Contact(["localhost", NOBODY])
    wait_until(lambda: contact.knows("localhost"))
    assert not contact.knows(NOBODY)
    assert contact.lost(["localhost", NOBODY]) == []
    assert contact.lost_in(["localhost", NOBODY], FIRST) == []
