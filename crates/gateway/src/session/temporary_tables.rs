//! Temporary tables of a front's session, which continues at another node ([`crate::relay`]).
//!
//! The session that ends sends a copy when the front sends nothing more. The session that continues
//! loads it before its first statement. The node may not have noticed yet that it owns the
//! partition: the session tries again for a while.

use std::future::poll_fn;
use std::time::Duration;

use fulmar_engine::sqlstate;
use tokio::time::{Instant, sleep, timeout};

use super::memory_quota::{MAX_WAIT, Reservation};
use super::outcome::End;
use super::state::Session;
use crate::Result;
use crate::relay::message;

/// How long a session that ends waits for the front.
const FRONT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait until the node owns the partition.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(20);
/// The interval of attempts.
const ARRIVAL_INTERVAL: Duration = Duration::from_millis(20);

/// What a session knows about its temporary tables, for the front.
#[derive(Default)]
pub(super) struct TableTransfer {
    /// The front knows that there are tables.
    is_told: bool,
    /// The session repeats a transaction. If an answer differs, another session continues.
    pub(super) repeats: bool,
    /// The part of a copy that has arrived.
    arriving: Vec<u8>,
    /// There is no memory for the copy.
    is_refused: bool,
    reservation: Reservation,
}

impl Session {
    /// Tells whether there are temporary tables, if that has changed.
    pub(super) fn tell_tables(&mut self) {
        let has_tables = self.link.partition.session().has_temporary_tables();
        if self.relayed && has_tables != self.tables.is_told {
            self.tables.is_told = has_tables;
            message::put(&mut self.output, message::HAS_TABLES, &[has_tables.into()]);
        }
    }

    /// Handles a piece of a copy.
    pub(super) async fn receive_tables(&mut self, piece: &[u8]) {
        let memory = self.statements.memory().clone();
        let transfer = &mut self.tables;
        if transfer.is_refused {
            return;
        }
        let bytes = (transfer.arriving.len() + piece.len()) as u64;
        // Other sessions release the memory of theirs when they have loaded them.
        match transfer.reservation.grow_to_or_wait(&memory, bytes, MAX_WAIT).await {
            Ok(()) => transfer.arriving.extend_from_slice(piece),
            Err(error) => {
                tracing::info!(%error, "cannot receive the temporary tables of a session");
                transfer.is_refused = true;
                transfer.arriving = Vec::new();
                transfer.reservation.release();
            }
        }
    }

    /// Loads the copy that has arrived, and tells the front.
    pub(super) async fn load_tables(&mut self) -> Result<(), End> {
        let copy = std::mem::take(&mut self.tables.arriving);
        let mut loaded = false;
        if !std::mem::take(&mut self.tables.is_refused) {
            let result = self.load_when_arrived(&copy).await;
            if let Err(error) = &result {
                tracing::info!(%error, "cannot load the temporary tables of a session");
            }
            loaded = result.is_ok();
        }
        drop(copy);
        self.tables.reservation.release();
        self.tables.is_told = loaded;
        let mut answer = Vec::new();
        message::put(&mut answer, message::TABLES_DONE, &[loaded.into()]);
        Ok(self.link.send(&answer).await?)
    }

    async fn load_when_arrived(&mut self, copy: &[u8]) -> Result<()> {
        let deadline = Instant::now() + ARRIVAL_TIMEOUT;
        loop {
            match self.link.partition.session_mut().load_temporary_tables(copy).await {
                Err(error) if error.state() == sqlstate::PARTITION_MOVED && Instant::now() < deadline => {
                    sleep(ARRIVAL_INTERVAL).await;
                }
                loaded => return loaded,
            }
        }
    }

    /// Sends a copy of the temporary tables when the front sends nothing more. `waits` for that:
    /// the front was told that the session ends.
    pub(super) async fn send_tables(&mut self, waits: bool) {
        let session = self.link.partition.session();
        let continues = session.have_temporary_tables_moved() || self.tables.repeats;
        if !self.relayed || !self.tables.is_told || !continues {
            return;
        }
        if waits {
            let wire = &mut self.link.wire;
            let end = async {
                while poll_fn(|cx| wire.poll_read(cx)).await.is_ok() {
                    wire.input.clear();
                }
            };
            if timeout(FRONT_TIMEOUT, end).await.is_err() {
                return;
            }
        }
        let saved = self.link.partition.session_mut().save_temporary_tables().await;
        if let Err(error) = &saved {
            tracing::info!(%error, "cannot copy the temporary tables of a session");
        }
        let mut output = Vec::new();
        for piece in
            saved.iter().flatten().flat_map(|tables| tables.bytes().chunks(message::TABLES_PIECE_BYTES))
        {
            message::put(&mut output, message::TABLES_COPY, piece);
            if self.link.send(&output).await.is_err() {
                return;
            }
            output.clear();
        }
        message::put(&mut output, message::TABLES_DONE, &[saved.is_ok().into()]);
        let _ = self.link.send(&output).await; // the front may be gone
    }
}
