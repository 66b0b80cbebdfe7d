//! Tasks that look around in the background: now and then, sooner when they are woken, until the engine is stopped or gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::Engine;

/// How often a task looks around by itself.
const PERIOD: Duration = Duration::from_millis(500);

/// Such a task, as others see it.
pub(crate) struct Background {
    wake: Arc<Notify>,
    stopping: AtomicBool,
    stopped: Notify,
}

impl Background {
    /// One that `wake` wakes.
    pub(crate) fn new(wake: Arc<Notify>) -> Arc<Self> {
        Arc::new(Background { wake, stopping: AtomicBool::new(false), stopped: Notify::new() })
    }

    /// It has something to do.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Ends the task; waits for it.
    pub(crate) async fn stop(&self) {
        if !self.stopping.swap(true, Ordering::AcqRel) {
            self.wake();
            self.stopped.notified().await;
        }
    }

    /// Starts the task, which does `round` each time.
    pub(crate) fn spawn<Round, Done>(self: &Arc<Self>, engine: &Arc<Engine>, round: Round)
    where
        Round: Fn(Arc<Engine>) -> Done + Send + 'static,
        Done: Future<Output = ()> + Send,
    {
        let (task, engine) = (self.clone(), Arc::downgrade(engine));
        tokio::spawn(async move {
            while !task.is_stopping() {
                // Held in the round only: else several tasks, one of which waits at any time, would keep it for ever.
                let Some(engine) = engine.upgrade() else { return };
                round(engine).await;
                let _woken = tokio::time::timeout(PERIOD, task.wake.notified()).await;
            }
            task.stopped.notify_one();
        });
    }
}
