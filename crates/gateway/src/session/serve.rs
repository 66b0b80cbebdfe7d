//! The loop of a session: receives messages, dispatches them, and ends or migrates the session.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::ready;
use std::time::Instant;

use fulmar_engine::{Error, sqlstate};
use fulmar_pgwire::protocol::MAX_MESSAGE_BYTES;
use fulmar_pgwire::protocol::backend::{self, Severity};
use fulmar_pgwire::protocol::frontend::{self, Malformed, Message};
use fulmar_pgwire::wire::{give_buffer, take_buffer};
use fulmar_service::PartitionService;
use tokio::net::TcpStream;
use tokio::sync::mpsc::OwnedPermit;

use super::handoff::{Departure, QueueEntry, WorkerContext};
use super::outcome::{End, MessageError};
use super::receive;
use super::state::Session;
use crate::fair::Gate;
use crate::metrics::WorkerMetrics;
use crate::relay::message;

impl Session {
    /// Ends the session: notifies the client and releases all resources.
    pub(crate) async fn end(mut self: Box<Self>, end: End) {
        // An incomplete message is dropped. Its memory is released before the error is sent, so
        // that other sessions do not wait for this client to receive the error.
        self.link.wire.input = Vec::new();
        self.received.release();
        if let Some(mut copy) = self.copy.take() {
            copy.abort(&self).await;
        }
        let may_continue = matches!(end, End::Moved | End::Server | End::Client);
        let is_told = !matches!(end, End::Client);
        match self.relayed {
            true => self.tell_end(end).await,
            false => self.send_shutdown_notice(end).await,
        }
        if may_continue {
            Box::pin(self.send_tables(is_told)).await;
        }
        self.link.partition.close().await;
        self.context.advisory.unlock_all(self.link.handle.pid);
        self.link.wire.shutdown().await;
    }

    /// Detaches the socket for the migration to another worker. `None` if it cannot be detached.
    pub(crate) fn detach(&mut self) -> Option<std::net::TcpStream> {
        self.link.wire.detach()
    }

    /// Attaches the socket after the migration to a worker.
    pub(crate) fn attach(&mut self, stream: Option<TcpStream>, metrics: Arc<WorkerMetrics>) {
        self.link.wire.attach(stream);
        self.metrics = metrics;
    }

    /// Serves the client until the session ends or migrates.
    pub(crate) async fn serve(&mut self, post: &WorkerContext) -> Departure {
        let (stats, counted) = (self.stats.clone(), self.counts_statements);
        let mut gate = Gate::new(self.identity.tenant.partition, &self.identity.limits);
        loop {
            let handled = {
                // Boxed, because its state is three times the size of an idle session. The box is
                // allocated first, so that the compiler can construct the state in it: copying 5 kB
                // takes 3 % of the user time of a point read.
                let mut work = Pin::from(Box::write(Box::new_uninit(), self.handle_input()));
                poll_fn(|cx| {
                    let began = Instant::now();
                    post.scaler.sample(post.number, began);
                    ready!(gate.poll_pass(cx, began));
                    let polled = work.as_mut().poll(cx);
                    let time = began.elapsed();
                    gate.worked(time);
                    // Updated after each poll, so that statistics include running statements.
                    if counted {
                        stats.record_busy_time(time);
                    }
                    polled
                })
                .await
            };
            match handled {
                Ok(true) => continue,
                Ok(false) => {}
                Err(end) => return Departure::End(end),
            }
            if let Some(slot) = self.migration_slot(post) {
                return Departure::Migrate(slot);
            }
            let stall = self.stall();
            match self.link.read(stall).await {
                Ok(count) => self.metrics.received(count),
                Err(closed) => return Departure::End(closed.into()),
            }
        }
    }

    /// A queue slot at another worker, if the session should migrate there and is idle.
    fn migration_slot(&self, post: &WorkerContext) -> Option<OwnedPermit<QueueEntry>> {
        let slot = post.reserve_home_slot(self.link.handle.pid)?;
        (self.link.can_migrate() && self.copy.is_none()).then_some(slot)
    }

