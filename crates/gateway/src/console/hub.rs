//! Polls the sections while at least one page is open, once for all pages.

use std::sync::Arc;
use std::time::Duration;

use fulmar_meta::SYSTEM_TENANT;
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::sections::{SECTIONS, STATEMENT_TIMEOUT, read};
use super::sql::{Sessions, SqlError, SqlSession};
use crate::activity::now_ms;
use crate::identity::CONSOLE_APPLICATION;

/// The interval of polls.
const INTERVAL: Duration = Duration::from_secs(1);
/// The wait after a poll is this multiple of its duration, within [`INTERVAL`] and [`MAX_REST`]: in a
/// large cluster, polls of up to 500 ms take at most a tenth of the time.
const REST: u32 = 9;
/// Maximum wait after a poll.
const MAX_REST: Duration = Duration::from_secs(5);
/// The wait after a failed poll.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// A section whose table this version does not have, as JSON.
const MISSING: &str = "null";
/// Maximum duration of a poll: a node that does not answer delays `fulmar.load` by 2 s.
const POLL_TIMEOUT: Duration = Duration::from_secs(30);

/// The sections at a time, each as JSON.
#[derive(Clone, Default)]
pub(super) struct Snapshot {
    /// One per element of [`SECTIONS`]. `None` until it was read.
    pub(super) sections: [Option<Arc<str>>; SECTIONS.len()],
    /// Why the last poll failed, as JSON.
    pub(super) error: Option<Arc<str>>,
    /// When the last poll began that did not fail.
    pub(super) read: Option<Reading>,
}

/// The time of a poll.
#[derive(Clone, Copy)]
pub(super) struct Reading {
    at: Instant,
    at_unix_ms: u64,
}

impl Reading {
    fn now() -> Reading {
        Reading { at: Instant::now(), at_unix_ms: now_ms() }
    }

    /// The time, and its age, which does not depend on the browser's clock.
    pub(super) fn to_json(self) -> String {
        json!({ "at_ms": self.at_unix_ms, "age_ms": self.at.elapsed().as_millis() as u64 }).to_string()
    }
}

impl Snapshot {
    /// All sections as one object.
    pub(super) fn to_json(&self) -> String {
        let mut all = String::from("{");
        let named = SECTIONS.iter().map(|section| section.name).zip(&self.sections);
        for (name, json) in named.chain([("error", &self.error)]) {
            if let Some(json) = json {
                let comma = if all.len() > 1 { "," } else { "" };
                all.push_str(&format!("{comma}\"{name}\":{json}"));
            }
        }
        all + "}"
    }
}

/// The newest snapshot, for all pages. `None` before the first one.
pub(super) type Snapshots = watch::Receiver<Option<Arc<Snapshot>>>;

/// Polls the sections.
pub(super) struct Hub {
    sessions: Sessions,
    newest: watch::Sender<Option<Arc<Snapshot>>>,
    /// Whether the task that polls runs. Locked while a page subscribes and while the task ends.
    is_polling: Mutex<bool>,
    closing: CancellationToken,
}

impl Hub {
    pub(super) fn new(sessions: Sessions, closing: CancellationToken) -> Hub {
        Hub { sessions, newest: watch::Sender::new(None), is_polling: Mutex::new(false), closing }
    }

    /// Subscribes a page. Polls until all pages have dropped their subscriptions.
    pub(super) fn subscribe(self: &Arc<Self>) -> Snapshots {
        let mut is_polling = self.is_polling.lock();
        let snapshots = self.newest.subscribe();
        if !std::mem::replace(&mut *is_polling, true) {
            let hub = self.clone();
            tokio::spawn(async move {
                let closing = hub.closing.clone();
                let _ = closing.run_until_cancelled(hub.poll()).await;
                hub.newest.send_replace(None);
            });
        }
        snapshots
    }

    /// The newest snapshot, or the first one. `None` at a shutdown.
    pub(super) async fn first(self: &Arc<Self>) -> Option<Arc<Snapshot>> {
        let mut snapshots = self.subscribe();
        let waiting = snapshots.wait_for(|snapshot| snapshot.is_some());
        self.closing.run_until_cancelled(waiting).await?.ok()?.clone()
    }

    /// Whether the newest snapshot has this section.
    pub(super) fn has(&self, name: &str) -> bool {
        let newest = self.newest.borrow();
        let Some(snapshot) = newest.as_ref() else { return false };
        let mut sections = SECTIONS.iter().zip(&snapshot.sections);
        sections.any(|(section, json)| {
            section.name == name && json.as_deref().is_some_and(|json| json != MISSING)
        })
    }

    async fn poll(&self) {
        let (mut session, mut snapshot, mut number) = (None, Snapshot::default(), 0);
        loop {
            {
                let mut is_polling = self.is_polling.lock();
                if self.newest.receiver_count() == 0 {
                    *is_polling = false;
                    return;
                }
            }
            let began = Reading::now();
            let polled =
                tokio::time::timeout(POLL_TIMEOUT, self.poll_once(&mut session, &mut snapshot, number));
            let (error, rest) = match polled.await {
                Ok(Ok(error)) => {
                    number += 1;
                    snapshot.read = Some(began);
                    (error, (began.at.elapsed() * REST).clamp(INTERVAL, MAX_REST))
                }
                failed => {
                    // A new session reads everything again.
                    (session, number) = (None, 0);
                    let is_late = format!("the node did not answer within {POLL_TIMEOUT:?}");
                    let error = failed.map_or(is_late, |polled| polled.err().unwrap_or_default().message);
                    (Some(error), RETRY_INTERVAL)
                }
            };
            snapshot.error = error.map(|message| json!({ "message": message }).to_string().into());
            self.newest.send_replace(Some(Arc::new(snapshot.clone())));
            sleep(rest).await;
        }
    }

    /// Reads the sections that are due. Returns why one of them could not be read.
    async fn poll_once(
        &self,
        session: &mut Option<SqlSession>,
        snapshot: &mut Snapshot,
        number: u64,
    ) -> Result<Option<String>, SqlError> {
        // Taken, so that a session whose answer was not read completely is not used again.
        let mut open = match session.take() {
            Some(open) => open,
            None => self.sessions.open(SYSTEM_TENANT, None, CONSOLE_APPLICATION, STATEMENT_TIMEOUT).await?,
        };
        let mut error = None;
        for (section, json) in SECTIONS.iter().zip(&mut snapshot.sections) {
            let is_missing = number > 0 && json.as_deref() == Some(MISSING);
            if number.is_multiple_of(section.every) && !is_missing {
                let table = match read(&mut open, section.sql).await {
                    Ok(table) => table,
                    // The other sections are read, for example while the controller does not answer.
                    Err(failed) if !failed.state.is_empty() => {
                        error = Some(failed.message);
                        continue;
                    }
                    Err(failed) => return Err(failed),
                };
                let new = json!(table).to_string();
                if json.as_deref() != Some(&*new) {
                    *json = Some(new.into());
                }
            }
        }
        *session = Some(open);
        Ok(error)
    }
}
