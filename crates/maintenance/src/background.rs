//! Background tasks: run a function periodically, or earlier when woken, until its owner stops or
//! is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// How often a task runs without being woken.
const INTERVAL: Duration = Duration::from_millis(500);

/// Handle of a background task.
pub struct Background {
    wake: Arc<Notify>,
    stopping: AtomicBool,
    stopped: Notify,
}

impl Background {
    /// Creates a task that `wake` wakes.
    pub fn new(wake: Arc<Notify>) -> Arc<Self> {
        Arc::new(Background { wake, stopping: AtomicBool::new(false), stopped: Notify::new() })
    }

    /// Runs the task soon.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Stops the task and waits for it.
    pub async fn stop(&self) {
        if !self.stopping.swap(true, Ordering::AcqRel) {
            self.wake();
            self.stopped.notified().await;
        }
    }

    /// Starts the task, which calls `round` each time.
    pub fn spawn<Owner, Round, Done>(self: &Arc<Self>, owner: &Arc<Owner>, round: Round)
    where
        Owner: Send + Sync + 'static,
        Round: Fn(Arc<Owner>) -> Done + Send + 'static,
        Done: Future<Output = ()> + Send,
    {
        let (task, owner) = (self.clone(), Arc::downgrade(owner));
        tokio::spawn(async move {
            while !task.is_stopping() {
                // The owner is held only during the round. Otherwise several tasks, of which one
                // always waits, would keep it alive forever.
                let Some(owner) = owner.upgrade() else { return };
                round(owner).await;
                let _woken = tokio::time::timeout(INTERVAL, task.wake.notified()).await;
            }
            task.stopped.notify_one();
        });
    }
}
