"""The interfaces of backends: a class that lacks a method cannot be instantiated."""

import pytest

import envactors as ea
from envactors.backends import base
from envactors.backends.process import ProcessUse
from envactors.backends.thread import ThreadUse
from envactors.remote import LocalNodes
from envactors.remote.backend import RemoteUse

INTERFACES = [base.Backend, base.Use, base.Worker, base.RowMemory]


@pytest.mark.parametrize(
    ("interface", "method"),
    [(interface, method) for interface in INTERFACES for method in sorted(interface.__abstractmethods__)],
)
def test_a_class_that_lacks_a_method_cannot_be_instantiated(interface, method):
    others = dict.fromkeys(interface.__abstractmethods__ - {method}, lambda self: None)
    with pytest.raises(TypeError, match=method):
        type("Incomplete", (interface,), others)()
    type("Complete", (interface,), {**others, method: None})()


def test_a_use_can_be_closed_again_and_unopened():
    for use in (
        ea.ProcessBackend().use({}),
        ea.ThreadBackend().use({}, None),
        ea.RemoteBackend(LocalNodes()).use({}, None),
    ):
        assert isinstance(use, (ProcessUse, ThreadUse, RemoteUse))
        use.close()
        use.close()
