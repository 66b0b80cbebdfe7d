//! Reserves TCP ports for servers that tests and benchmarks start.
//!
//! A port that the kernel chooses is free only at that moment: the next outgoing connection of any
//! process may use it. Ports are therefore taken from below the range for outgoing connections. To
//! reserve a port against other users of this module, its owner binds a Unix socket with the port
//! in its abstract name for the lifetime of the server. Only one process can bind a name, and the
//! name is released when the process ends.

use std::io;
use std::net::TcpListener;
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use anyhow::Context;
use rand::RngExt;

/// Ports below Linux's range for outgoing connections, which starts at 32768.
const PORTS: Range<u16> = 20_000..32_000;

/// A reserved port of the loopback address. Dropping it releases the port.
pub struct ReservedPort {
    number: u16,
    _reservation: UnixListener,
}

impl ReservedPort {
    /// Reserves a port on which no process listens.
    pub fn reserve_free() -> anyhow::Result<ReservedPort> {
        // A random start makes it unlikely that a recently used port is reused soon.
        let first = rand::rng().random_range(PORTS);
        let mut ports = (first..PORTS.end).chain(PORTS.start..first);
        ports.find_map(ReservedPort::reserve).context("no free port")
    }

    fn reserve(number: u16) -> Option<ReservedPort> {
        let reservation = bind_name(number).ok()?;
        // Processes that do not use this module may listen on the port.
        TcpListener::bind(("127.0.0.1", number)).ok()?;
        Some(ReservedPort { number, _reservation: reservation })
    }

    /// The port's number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

fn bind_name(number: u16) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(format!("fulmar-port-{number}"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_is_exclusive_until_it_is_dropped() {
        let port = ReservedPort::reserve_free().unwrap();
        let number = port.number();
        assert!(PORTS.contains(&number), "the port must be below the ephemeral range");
        assert!(ReservedPort::reserve(number).is_none(), "a reserved port must not be reserved again");
        drop(port);
        let port = ReservedPort::reserve(number).expect("a dropped port is free");
        let server = TcpListener::bind(("127.0.0.1", number)).unwrap();
        drop(port);
        assert!(ReservedPort::reserve(number).is_none(), "a port with a listener must not be reserved");
        drop(server);
    }
}
