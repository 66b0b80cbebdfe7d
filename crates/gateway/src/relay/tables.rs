//! Temporary tables, which follow a front's session to another node.
//!
//! ```text
//!   former session        front                   next session
//!   MOVED             ->
//!                     <-  end of the stream
//!                         connects            ->  accepted
//!   pieces of a copy  ->  passes them on      ->
//!   done              ->  end                 ->  loads the copy
//!                                             <-  done
//!                         repeats what is open
//! ```
//!
//! The former session rolls its transaction back, and copies its tables when the front sends
//! nothing more: that is the state before all that the front repeats. The front keeps none of it:
//! each side sends a piece when the next one accepts it.
//!
//! # Loss
//! If a node dies meanwhile, or the connection to the former session broke while a unit had no
//! answer, the tables are lost: it is not known whether the unit has changed them. The client's
//! connection then ends. Otherwise statements could use other tables with the same names.

use std::future::poll_fn;

use fulmar_engine::{Error, sqlstate};
use tokio::io::{AsyncWriteExt, DuplexStream, duplex};
use tokio::time::Instant;

use super::front::{Front, Stop};
use super::message;
use super::pump::poll_pooled;
use super::resume::Pause;
use super::scanner::Scanner;

/// Size of a message's kind and length.
const HEADER_BYTES: usize = 5;

/// The temporary tables of a front's former session.
pub(super) enum FormerTables {
    /// The session sends a copy.
    Sent(Messages),
    /// They are lost.
    Lost,
}

/// The messages of a session about its temporary tables. Others are skipped.
pub(super) struct Messages {
    stream: DuplexStream,
    /// The state of the stream: the session may have sent a part of a message.
    scanner: Scanner,
    /// Received, and not processed yet.
    bytes: Vec<u8>,
}

impl Messages {
    /// The kind and the body of the next message. `None` if the session has ended.
    async fn next(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut message = Vec::new();
        loop {
            while let Some(first) = self.bytes.first() {
                let kind = if self.scanner.is_inside() { self.scanner.kind() } else { *first };
                let (count, is_complete) = self.scanner.take(&self.bytes)?;
                let is_wanted = matches!(kind, message::TABLES_COPY | message::TABLES_DONE);
                let piece = self.bytes.drain(..count);
                if is_wanted {
                    message.extend(piece);
                }
                if is_wanted && is_complete {
                    return Some((kind, message.split_off(HEADER_BYTES)));
                }
            }
            self.bytes = poll_fn(|cx| poll_pooled(cx, &mut self.stream)).await?;
        }
    }

    /// Passes the copy on to the next session, and waits until that has loaded it. Returns the
    /// connection to it, and whether there are tables; `None` if they are lost.
    async fn pass_on(mut self, mut next: DuplexStream) -> Option<(DuplexStream, bool)> {
        let mut has_tables = false;
        loop {
            let (kind, body) = self.next().await?;
            let mut output = Vec::new();
            match kind {
                message::TABLES_COPY => message::put(&mut output, message::TABLES, &body),
                _ if body != [1] => return None,
                _ if !has_tables => return Some((next, false)),
                _ => message::put(&mut output, message::TABLES_END, &[]),
            }
            has_tables = true;
            next.write_all(&output).await.ok()?;
            if kind == message::TABLES_DONE {
                break;
            }
        }
        let mut loading = Messages { stream: next, scanner: Scanner::default(), bytes: Vec::new() };
        loop {
            match loading.next().await? {
                (message::TABLES_DONE, body) if body == [1] => return Some((loading.stream, true)),
                (message::TABLES_DONE, _) => return None,
                _ => {}
            }
        }
    }
}

impl Front {
    /// The session is lost. If it has temporary tables and can still send them, it is asked to.
    pub(super) async fn leave_tables(&mut self, stop: &Stop) {
        if !self.journal.has_tables || self.former_tables.is_some() {
            return;
        }
        let in_doubt = matches!(stop, Stop::Broken) && self.journal.has_unanswered();
        let (placeholder, _) = duplex(1);
        let mut stream = std::mem::replace(&mut self.upstream, placeholder);
        self.former_tables = Some(match in_doubt || stream.shutdown().await.is_err() {
            true => FormerTables::Lost,
            false => {
                let scanner = std::mem::take(&mut self.journal.from_session);
                FormerTables::Sent(Messages { stream, scanner, bytes: Vec::new() })
            }
        });
    }

    /// Lets the next session load the temporary tables of the former one. Returns the connection to
    /// it.
    pub(super) async fn carry_tables(
        &mut self,
        deadline: Instant,
        next: DuplexStream,
    ) -> Result<DuplexStream, Pause> {
        let former = match self.former_tables.take() {
            None => return Ok(next),
            Some(FormerTables::Sent(former)) => former,
            Some(FormerTables::Lost) => return Err(lost()),
        };
        let mut passing = Box::pin(former.pass_on(next));
        loop {
            match self.attend(deadline, passing.as_mut()).await {
                // No statement runs now.
                Err(Pause::Cancelled) => {}
                passed => {
                    let (next, has_tables) = passed?.ok_or_else(lost)?;
                    self.journal.has_tables = has_tables;
                    return Ok(next);
                }
            }
        }
    }
}

fn lost() -> Pause {
    let message = "terminating connection because its temporary tables were lost";
    let error = Error::new(sqlstate::ADMIN_SHUTDOWN, message)
        .detail("The node of the database failed, or the tables could not be copied to the next one.")
        .hint("Connect again, and create them again.");
    Pause::Stop(Stop::Fatal(error))
}
