"""Free ports, and ports in use."""

import socket

import pytest

from kvrelay.cli.cluster import ClusterError, choose_addresses
from kvrelay.cli.ports import FIRST, LAST, bindable, free_ports
from kvrelay.cli.spec import ClusterSpec


def test_free_ports_differ_and_lie_below_those_of_outgoing_connections() -> None:
    ports = free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20
    assert all(FIRST <= port < LAST for port in ports)


def test_a_port_in_use_is_named_with_the_flag_that_changes_it() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert not bindable("127.0.0.1", port)
        with pytest.raises(ClusterError, match=f"port {port} on 127.0.0.1 is in use; .*--router-port"):
            choose_addresses(ClusterSpec(router_port=port))


def test_every_program_of_a_cluster_has_its_own_address() -> None:
    at = choose_addresses(ClusterSpec(prefill=2, relay=2, main=2, router_port=0))
    everything = [at.router, at.redis, at.wan, *at.stages.values()]
    assert len(set(everything)) == 9
