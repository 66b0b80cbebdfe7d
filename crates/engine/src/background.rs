//! Background tasks: run a function periodically, or earlier when woken, until the engine stops or
//! is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::Engine;

/// How often a task runs without being woken.
const INTERVAL: Duration = Duration::from_millis(500);

/// Handle of a background task.
pub(crate) struct Background {
    wake: Arc<Notify>,
    stopping: AtomicBool,
    stopped: Notify,
}

impl Background {
    /// Creates a task that `wake` wakes.
    pub(crate) fn new(wake: Arc<Notify>) -> Arc<Self> {
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
    pub(crate) async fn stop(&self) {
        if !self.stopping.swap(true, Ordering::AcqRel) {
            self.wake();
            self.stopped.notified().await;
        }
    }

    /// Starts the task, which calls `round` each time.
    pub(crate) fn spawn<Round, Done>(self: &Arc<Self>, engine: &Arc<Engine>, round: Round)
    where
        Round: Fn(Arc<Engine>) -> Done + Send + 'static,
        Done: Future<Output = ()> + Send,
    {
        let (task, engine) = (self.clone(), Arc::downgrade(engine));
        tokio::spawn(async move {
            while !task.is_stopping() {
                // The engine is held only during the round. Otherwise several tasks, of which one
                // always waits, would keep it alive forever.
                let Some(engine) = engine.upgrade() else { return };
                round(engine).await;
                let _woken = tokio::time::timeout(INTERVAL, task.wake.notified()).await;
            }
            task.stopped.notify_one();
        });
    }
}