    /// Sends a FATAL error with the reason why the session ends, unless the client ended it.
    pub(super) async fn send_shutdown_notice(&mut self, end: End) {
        let error = match end {
            End::Client | End::Fenced => return,
            End::Moved => Error::new(sqlstate::CANNOT_CONNECT_NOW, "the database was moved to another node")
                .hint("Connect again."),
            End::Server => {
                Error::new(sqlstate::ADMIN_SHUTDOWN, "terminating connection due to administrator command")
            }
            End::Malformed(Malformed(message)) => Error::new(sqlstate::PROTOCOL_VIOLATION, message),
            End::Fatal(error) => error,
        };
        backend::error(&mut self.output, &error, Severity::Fatal);
        let _ = self.link.send(&self.output).await; // the client may have disconnected already
    }

    /// Handles all complete messages that have been received. Returns true if more bytes arrived
    /// meanwhile.
    async fn handle_input(&mut self) -> Result<bool, End> {
        if self.output.capacity() == 0 {
            self.output = take_buffer().into();
        }
        let mut input = std::mem::take(&mut self.link.wire.input);
        let mut used = 0;
        let mut outcome = loop {
            if self.rejected.is_some() {
                let outcome = Box::pin(self.discard(&input, &mut used)).await;
                if outcome.is_err() || used == input.len() {
                    break outcome;
                }
            }
            match frontend::frame(&input[used..], MAX_MESSAGE_BYTES) {
                Ok(None) => break Ok(()),
                Err(malformed) => break Err(End::Malformed(malformed)),
                Ok(Some(frame)) => {
                    used += frame.size;
                    if self.relayed && message::is_internal(frame.kind) {
                        match Box::pin(self.handle_front_message(&frame)).await {
                            Ok(()) => continue,
                            ended => break ended,
                        }
                    }
                    let outcome = match frontend::message(&frame) {
                        Ok(message) => self.handle(message, &input[used..]).await,
                        Err(malformed) => Err(End::Malformed(malformed)),
                    };
                    if outcome.is_err() {
                        break outcome;
                    }
                }
            }
        };
        input.drain(..used); // the rest is an incomplete message
        if used > 0 && self.received.bytes() > 0 {
            self.received.release();
            receive::shrink(&mut input);
        }
        if outcome.is_ok() && !input.is_empty() {
            outcome = Box::pin(self.admit(&mut input)).await;
        }
        // Bytes that arrived while statements ran follow the incomplete message.
        let ahead = std::mem::replace(&mut self.link.wire.input, input);
        let more = !ahead.is_empty();
        self.link.wire.input.extend_from_slice(&ahead);
        give_buffer(ahead);
        if self.output.is_empty() {
            give_buffer(std::mem::take(&mut self.output).into_parts().0);
        }
        outcome.map(|()| more)
    }

    async fn handle(&mut self, message: Message<'_>, next: &[u8]) -> Result<(), End> {
        self.apply_privileges()?;
        self.apply_limits();
        let fault = match message {
            Message::Terminate => return Err(End::Client),
            Message::CopyData(bytes) => Box::pin(self.copy_data(bytes)).await,
            Message::CopyDone => Box::pin(self.copy_done()).await,
            Message::CopyFail { reason } => self.copy_failed(reason).await,
            Message::Flush | Message::Sync if self.copy.is_some() => Ok(()),
            _ if self.copy.is_some() => self.copy_interrupted().await,
            Message::Sync => self.sync().await,
            Message::Flush => self.flush().await.map_err(MessageError::from),
            _ if self.skipping => Ok(()),
            Message::Query { sql } => Box::pin(self.query(sql)).await,
            extended => match self.extended(extended, next).await {
                Err(MessageError::Statement(error)) => {
                    self.extended_failed(&error);
                    Ok(())
                }
                other => other,
            },
        };
        match fault {
            Ok(()) => Ok(()),
            Err(MessageError::End(end)) => Err(end),
            Err(MessageError::Statement(error)) => {
                self.report(&error);
                Ok(())
            }
        }
    }
}
