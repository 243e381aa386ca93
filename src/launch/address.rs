//! An address of this host that others could reach.

use std::net::{IpAddr, UdpSocket};

/// The address that outgoing traffic would carry, unless it is a loopback one. Nothing is sent:
/// connecting a datagram socket only asks the routing table.
pub fn of_this_host() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // TEST-NET-1 (RFC 5737): routed like any other address, and nobody's.
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}
