"""Requests that share what each should have alone are found."""

from tests.check.mine import failure


def test_a_state_for_all_requests_is_found():
    change = ("        return {}", "        self.__dict__.setdefault('shared', {}); return self.__dict__['shared']")
    assert "beside others a request is drafted for otherwise" in failure("side_by_side", change)
