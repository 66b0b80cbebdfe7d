//! Ports for servers that tests and benches start: nobody else takes one between its choice and its use.
//!
//! A port that the kernel chooses is free at that moment, and any process's next connection may come from it. So ports are
//! taken from below the range of such connections, and whoever takes one says so to all others of this kind, for as long as
//! its server lives: by a Unix socket with the port in its (abstract) name, which no two can have and which goes with its
//! process.

use std::io;
use std::net::TcpListener;
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use anyhow::Context;
use rand::RngExt;

/// Below Linux's range for connections, which begins at 32768.
const PORTS: Range<u16> = 20_000..32_000;

/// A port of the loopback address, for who holds this.
pub(super) struct Port {
    number: u16,
    _taken: UnixListener,
}

impl Port {
    /// One that nobody listens on.
    pub(super) fn free() -> anyhow::Result<Port> {
        // Not always the same, so that one that was just used rests a while.
        let first = rand::rng().random_range(PORTS);
        let mut ports = (first..PORTS.end).chain(PORTS.start..first);
        ports.find_map(Port::take).context("no free port")
    }

    fn take(number: u16) -> Option<Port> {
        let taken = announce(number).ok()?;
        // Others may use it too, who know nothing of this.
        TcpListener::bind(("127.0.0.1", number)).ok()?;
        Some(Port { number, _taken: taken })
    }

    pub(super) fn number(&self) -> u16 {
        self.number
    }
}

fn announce(number: u16) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(format!("fulmar-port-{number}"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_for_one_until_it_is_let_go() {
        let port = Port::free().unwrap();
        let number = port.number();
        assert!(
            PORTS.contains(&number) && Port::take(number).is_none(),
            "nobody listens on it, and it is taken"
        );
        drop(port);
        let port = Port::take(number).expect("it is free again");
        let server = TcpListener::bind(("127.0.0.1", number)).unwrap();
        drop(port);
        assert!(Port::take(number).is_none(), "a stranger has it");
        drop(server);
    }
}
